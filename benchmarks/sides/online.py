"""`OnlineDPOTrainer.training_step` without generation, on given completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from benchmarks.sides import workload as w
from benchmarks.sides.trainer import TrainerStep, build_tokenizer, trainer_options
from benchmarks.sides.workload import Workload


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


class OnlineStep(TrainerStep):
    """Policy forward and backward, reference forward. No generation, no optimizer."""

    TRAINER = "trl.OnlineDPOTrainer"

    def _build(self, workload: Workload, directory: Path, attention: str) -> GivenCompletions:
        return GivenCompletions(
            model=w.build_model(workload, w.POLICY, attention),
            ref_model=w.build_model(workload, w.REFERENCE, attention),
            reward_funcs=prefer_first_half,
            args=OnlineDPOConfig(**trainer_options(workload, directory), max_new_tokens=1),  # generation is skipped
            train_dataset=Dataset.from_list([{"prompt": "<eos>"}] * len(workload.batches[0])),
            processing_class=build_tokenizer(),
        )

    def _inputs(self, workload: Workload, batch: int) -> tuple[torch.Tensor, ...]:
        return completions(workload, batch)

    @contextmanager
    def _recorded(self, record: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
        stock_forward = self.trainer._forward

        def forward(model: Any, prompt_ids: Any, prompt_mask: Any, ids: Any, mask: torch.Tensor, *rest: Any) -> Any:
            output = stock_forward(model, prompt_ids, prompt_mask, ids, mask, *rest)
            record(f"log-probs of the {'policy' if torch.is_grad_enabled() else 'reference'}", output[mask.bool()])
            return output

        self.trainer._forward = forward
        yield
        del self.trainer._forward

    def _run(self, batch: int) -> torch.Tensor:
        self.trainer.given_completions = self.inputs[batch]
        prompts = ["<eos>"] * (len(self.inputs[batch][0]) // 2)
        return self.trainer.training_step(self.model, {"prompt": prompts})

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.trainer.stats = {name: [] for name in self.trainer.stats}
