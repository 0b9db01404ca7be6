"""Measures which kernels are fastest for a head on this GPU, and writes a head table.

    fastdpo tune --hidden 896 --vocabulary 151936 [--dtype bfloat16] [--frozen] [--table head.json]

The written entry applies to every head whose hidden size is at most `--hidden`: measure the widest
head you use. No entry is written if the fused kernel is not faster.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from . import checks
from .logs import STRICT
from .ops import linear_logps
from .ops.head_table import VARIABLE, Entry, architecture, from_file

TOKENS = 8192
MIN_SPEEDUP = 1.02  # of the fused kernel over the table's `rows`, for an entry to be written
CANDIDATES = (  # block sizes of tokens, vocabulary and hidden size, warps, stages
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 4),
    (64, 256, 64, 4, 4),
    (256, 128, 64, 8, 3),
)


def step(hidden: int, vocabulary: int, dtype: torch.dtype, frozen: bool) -> Callable[[], None]:
    """A function that runs forward and backward of a head of `TOKENS` tokens on the GPU."""
    h = torch.randn(TOKENS, hidden, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden, device="cuda") * hidden**-0.5).to(dtype).requires_grad_(not frozen)
    targets = torch.randint(vocabulary, (TOKENS,), device="cuda")
    leaves = [h] if frozen else [h, weight]

    def run() -> None:
        torch.autograd.grad(linear_logps(h, weight, targets, outputs=("entropy", "is_top1")).logps.sum(), leaves)

    return run


def milliseconds(run: Callable[[], None]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=200, rep=1000, return_mode="median"))  # type: ignore[arg-type]


def tune(run: Callable[[], None], time: Callable[[Callable[[], None]], float], entry: Entry) -> Entry | None:
    """The entry with the fastest blocks, or None if `rows` is as fast, up to `MIN_SPEEDUP`.

    Args:
        run: runs the head once.
        time: measures `run`, in milliseconds.
        entry: the entry to be completed with blocks.
    """

    def measured(blocks: tuple[int, ...] | None) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.json"
            path.write_text(json.dumps([] if blocks is None else [{**entry._asdict(), "blocks": blocks}]))
            strict = {VARIABLE: str(path), STRICT: "1"}  # a candidate that does not work must not be replaced
            with mock.patch.dict(os.environ, strict):
                try:
                    elapsed = time(run)
                except Exception as reason:  # a candidate that does not fit this device
                    print(f"{blocks}: {type(reason).__name__}: {reason}", file=sys.stderr)
                    return float("inf")
        print(f"{'rows' if blocks is None else blocks}: {elapsed:.3f} ms", file=sys.stderr)
        return elapsed

    rows = measured(None)
    best, blocks = min((measured(blocks), blocks) for blocks in CANDIDATES)
    return entry._replace(blocks=blocks) if best * MIN_SPEEDUP < rows else None


def run(hidden: int, vocabulary: int, dtype: str, frozen: bool, table: Path) -> Entry | None:
    """Measures a head on the first GPU, and adds an entry to a head table if there is anything to gain.

    Args:
        hidden: size of the hidden states.
        vocabulary: number of vocabulary entries.
        dtype: "bfloat16" or "float16", of the matrix product.
        frozen: whether the head is not trained.
        table: JSON file to write or extend.

    Returns:
        The entry that was written, or None if the fused kernel is not faster.

    Raises:
        ValueError: a size is not positive, the file is not a head table, or there is no GPU.
        OSError: the file cannot be read or written.
    """
    for name, size in (("hidden", hidden), ("vocabulary", vocabulary)):
        checks.require(size > 0, "tune", name, "be positive", size)
    before = [entry._asdict() for entry in from_file(str(table))] if table.exists() else []
    if not torch.cuda.is_available():
        raise ValueError("tune: no GPU found (torch.cuda.is_available() is False)")
    entry = Entry(architecture(torch.device("cuda", 0)), dtype, hidden, CANDIDATES[0])
    fastest = tune(step(hidden, vocabulary, getattr(torch, dtype), frozen), milliseconds, entry)
    if fastest is not None:
        table.write_text(json.dumps([fastest._asdict(), *before], indent=1) + "\n")
    return fastest
