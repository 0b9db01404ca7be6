"""The logger of the library."""

from __future__ import annotations

import logging

logger = logging.getLogger("fastdpo")


def warn(message: str) -> None:
    """Logs a warning that begins with "fastdpo", since programs may print messages without the names
    of loggers.
    """
    logger.warning("fastdpo: %s", message)
