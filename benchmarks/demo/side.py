"""One side of the comparison: TRL's DPOTrainer, as shipped or after `fastdpo.patch()`.

    python -m benchmarks.demo.side {stock,fastdpo} ...

The patch is the only difference between the sides. Measurements are written to a JSON file. The
patched side exits with code 3 unless every call of policy and reference was fused.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, TrainerState
from trl import DPOConfig, DPOTrainer

from benchmarks import messages
from benchmarks.machine import bfloat16, commit, machine, versions
from benchmarks.tokens import TokenCounter
from fastdpo.commands.check.meters import PeakMemory, now, timed
from fastdpo.data.files import load_preferences

EXIT_NOT_FUSED = 3
LABELS = {"stock": "TRL as shipped", "fastdpo": "TRL with fastdpo"}


class Recorder(TrainerCallback):
    """Records every step and updates the progress bar."""

    def __init__(self, label: str, policy: TokenCounter, reference: TokenCounter, seconds: list[float]) -> None:
        self.label, self.policy, self.reference, self.seconds = label, policy, reference, seconds
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.bar = tqdm(total=state.max_steps, desc=self.label, file=sys.stdout, dynamic_ncols=True)
        self.step_start = now()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        end = now()
        self.steps.append(
            {
                "seconds": end - self.step_start,
                "training_step_seconds": self.seconds[-1],
                "policy_tokens": self.policy.take(),
                "reference_tokens": self.reference.take(),
            }
        )
        self.step_start = end

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.steps[-1].update(loss=logs["loss"], margin=logs["rewards/margins"])
            self.bar.set_postfix(loss=f"{logs['loss']:.4f}", margin=f"{logs['rewards/margins']:.3f}", refresh=False)
            self.bar.update()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.bar.close()


def build_trainer(args: argparse.Namespace) -> DPOTrainer:
    """A `DPOTrainer` whose policy and reference are loaded from the same weights, in float32."""
    pairs = load_preferences(args.dataset)
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = DPOConfig(
        output_dir=str(args.out.parent),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_length=1024,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        seed=0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=config,
        train_dataset=pairs.take(min(args.pairs, len(pairs))),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(trainer: DPOTrainer, label: str) -> dict[str, Any]:
    """Trains and returns the records of the steps and the peak memory."""
    seconds: list[float] = []
    trainer.training_step = timed(trainer.training_step, seconds)
    counters = TokenCounter(trainer.model.base_model), TokenCounter(trainer.ref_model.base_model)
    recorder = Recorder(label, *counters, seconds)
    trainer.add_callback(recorder)
    peak = PeakMemory()
    with peak.watched():
        trainer.train()
    return {"steps": recorder.steps, "peak_memory_bytes": peak.bytes, "memory": peak.kind}


def describe_unfused_calls(calls: Counter[tuple[str, str, str]], steps: int) -> str | None:
    """None if every call of every step was fused, else a description of those that were not."""
    stock = {call: count for call, count in calls.items() if call[2] != "fused"}
    if stock:
        return f"these calls fell back to TRL: {stock}"
    for kind in ("policy", "reference"):
        fused = calls["trl.DPOTrainer", kind, "fused"]
        if fused < steps:
            return f"the {kind} made {fused} fused calls in {steps} steps"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one side of the demo.")
    parser.add_argument("side", choices=LABELS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    packages = ["torch", "transformers", "trl", "datasets", "accelerate"]
    logged: list[str] = []
    if args.side == "fastdpo":
        import fastdpo

        packages.append("fastdpo")
        logged = messages.collected()
        print(fastdpo.patch())

    result = {"side": args.side, "versions": versions(*packages), "commit": commit()}
    result["machine"] = machine() | {"bfloat16": bfloat16()}
    result |= measure(build_trainer(args), LABELS[args.side])
    failure = None
    if args.side == "fastdpo":
        result["calls"] = {" ".join(call): count for call, count in fastdpo.calls.items()}
        failure = describe_unfused_calls(fastdpo.calls, args.steps)
    args.out.write_text(json.dumps(result, indent=1))
    if failure:
        shown = "\n".join(logged) or "nothing"
        print(f"Not every call was fused: {failure}.\nfastdpo logged: {shown}")
        sys.exit(EXIT_NOT_FUSED)


if __name__ == "__main__":
    main()
