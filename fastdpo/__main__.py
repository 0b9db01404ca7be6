"""The command line: `python -m fastdpo run ...`."""

from __future__ import annotations

import argparse
import sys

from . import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="fastdpo")
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser(
        "run",
        help="run a training program unchanged, with its trainers patched",
        usage="fastdpo run [options] script.py|-m module|command [arguments]",
    )
    runner.add_argument("--only", action="append", default=[], metavar="TRAINER", help="patch only this trainer")
    runner.add_argument("--no-share-prompts", action="store_true", help="compute a prompt for each of its answers")
    runner.add_argument("--memory-budget", type=int, metavar="BYTES", help="gradient tiles of the head to keep")
    runner.add_argument(
        "--reference-memory",
        metavar="DIRECTORY",
        help="remember reference log-probabilities in this directory, or in this process: yes",
    )
    runner.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with its arguments")
    runner.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options: dict[str, object] = {}
    if args.no_share_prompts:
        options["share_prompts"] = False
    if args.memory_budget is not None:
        options["memory_budget"] = args.memory_budget
    if args.reference_memory is not None:
        options["reference_memory"] = args.reference_memory == "yes" or args.reference_memory
    try:
        command = args.program if args.module is None else ["-m", *args.module]
        run.run(command, args.only, **options)
    except ValueError as error:
        sys.exit(f"fastdpo {error}")


if __name__ == "__main__":
    main()
