"""Trains one small model twice with TRL's DPOTrainer, as it is and with fastdpo, and compares the two.

    python -m benchmarks.demo [--model DIR] [--dataset PATH] [--steps N] [--batch-size N] [--out DIR]

Each part runs in a process of its own, one after the other, and sees the same weights, the same pairs in the same
order and the same settings. The tables go to the terminal; demo.json and demo.png to the output directory.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from rich.console import Console

from benchmarks.demo.comparison import LOSS_TOLERANCE, Side, compare
from benchmarks.demo.plot import draw
from benchmarks.demo.tables import print_comparison

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
PREFERENCES = Path(__file__).with_name("preferences.jsonl")
LOG_LINES = 25


def run(console: Console, out: Path, name: str, *arguments: str) -> None:
    """Runs one module, its progress on the terminal and its log in a file; ends the demo if it fails."""
    log = out / f"{name}.log"
    command = [sys.executable, "-m", *arguments]
    with log.open("w") as errors:
        code = subprocess.run(command, stderr=errors, env=ENVIRONMENT | os.environ).returncode
    if code:
        tail = "".join(deque(log.open(), LOG_LINES)).strip()
        console.print(f"\n{name} failed with exit code {code}. The end of {log}:\n", style="bold red")
        console.print(tail or "(empty)", markup=False, soft_wrap=True)
        sys.exit(1)


def run_side(console: Console, args: argparse.Namespace, model: Path, name: str) -> Side:
    """Measures one side and returns what it wrote."""
    result = args.out / f"{name}.json"
    options = {
        "--model": model,
        "--dataset": args.dataset,
        "--pairs": args.pairs,
        "--steps": args.steps,
        "--batch-size": args.batch_size,
        "--learning-rate": args.learning_rate,
        "--out": result,
    }
    flat = [str(part) for option in options.items() for part in option]
    run(console, args.out, name, "benchmarks.demo.side", name, *flat)
    return json.loads(result.read_text())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Train the same model with TRL's DPOTrainer as it is and with fastdpo, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a local model with its tokenizer; without it, a small one is made")
    parser.add_argument(
        "--dataset", type=Path, default=PREFERENCES, help="pairs: .jsonl, .json, .parquet, save_to_disk"
    )
    parser.add_argument("--pairs", type=int, default=40, help="train on the first N pairs, again and again")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)

    model = args.model or args.out / "model"
    if not args.model:
        run(console, args.out, "model", "benchmarks.demo.model", "--dataset", str(args.dataset), "--out", str(model))
    stock, fastdpo = (run_side(console, args, model, name) for name in ("stock", "fastdpo"))

    comparison = compare(stock, fastdpo)
    summary = comparison._asdict() | {"costs": [cost._asdict() | {"ratio": cost.ratio} for cost in comparison.costs]}
    (args.out / "demo.json").write_text(json.dumps({"summary": summary, "stock": stock, "fastdpo": fastdpo}, indent=1))
    draw(stock, fastdpo, args.out / "demo.png")
    print_comparison(console, stock, fastdpo, comparison)
    console.print(f"Written: {args.out / 'demo.json'}, {args.out / 'demo.png'}")
    if not comparison.same_loss:
        console.print(
            f"The losses differ by {comparison.loss_relative_difference:.1e} of their value, "
            f"more than the {LOSS_TOLERANCE:.0e} that rounding explains.",
            style="bold red",
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
