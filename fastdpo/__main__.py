"""The command line: `fastdpo COMMAND`, or `python -m fastdpo COMMAND`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from . import __version__
from .checks import suggested
from .commands import run
from .commands.model_names import require_model
from .integrations.options import PatchOptions

INTERRUPTED = 130
"""The exit status of shells for a program that SIGINT has ended."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command with these arguments, by default those of this process.

    A wrong argument ends it with one line, and so does Ctrl-C.
    """
    args = parsed(arguments)
    try:
        args.start(args)
    except (OSError, ValueError) as error:
        message = " ".join(line.strip() for line in str(error).removeprefix(f"{args.command}: ").splitlines())
        sys.exit(f"fastdpo {args.command}: {message}")
    except ImportError as error:
        sys.exit(f"fastdpo {args.command}: requires packages that the extra `trl` installs: {error}")
    except KeyboardInterrupt:
        print(f"fastdpo {args.command}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command, by default those of this process. One that takes the fields of a
    trainer's configuration gets as `fields` what it does not know itself.
    """
    commands = parser()
    args, others = commands.parse_known_args(arguments)
    if hasattr(args, "fields"):
        args.fields = others
    elif others:
        known = subparsers(commands)[args.command]._option_string_actions
        commands.error(f"unrecognized arguments: {' '.join(others)}{suggested(others[0], known)}")
    return args


def subparsers(commands: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    (found,) = (x.choices for x in commands._actions if isinstance(x, argparse._SubParsersAction))
    return found


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it returns has the function to be called with it as `start`."""
    parser = argparse.ArgumentParser(prog="fastdpo")
    parser.add_argument("--version", action="version", version=f"fastdpo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_doctor(commands)
    _add_check(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what fastdpo can do on this machine",
        description="Says what fastdpo can do on this machine: which packages, devices, trainers and kernels there "
        "are. The exit status is 1 if something that was asked for is not available, or if a kernel is wrong.",
        epilog="example: fastdpo doctor trl.DPOTrainer --model path/to/model",
    )
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help="a trainer or package that must be patchable")
    parser.add_argument(
        "--model", metavar="MODEL", help="directory or Hub name of a causal LM or a reward model that must pack"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(start=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    if args.model is not None:
        require_model("doctor", args.model)
    from .commands import doctor

    report = doctor.examine(args.trainers, args.model)
    print(doctor.as_json(report) if args.json else doctor.as_text(report))
    sys.exit(1 if doctor.failed(report) else 0)


def _add_check(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check",
        help="compare TRL with and without fastdpo on your model and pairs",
        usage="fastdpo check (--model MODEL --dataset PATH | --tiny [reward]) [options] [fields of DPOConfig]",
        description="Runs a few batches through TRL's DPOTrainer, stock and patched, one after the other in processes "
        "of their own, and compares log-probabilities, loss, metrics and gradients with what rounding explains. "
        "Fields of DPOConfig are options, too. For a reward model, they are RewardTrainer and RewardConfig. "
        "The exit status is 1 if anything differs by more, or is not fused.",
        epilog="example: fastdpo check --model path/to/model --dataset pairs.jsonl --beta 0.05 --loss_type ipo",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="MODEL", help="directory or Hub name of a model with its tokenizer")
    parser.add_argument(
        "--dataset", metavar="PATH", help="a .jsonl, .json or .parquet file, or what save_to_disk wrote"
    )
    parser.add_argument(
        "--tiny",
        nargs="?",
        const="dpo",
        choices=("dpo", "reward"),
        help="build a small model and pairs instead; with `reward`, a reward model",
    )
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="how many batches to run (2)")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="pairs a batch (4)")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter of all linear layers")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(start=_check, fields=[])


def _check(args: argparse.Namespace) -> None:
    missing = [x is None for x in (args.model, args.dataset)]
    if missing != [args.tiny is not None] * 2:
        sys.exit("fastdpo check: pass --model and --dataset, or --tiny")
    if args.model is not None:
        require_model("check", args.model)
    warnings.simplefilter("ignore")
    from .commands.check import command

    options = dict(batches=args.batches, batch_size=args.batch_size, lora=args.lora, fields=args.fields)
    report = command.check(args.model, args.dataset, rewards=args.tiny == "reward", **options)
    print(command.as_json(report) if args.json else command.as_text(report))
    sys.exit(0 if report.ok else 1)


def _add_run(commands: argparse._SubParsersAction) -> None:
    runner = commands.add_parser(
        "run",
        help="run a training program unchanged, with its trainers patched",
        usage="fastdpo run [options] script.py|-m module|command [arguments]",
        epilog="example: fastdpo run --strict trl dpo --config dpo.yaml",
    )
    runner.add_argument("--only", action="append", default=[], metavar="TRAINER", help="patch only this trainer")
    runner.add_argument(
        "--no-share-prompts",
        dest="share_prompts",
        action="store_false",
        help="compute a prompt once for each of its answers",
    )
    runner.add_argument(
        "--max-tokens",
        type=_tokens,
        default=PatchOptions().max_tokens,
        metavar="TOKENS",
        help="cut each step into micro-batches of up to this many tokens, or own, auto or none (default: own)",
    )
    runner.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="compile layers and replay CUDA graphs, or never (default: where it pays)",
    )
    runner.add_argument("--verify", action="store_true", help="compare fused calls 1, 2, 4, 8, ... with stock ones")
    runner.add_argument("--strict", action="store_true", help="raise an error where something is not fused")
    runner.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with its arguments")
    runner.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    runner.set_defaults(start=_run)


def _tokens(text: str) -> int | str | None:
    if text in ("own", "auto", "none"):
        return None if text == "none" else text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a positive integer, own, auto or none; got {text!r}") from None


def _run(args: argparse.Namespace) -> None:
    options = PatchOptions(*(getattr(args, name) for name in PatchOptions._fields))
    command = args.program if args.module is None else ["-m", *args.module]
    run.run(command, args.only, options, strict=args.strict)


if __name__ == "__main__":
    main()
