"""The command `fastdpo estimate`."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import sizes
from ..model_names import require_model

if TYPE_CHECKING:
    from .simulation import Setup

DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "rmsprop", "adagrad", "sgd")


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "estimate",
        help="predict tokens and memory of a training from its model's configuration and its pairs",
        description="Predicts the tokens and the peak memory of a step of TRL's DPOTrainer, or of its RewardTrainer "
        "for a reward model, with and without fastdpo, on one device. Loads no weights. Defaults are those of TRL.",
        epilog="example: fastdpo estimate path/to/model pairs.jsonl --batch 8 --lora 16 --memory 80GiB",
    )
    parser.add_argument("model", metavar="MODEL", help="directory or Hub name of a model with its tokenizer")
    parser.add_argument("dataset", metavar="DATASET", help="pairs: .jsonl, .json, .parquet, or what save_to_disk wrote")
    parser.add_argument("--batch", type=int, required=True, metavar="N", help="pairs of a batch on each device")
    parser.add_argument("--memory", metavar="SIZE", help="look for the largest batch that fits, such as 80GiB")
    parser.add_argument("--max-length", type=int, default=1024, metavar="N", help="tokens of a row (1024); 0: all")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (float32)")
    parser.add_argument("--no-autocast", action="store_true", help="compute in the dtype of the weights (bf16=False)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank")
    parser.add_argument("--lora-targets", default="all-linear", metavar="NAMES", help="comma-separated (all-linear)")
    parser.add_argument("--precomputed-reference", action="store_true", help="precompute_ref_log_probs=True")
    parser.add_argument("--no-gradient-checkpointing", action="store_true", help="gradient_checkpointing=False")
    parser.add_argument("--accumulate", action="store_true", help="gradient_accumulation_steps above 1")
    parser.add_argument("--optim", choices=OPTIMIZERS, default=OPTIMIZERS[0], help=f"({OPTIMIZERS[0]})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="whose kernels to assume; default: of this machine")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, in bytes")
    parser.set_defaults(start=_start)


def _start(args: argparse.Namespace) -> None:
    require_model("estimate", args.model)
    limit = None if args.memory is None else sizes.bytes_of("estimate", "memory", args.memory)
    import torch

    from ...ops.devices import memory_of
    from . import report
    from .prediction import estimate
    from .simulation import Setup

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = args.lora_targets
    targets = names if names == "all-linear" else names.split(",")
    setup: partial[Setup] = partial(
        Setup,
        device=device,
        device_memory=None if device == "cpu" else limit or memory_of(torch.device(device)),
        dtype=getattr(torch, args.dtype),
        autocast=not args.no_autocast,
        lora=None if args.lora is None else {"r": args.lora, "target_modules": targets},
        precomputed_reference=args.precomputed_reference,
        checkpointing=not args.no_gradient_checkpointing,
        accumulates=args.accumulate,
        optimizer=args.optim,
    )
    found = estimate(
        args.model,
        args.dataset,
        args.batch,
        setup=setup,
        limit=limit,
        max_length=args.max_length or None,
        progress=sys.stderr.isatty(),
    )
    print(report.as_json(found) if args.json else report.as_text(found))
