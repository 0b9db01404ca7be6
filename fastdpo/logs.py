"""The logger of the library, and strict mode, in which what would be logged as disabled is an error."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("fastdpo")

STRICT = "FASTDPO_STRICT"
"""The environment variable that turns every fallback into an error."""


class NotFused(RuntimeError):
    """Raised instead of a fallback, with `FASTDPO_STRICT=1` or where ranks share sequences. The message holds the
    reason.
    """


def is_set(variable: str, default: str) -> bool:
    """Whether an environment variable that must be 0 or 1, or its default, is 1."""
    value = os.environ.get(variable) or default
    if value not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1; got {value!r}")
    return value == "1"


def strict() -> bool:
    """Whether `FASTDPO_STRICT` turns every fallback into an error."""
    return is_set(STRICT, default="0")


def report(message: str) -> None:
    """Logs that something is disabled, as a warning. In strict mode, raises `NotFused` instead."""
    if strict():
        raise NotFused(f"{message} (FASTDPO_STRICT=1)")
    warn(message)


def warn(message: str) -> None:
    """Logs a warning that begins with "fastdpo", since programs may print messages without the names
    of loggers.
    """
    logger.warning("fastdpo: %s", message)
