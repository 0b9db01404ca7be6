"""Which kernels a head runs on a GPU, by architecture, sizes and dtype. Never by the number of tokens: batches differ.

    rows     a cuBLAS product into a tile, and one kernel that reads it once
    fused    a product of our own that ends in the exponential (`kernels/linear_exp.py`)

The table holds what has been measured to be faster than `rows`; what it doesn't name runs `rows`. The environment
variable FASTDPO_HEAD_TABLE names a JSON file with a list of entries that are looked up first.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from ..kernels.linear_exp import Blocks

VARIABLE = "FASTDPO_HEAD_TABLE"


class Entry(NamedTuple):
    """Heads that run `fused`.

    Attributes:
        architecture: "sm90", "gfx942", ...; "*" is any.
        dtype: what is multiplied: "bfloat16" or "float16". In float32 the anchored exponentials would cost digits.
        max_width: the largest hidden size.
        blocks: the fields of `kernels.linear_exp.Blocks`: tokens, words, width, warps, stages.
    """

    architecture: str
    dtype: str
    max_width: int
    blocks: tuple[int, int, int, int, int]


TABLE: tuple[Entry, ...] = ()


def fused_blocks(width: int, dtype: torch.dtype, device: torch.device) -> Blocks | None:
    """How the fused kernel cuts a head of this hidden size; None where it is not to be used.

    Raises:
        ValueError: the file that FASTDPO_HEAD_TABLE names is not a list of entries.
    """
    from ..kernels.linear_exp import Blocks

    name = str(dtype).removeprefix("torch.")
    for entry in _entries():
        fits = entry.dtype == name and width <= entry.max_width
        if fits and entry.architecture in ("*", architecture(device)):
            return Blocks(*entry.blocks)
    return None


F = TypeVar("F", bound=Any)


def _constant_while_tracing(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import Dynamo, and with it Triton, along with fastdpo."""
    function._dynamo_marked_constant = True
    return function


@_constant_while_tracing  # a compiler can't trace what reads a file
def _entries() -> tuple[Entry, ...]:
    return *_from_file(os.environ.get(VARIABLE, "")), *TABLE


@_constant_while_tracing
def architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


@lru_cache
def _from_file(path: str) -> tuple[Entry, ...]:
    if not path:
        return ()
    try:
        given = json.loads(Path(path).read_text())
        return tuple(Entry(**{**entry, "blocks": tuple(entry["blocks"])}) for entry in given)
    except (OSError, ValueError, TypeError, KeyError) as reason:
        rule = f"{VARIABLE} must name a JSON list of objects of {', '.join(Entry._fields)}"
        raise ValueError(f"linear_logps: {rule}; got {path}: {reason}") from None
