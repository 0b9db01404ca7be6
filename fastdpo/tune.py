"""Measures which kernels are fastest for a head on this GPU, and writes a head table.

    python -m fastdpo.tune --hidden 896 --vocabulary 151936 [--dtype bfloat16] [--frozen] [--table head.json]

The written entry applies to every head whose hidden size is at most `--hidden`: measure the widest
head you use. No entry is written if the fused kernel is not faster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from .ops import linear_logps
from .ops.head_table import VARIABLE, Entry, architecture

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
            os.environ[VARIABLE] = str(path)
            try:
                elapsed = time(run)
            except Exception as reason:  # a candidate that does not fit this device
                print(f"{blocks}: {type(reason).__name__}: {reason}")
                return float("inf")
            finally:
                del os.environ[VARIABLE]
        print(f"{'rows' if blocks is None else blocks}: {elapsed:.3f} ms")
        return elapsed

    rows = measured(None)
    best, blocks = min((measured(blocks), blocks) for blocks in CANDIDATES)
    return entry._replace(blocks=blocks) if best * MIN_SPEEDUP < rows else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastdpo.tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, required=True, help="size of the hidden states")
    parser.add_argument("--vocabulary", type=int, required=True, help="number of vocabulary entries")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="dtype of the matrix product"
    )
    parser.add_argument("--frozen", action="store_true", help="measure a head that is not trained (LoRA)")
    parser.add_argument(
        "--table", type=Path, default=Path("head.json"), help="JSON file to write or extend; default: head.json"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("fastdpo.tune: no GPU found (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    entry = Entry(architecture(torch.device("cuda", 0)), args.dtype, args.hidden, CANDIDATES[0])
    fastest = tune(step(args.hidden, args.vocabulary, getattr(torch, args.dtype), args.frozen), milliseconds, entry)
    if fastest is None:
        print("The fused kernel is not faster on this GPU: no entry was written.")
        return 0
    before = json.loads(args.table.read_text()) if args.table.exists() else []
    args.table.write_text(json.dumps([fastest._asdict(), *before], indent=1) + "\n")
    print(f"Wrote {args.table}. Use it with {VARIABLE}={args.table.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
