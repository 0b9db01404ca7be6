"""`DPOTrainer` on prepared batches, a step of training or of evaluation: as TRL ships it, with its CUDA way of choosing
positions, patched.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from datasets import disable_progress_bars as quiet_datasets
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available
from trl import DPOConfig, DPOTrainer
from trl.trainer import utils as trl_utils

import fastdpo
from benchmarks.cases import Arrays, Unavailable
from benchmarks.demo.meters import TokenCounter
from benchmarks.sides import workload as w
from benchmarks.sides.workload import Workload
from fastdpo import ops


class TokenizedTrainer(DPOTrainer):
    """Takes a dataset that holds ids already."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset


def tokenizer() -> PreTrainedTokenizerFast:
    """Never used on text; the trainer wants to know the special tokens."""
    words = Tokenizer(models.WordLevel({"<pad>": w.PAD, "<eos>": w.EOS}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def options(workload: Workload, directory: Path) -> dict[str, Any]:
    """Of the configuration of any of TRL's trainers."""
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": len(workload.batches[0]),
        "max_length": workload.max_length,
        "bf16": workload.bf16,
        "gradient_checkpointing": workload.checkpointing,
        "use_cpu": not torch.accelerator.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
    }


def build_trainer(workload: Workload, directory: Path, attention: str) -> DPOTrainer:
    """Default loss (sigmoid, beta 0.1)."""
    quiet_datasets()
    config = DPOConfig(**options(workload, directory))
    trainer = TokenizedTrainer(
        model=w.build_model(workload, w.POLICY, attention),
        ref_model=None if workload.lora else w.build_model(workload, w.REFERENCE, attention),
        args=config,
        train_dataset=Dataset.from_list(w.examples(workload, 0)),
        processing_class=tokenizer(),
        peft_config=w.lora_config() if workload.lora else None,
    )
    if workload.lora:
        w.start_adapters(trainer.model)
    trainer.current_gradient_accumulation_steps = 1  # what `train()` sets before its first step
    return trainer


class TrainerStep:
    """Forward and backward of the policy and the reference's forward; no optimizer."""

    FUSED = frozenset({("trl.DPOTrainer", kind, "fused") for kind in ("policy", "reference")})
    """The calls that must have gone the fused way, and none another."""

    def __init__(
        self,
        workload: Workload,
        mode: str,
        memory_budget: int = ops.MEMORY_BUDGET,
        share_prompts: bool = True,
        attention: str = "sdpa",
    ) -> None:
        """mode: "stock"; "labelled", where TRL's head scores labelled positions only, as it does on CUDA; "fastdpo";
        "remembered", fastdpo with the reference's log-probabilities known.
        """
        if attention == "flash_attention_2" and not is_flash_attn_2_available():
            raise Unavailable("flash-attn is not installed")
        self.fused = mode in ("fastdpo", "remembered")
        if self.fused:
            os.environ["FASTDPO_STRICT"] = "1"  # a path that is off is an error
            options = {"memory_budget": memory_budget, "share_prompts": share_prompts}
            fastdpo.patch("trl.DPOTrainer", **options, reference_memory=mode == "remembered")
        if mode == "labelled":
            if not hasattr(trl_utils, "_use_triton"):
                raise Unavailable("this TRL does not choose positions by `_use_triton`")
            trl_utils._use_triton = lambda device: True
        with TemporaryDirectory() as directory:
            self.trainer = build_trainer(workload, Path(directory), attention)
        self.model = self.trainer.accelerator.prepare_model(self.trainer.model)
        self.batches = len(workload.batches)
        self.inputs = [self.trainer.data_collator(w.examples(workload, i)) for i in range(self.batches)]
        policy = self.trainer.model.get_base_model() if workload.lora else self.trainer.model
        references = [] if workload.lora else [self.trainer.ref_model]
        self.counters = [TokenCounter(model.base_model) for model in (policy, *references)]
        self.steps = 0

    def check(self) -> Arrays:
        """Log-probabilities of every labelled token and the loss of all batches, the gradient of the first."""
        logps = {"policy": [], "reference": []}
        reference = self.trainer.ref_model

        def record(module: nn.Module, args: Any, output: Any) -> None:
            is_reference = not torch.is_grad_enabled() if reference is None else module is reference
            role = "reference" if is_reference else "policy"
            logps[role].append(output.log_probs.detach()[output.label_mask].float())

        models = [self.model] if reference is None else [self.model, reference]
        hooks = [model.register_forward_hook(record) for model in models]
        losses, gradient = [], None
        for batch in range(self.batches):
            losses.append(self._run(batch))
            gradient = w.gradient_of(self.model) if gradient is None else gradient
            self.rest()
        for hook in hooks:
            hook.remove()
        if self.fused and set(fastdpo.calls) != self.FUSED:
            raise RuntimeError(f"not every call went the fused way: {dict(fastdpo.calls)}")
        for counter in self.counters:
            counter.take()
        found = {f"log-probs of the {role}": torch.cat(values) for role, values in logps.items()}
        found |= {"loss": torch.stack(losses), "gradient": gradient}
        return {name: value.cpu().numpy() for name, value in found.items()}

    def _run(self, batch: int) -> torch.Tensor:
        """The loss."""
        return self.trainer.training_step(self.model, dict(self.inputs[batch]))

    def step(self, batch: int) -> None:
        self._run(batch)
        self.steps += 1

    def rest(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.trainer._metrics["train"].clear()

    def facts(self) -> dict[str, Any]:
        """Tokens that went through the backbones in a step, those of policy and reference, padding included."""
        return {"tokens": sum(counter.take() for counter in self.counters) / max(self.steps, 1)}
