"""The operators that run in a block."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Keeps each operator with its arguments and its result, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, result))
        return result
