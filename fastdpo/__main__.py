"""The command line: `fastdpo COMMAND`, or `python -m fastdpo COMMAND`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import run


def main() -> None:
    args = parser().parse_args()
    args.start(args)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it returns has the function to be called with it as `start`."""
    parser = argparse.ArgumentParser(prog="fastdpo")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_doctor(commands)
    _add_tune(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what fastdpo can do on this machine",
        description="Says what fastdpo can do on this machine: which packages, devices, trainers and kernels there "
        "are, and whether each op agrees with its definition. The exit status is 1 if something that was "
        "asked for is not available, or if an op is wrong.",
        epilog="example: fastdpo doctor trl.DPOTrainer --model path/to/model",
    )
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help="a trainer or package that must be patchable")
    parser.add_argument("--model", metavar="PATH", help="a model that must pack; its weights are loaded")
    parser.add_argument("--cache", metavar="DIRECTORY", help="a cache of reference log-probabilities to check")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(start=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    from . import doctor

    try:
        report = doctor.examine(args.trainers, args.model, args.cache)
    except (OSError, ValueError) as error:
        sys.exit(f"fastdpo doctor: {error}")
    print(doctor.as_json(report) if args.json else doctor.as_text(report))
    sys.exit(1 if doctor.failed(report) else 0)


def _add_tune(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure which kernels are fastest for a head on this GPU",
        description="Measures which kernels are fastest for a head on this GPU, and adds an entry to a head table if "
        "the fused kernel is. The entry applies to every head whose hidden size is at most that of the command.",
        epilog="example: fastdpo tune --hidden 896 --vocabulary 151936 --table head.json",
    )
    parser.add_argument("--hidden", type=int, required=True, help="size of the hidden states")
    parser.add_argument("--vocabulary", type=int, required=True, help="number of vocabulary entries")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="dtype of the matrix product"
    )
    parser.add_argument("--frozen", action="store_true", help="measure a head that is not trained (LoRA)")
    parser.add_argument(
        "--table", type=Path, default=Path("head.json"), help="JSON file to write or extend; default: head.json"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(start=_tune)


def _tune(args: argparse.Namespace) -> None:
    from . import tune

    try:
        entry = tune.run(args.hidden, args.vocabulary, args.dtype, args.frozen, args.table)
    except (OSError, ValueError) as error:
        sys.exit(f"fastdpo tune: {str(error).removeprefix('tune: ')}")
    if args.json:
        print(json.dumps({"table": str(args.table), "entry": None if entry is None else entry._asdict()}))
    elif entry is None:
        print("The fused kernel is not faster on this GPU: no entry was written.")
    else:
        print(f"Wrote {args.table}. Use it with {tune.VARIABLE}={args.table.resolve()}")


def _add_run(commands: argparse._SubParsersAction) -> None:
    runner = commands.add_parser(
        "run",
        help="run a training program unchanged, with its trainers patched",
        usage="fastdpo run [options] script.py|-m module|command [arguments]",
        epilog="example: fastdpo run --strict trl dpo --config dpo.yaml",
    )
    runner.add_argument("--only", action="append", default=[], metavar="TRAINER", help="patch only this trainer")
    sharing = runner.add_mutually_exclusive_group()
    sharing.add_argument(
        "--no-share-prompts",
        dest="share_prompts",
        action="store_false",
        help="compute a prompt for each of its answers",
    )
    sharing.add_argument(
        "--no-share-random-prompts",
        dest="share_prompts",
        action="store_const",
        const="deterministic",
        help="do so while dropout is active",
    )
    runner.add_argument("--memory-budget", type=int, metavar="BYTES", help="gradient tiles of the head to keep")
    runner.add_argument(
        "--reference-memory",
        metavar="DIRECTORY",
        help="remember reference log-probabilities in this directory, or in this process: yes",
    )
    runner.add_argument("--verify", action="store_true", help="compare the first fused calls with stock ones")
    runner.add_argument("--log-savings", action="store_true", help="add fastdpo/tokens_saved to the logs")
    runner.add_argument("--strict", action="store_true", help="raise an error where something is not fused")
    runner.add_argument("--max-tokens", type=int, metavar="TOKENS", help="cut steps by this many distinct tokens")
    runner.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with its arguments")
    runner.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    runner.set_defaults(start=_run)


def _run(args: argparse.Namespace) -> None:
    options: dict[str, object] = {"share_prompts": args.share_prompts}
    options |= {name: True for name in ("verify", "log_savings") if getattr(args, name)}
    if args.memory_budget is not None:
        options["memory_budget"] = args.memory_budget
    if args.reference_memory is not None:
        options["reference_memory"] = args.reference_memory == "yes" or args.reference_memory
    if args.max_tokens is not None:
        options["max_tokens"] = args.max_tokens
    try:
        command = args.program if args.module is None else ["-m", *args.module]
        run.run(command, args.only, strict=args.strict, **options)
    except ValueError as error:
        sys.exit(f"fastdpo {error}")


if __name__ == "__main__":
    main()
