"""`OnlineDPOTrainer.training_step` without generation, on given completions."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

import fastdpo
from benchmarks.cases import Arrays
from benchmarks.sides import workload as w
from benchmarks.sides.trainer import build_tokenizer, trainer_options
from benchmarks.sides.workload import Workload

FUSED = {("trl.OnlineDPOTrainer", kind, "fused") for kind in ("policy", "reference")}


class GivenCompletions(OnlineDPOTrainer):
    """Uses the completions of the workload in place of generated ones."""

    given_completions: tuple[torch.Tensor, ...]

    def _generate(self, model: Any, prompts: Any, images: Any = None) -> tuple[torch.Tensor | None, ...]:
        return *self.given_completions, None


def prefer_first_half(prompts: list[str], **columns: Any) -> list[float]:
    """Reward function: the chosen completions of the workload come first."""
    half = len(prompts) // 2
    return [1.0] * half + [0.0] * half


def completions(workload: Workload, batch: int) -> tuple[torch.Tensor, ...]:
    """Ids and mask of left-padded prompts [2B, P] and of right-padded completions [2B, C]."""
    pairs = workload.examples(batch)
    prompts = [torch.tensor(pair["prompt_ids"]) for pair in pairs] * 2
    responses = [torch.tensor(pair[name]) for name in ("chosen_ids", "rejected_ids") for pair in pairs]

    def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(rows, batch_first=True, padding_value=w.PAD, padding_side=side)
        mask = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
        return ids.to(w.device()), mask.to(w.device())

    return *padded(prompts, "left"), *padded(responses, "right")


class OnlineStep:
    """Policy forward and backward, reference forward. No generation, no optimizer.

    Args:
        workload: model and lengths.
        mode: "stock" or "fastdpo".
    """

    def __init__(self, workload: Workload, mode: str) -> None:
        self.fused = mode == "fastdpo"
        if self.fused:
            os.environ["FASTDPO_STRICT"] = "1"
            fastdpo.patch("trl.OnlineDPOTrainer")
        with TemporaryDirectory() as directory:
            self.trainer = self._build(workload, Path(directory))
        self.model = self.trainer.accelerator.prepare_model(self.trainer.model)
        self.batches = len(workload.batches)
        self.completions = [completions(workload, batch) for batch in range(self.batches)]

    def _build(self, workload: Workload, directory: Path) -> GivenCompletions:
        trainer = GivenCompletions(
            model=w.build_model(workload, w.POLICY),
            ref_model=w.build_model(workload, w.REFERENCE),
            reward_funcs=prefer_first_half,
            args=OnlineDPOConfig(**trainer_options(workload, directory), max_new_tokens=1),  # generation is skipped
            train_dataset=Dataset.from_list([{"prompt": "<eos>"}] * len(workload.batches[0])),
            processing_class=build_tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    def check(self) -> Arrays:
        """See `benchmarks.sides.trainer.TrainerStep.check`."""
        logps = {True: [], False: []}
        losses, gradient = [], None
        stock_forward = self.trainer._forward

        def record(model: Any, prompt_ids: Any, prompt_mask: Any, ids: Any, mask: torch.Tensor, *rest: Any) -> Any:
            output = stock_forward(model, prompt_ids, prompt_mask, ids, mask, *rest)
            logps[torch.is_grad_enabled()].append(output.detach()[mask.bool()].float())
            return output

        self.trainer._forward = record
        for batch in range(self.batches):
            losses.append(self._training_step(batch))
            gradient = w.gradient_of(self.model) if gradient is None else gradient
            self.reset()
        del self.trainer._forward
        if self.fused and set(fastdpo.calls) != FUSED:
            raise RuntimeError(f"expected fused calls only; got {dict(fastdpo.calls)}")
        arrays = {
            "log-probs of the policy": torch.cat(logps[True]),
            "log-probs of the reference": torch.cat(logps[False]),
        }
        arrays |= {"loss": torch.stack(losses), "gradient": gradient}
        return {name: value.cpu().numpy() for name, value in arrays.items()}

    def _training_step(self, batch: int) -> torch.Tensor:
        self.trainer.given_completions = self.completions[batch]
        prompts = ["<eos>"] * (len(self.completions[batch][0]) // 2)
        return self.trainer.training_step(self.model, {"prompt": prompts})

    def step(self, batch: int) -> None:
        self._training_step(batch)

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.trainer.stats = {name: [] for name in self.trainer.stats}

    def facts(self) -> dict[str, Any]:
        return {}
