"""Builds of flash-attention libraries from the Kernels Hub, as transformers loads them."""

from __future__ import annotations

from types import ModuleType

builds: dict[str, ModuleType] = {}


def add(backend: str, module: ModuleType) -> None:
    """Keeps the module with the functions of a build. The first one of a backend stays."""
    builds.setdefault(backend, module)


def of(backend: str) -> ModuleType | None:
    """The module of the build for a backend."""
    return builds.get(backend)


def described() -> list[str]:
    """The builds, by names that differ between versions."""
    return [f"{backend} as {module.__name__}" for backend, module in sorted(builds.items())]
