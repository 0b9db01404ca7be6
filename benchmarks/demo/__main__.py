"""Trains one small model twice with TRL's DPOTrainer, as shipped and with fastdpo.

    python -m benchmarks.demo [--model DIR] [--dataset PATH] [--steps N] [--out DIR]

Both runs use the same weights, pairs, order and settings, in two processes, one after the other.
Tables of losses and costs are printed; demo.json and demo.png go to the output directory.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from rich.console import Console

from benchmarks.demo.comparison import LOSS_TOLERANCE, Measurements, compare
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
    """Runs a module with its log in a file. If it fails, prints the end of the log and exits."""
    log = out / f"{name}.log"
    command = [sys.executable, "-m", *arguments]
    with log.open("w") as stderr:
        code = subprocess.run(command, stderr=stderr, env=ENVIRONMENT | os.environ).returncode
    if code:
        tail = "".join(deque(log.open(), LOG_LINES)).strip()
        console.print(f"\n{name} failed with exit code {code}. Last lines of {log}:\n", style="bold red")
        console.print(tail or "(empty)", markup=False, soft_wrap=True)
        sys.exit(1)


def run_side(console: Console, args: argparse.Namespace, model: Path, name: str) -> Measurements:
    """Runs one side and returns its measurements."""
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
        description="Train one model with TRL's DPOTrainer, as shipped and with fastdpo, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a local model with its tokenizer; by default, a small one is built")
    parser.add_argument(
        "--dataset",
        type=Path,
        default=PREFERENCES,
        help="preference pairs: .jsonl, .json, .parquet or a save_to_disk directory",
    )
    parser.add_argument(
        "--pairs", type=int, default=40, help="train on the first N pairs, for as many epochs as needed"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="pairs per step")
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
            f"The relative difference of the losses is {comparison.loss_relative_difference:.1e}, "
            f"more than the {LOSS_TOLERANCE:.0e} that rounding explains.",
            style="bold red",
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
