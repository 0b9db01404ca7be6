"""The table that chooses the kernels of a head on a GPU, by architecture, hidden size and dtype.

    rows     a cuBLAS product into a tile, and one kernel that reads the tile once
    fused    a matrix product with the exponential in its epilogue (`kernels/linear_exp.py`)

A head runs `fused` if the table has an entry for it, and `rows` otherwise, unless a measurement on the
device says something else (`tuning`). The table holds the heads for which `fused` was measured to be
faster. The environment variable FASTDPO_HEAD_TABLE names a JSON file with a list of further entries
that take precedence, over measurements too. The choice never depends on the number of tokens, which
differs between batches.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from .devices import constant_while_tracing

if TYPE_CHECKING:
    from ..kernels.linear_exp import FusedConfig

VARIABLE = "FASTDPO_HEAD_TABLE"


class Entry(NamedTuple):
    """A set of heads that run `fused`.

    Attributes:
        architecture: "sm90", "gfx942", ..., or "*" for any.
        dtype: the dtype of the matrix product, "bfloat16" or "float16". In float32, the anchored
            exponentials would lose digits.
        max_width: the largest hidden size.
        blocks: the fields of `kernels.linear_exp.FusedConfig`: block sizes of tokens, vocabulary
            and hidden size, warps, stages.
    """

    architecture: str
    dtype: str
    max_width: int
    blocks: tuple[int, int, int, int, int]


TABLE: tuple[Entry, ...] = ()

CANDIDATES = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 4),
    (64, 256, 64, 4, 4),
    (256, 128, 64, 8, 3),
)
"""Blocks of the fused kernel (see `Entry`) that may be faster than `rows`."""

SHARED_MEMORY = {
    **dict.fromkeys(("sm80", "sm87"), 163 << 10),
    **dict.fromkeys(("sm86", "sm89", "sm120", "sm121"), 99 << 10),
    **dict.fromkeys(("sm90", "sm100", "sm103"), 227 << 10),
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
"""The bytes of shared memory that one program may use, by architecture."""

BUFFERS_EACH_STAGE = ("sm90", "sm100", "sm103")
"""Architectures whose pipelines keep the blocks of every stage in shared memory. Others keep those of one less."""


def fused_config(width: int, dtype: torch.dtype, device: torch.device) -> FusedConfig | None:
    """The configuration of the fused kernel for a head, or None if the head runs `rows`.

    Raises:
        ValueError: the file that FASTDPO_HEAD_TABLE names is not a list of entries.
    """
    from ..kernels.linear_exp import FusedConfig

    name = str(dtype).removeprefix("torch.")
    for entry in _entries():
        fits = entry.dtype == name and width <= entry.max_width
        if fits and entry.architecture in ("*", architecture(device)):
            return FusedConfig(*entry.blocks)
    return None


def fused_candidates(architecture: str, dtype: torch.dtype) -> list[FusedConfig]:
    """The `CANDIDATES` that fit the shared memory of an architecture, for products in `dtype`.

    All of them for an unknown one. None in float32, in which the anchored exponentials would lose digits.
    """
    from ..kernels.linear_exp import FusedConfig

    configs = [FusedConfig(*blocks) for blocks in CANDIDATES if dtype.itemsize == 2]
    limit = SHARED_MEMORY.get(architecture)
    return [x for x in configs if limit is None or shared_memory(x, architecture) <= limit]


def shared_memory(config: FusedConfig, architecture: str) -> int:
    """The bytes that the blocks of a fused product in 16 bits take, without some for barriers."""
    stages = config.stages - (architecture not in BUFFERS_EACH_STAGE)
    return stages * (config.block_n + config.block_v) * config.block_d * 2


@constant_while_tracing
def is_named() -> bool:
    """Whether FASTDPO_HEAD_TABLE names a file."""
    return bool(os.environ.get(VARIABLE))


@constant_while_tracing  # the compiler cannot trace code that reads a file
def _entries() -> tuple[Entry, ...]:
    return *from_file(os.environ.get(VARIABLE, "")), *TABLE


@constant_while_tracing
def architecture(device: torch.device) -> str:
    """The name of a device in the table: "sm90", "gfx942", or its type if it is not a GPU."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


@lru_cache
def from_file(path: str) -> tuple[Entry, ...]:
    """The entries of a head table. An empty path has none."""
    if not path:
        return ()
    try:
        given = json.loads(Path(path).read_text())
        return tuple(Entry(**{**entry, "blocks": tuple(entry["blocks"])}) for entry in given)
    except (OSError, ValueError, TypeError, KeyError) as reason:
        rule = f"{VARIABLE} must name a JSON list of objects of {', '.join(Entry._fields)}"
        raise ValueError(f"linear_logps: {rule}; got {path}: {reason}") from None
