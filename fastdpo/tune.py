"""Measures which kernels a head should run on this GPU, and writes a table that FASTDPO_HEAD_TABLE can name.

    python -m fastdpo.tune --hidden 896 --vocabulary 151936 [--dtype bfloat16] [--frozen] [--table head.json]

The entry that is written, if there is one, is for every head that is at most so wide: measure the widest you have.
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
GAIN = 1.02  # how much faster a fused head must be than the other
BLOCKS = (  # tokens, words, width, warps, stages
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 4),
    (64, 256, 64, 4, 4),
    (256, 128, 64, 8, 3),
)


def step(hidden: int, vocabulary: int, dtype: torch.dtype, frozen: bool) -> Callable[[], None]:
    """Forward and backward of a head."""
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
    """The entry with the fastest blocks, or None where no fused head is faster than the other by `GAIN`."""

    def measured(blocks: tuple[int, ...] | None) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.json"
            path.write_text(json.dumps([] if blocks is None else [{**entry._asdict(), "blocks": blocks}]))
            os.environ[VARIABLE] = str(path)
            try:
                found = time(run)
            except Exception as reason:  # blocks that don't fit this device
                print(f"{blocks}: {type(reason).__name__}: {reason}")
                return float("inf")
            finally:
                del os.environ[VARIABLE]
        print(f"{'rows' if blocks is None else blocks}: {found:.3f} ms")
        return found

    rows = measured(None)
    best, blocks = min((measured(blocks), blocks) for blocks in BLOCKS)
    return entry._replace(blocks=blocks) if best * GAIN < rows else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fastdpo.tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, required=True, help="size of the hidden states")
    parser.add_argument("--vocabulary", type=int, required=True, help="words")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="what is multiplied")
    parser.add_argument("--frozen", action="store_true", help="a head that is not trained (LoRA)")
    parser.add_argument(
        "--table", type=Path, default=Path("head.json"), help="written, or added to; default: head.json"
    )
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("fastdpo.tune: a GPU is needed; torch sees none", file=sys.stderr)
        return 2
    entry = Entry(architecture(torch.device("cuda", 0)), args.dtype, args.hidden, BLOCKS[0])
    found = tune(step(args.hidden, args.vocabulary, getattr(torch, args.dtype), args.frozen), milliseconds, entry)
    if found is None:
        print("No fused head is faster here: nothing is written.")
        return 0
    before = json.loads(args.table.read_text()) if args.table.exists() else []
    args.table.write_text(json.dumps([found._asdict(), *before], indent=1) + "\n")
    print(f"Written: {args.table}. Use it with {VARIABLE}={args.table.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
