"""Sizes of memory, as options of the command line name them."""

from __future__ import annotations

import re
from decimal import Decimal

from ..checks import shown

UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}


def bytes_of(op: str, argument: str, size: str) -> int:
    """The number of bytes in a size such as "80GiB", "1.5 GB" or "1073741824".

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{op}: {argument} must be a number of bytes, or a size such as 80GiB; got {shown(size)}")
    return int(Decimal(match[1]) * UNITS[match[2].upper()])
