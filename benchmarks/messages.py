"""What fastdpo logs."""

import logging


def collected() -> list[str]:
    """A list that gets the messages of fastdpo from now on."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("fastdpo")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return messages
