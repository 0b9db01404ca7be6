"""DPO with TRL on several processes. docs/distributed.md has the command for each launcher.

    torchrun --nproc-per-node 8 examples/distributed/train.py --model MODEL --dataset PAIRS.jsonl

Every process imports this file, so every process is patched.
"""

import fastdpo

REPORT = fastdpo.patch("trl.DPOTrainer")

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal LM with its tokenizer")
    parser.add_argument("--dataset", required=True, help="pairs as .jsonl: prompt, chosen, rejected")
    parser.add_argument("--steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--batch-size", type=int, default=4, help="pairs per process")
    parser.add_argument("--deepspeed", metavar="CONFIG", help="a configuration of DeepSpeed, such as zero3.json")
    parser.add_argument("--out", default="out/distributed")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # from DeepSpeed's launcher
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    has_accelerator = torch.accelerator.is_available()
    config = DPOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        num_train_epochs=1,
        per_device_train_batch_size=args.batch_size,
        bf16=has_accelerator,
        use_cpu=not has_accelerator,
        deepspeed=args.deepspeed,
        save_strategy="no",
        report_to="none",
    )
    trainer = DPOTrainer(model=args.model, args=config, train_dataset=Dataset.from_json(args.dataset))
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(REPORT)
        print(f"{trainer.accelerator.num_processes} processes, loss {result.training_loss:.6f}")
        for (name, model, path), n in sorted(fastdpo.calls.items()):
            print(f"{name}: {n} {path} calls of the {model} model")


if __name__ == "__main__":
    train(parse())
