"""What fastdpo logs in a process without pytest."""

import logging


def recorded_messages() -> list[str]:
    """A list of the messages that fastdpo logs from now until the next call."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("fastdpo")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    return messages
