"""`A2POTrainer.training_step` without generation, on given completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl.experimental.a2po import A2POConfig, A2POTrainer

from benchmarks.sides import workload as w
from benchmarks.sides.exact import BETA, ExactCompletions
from benchmarks.sides.online import completions
from benchmarks.sides.trainer import TrainerStep, build_tokenizer, trainer_options
from benchmarks.sides.workload import Workload


def advantages(rows: int) -> Tensor:
    """Rewards above what is expected of a prompt, float [rows]."""
    return torch.arange(rows, device=w.device()) % 2 - 0.25


class GivenCompletions(A2POTrainer):
    """Uses the completions of the workload in place of generated ones."""

    given: tuple[Tensor, Tensor, int]

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]:
        ids, mask, width = self.given
        with torch.no_grad():
            ref_logps = self._get_sequence_logps(self.ref_model, ids, mask, width)
        batch = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": width, "ref_logps": ref_logps}
        return batch | {"rewards": advantages(len(ids)), "v_star": torch.zeros(len(ids), device=ids.device)}


class A2POStep(TrainerStep):
    """Policy forward and backward, reference forward. No generation, no optimizer."""

    TRAINER = "trl.A2POTrainer"
    SHARES = False

    def _build(self, workload: Workload, directory: Path, attention: str) -> GivenCompletions:
        options = trainer_options(workload, directory)
        del options["max_length"]  # an option of other trainers
        trainer = GivenCompletions(
            model=w.build_model(workload, w.POLICY, attention),
            reward_funcs=lambda prompts, **columns: [0.0] * len(prompts),
            args=A2POConfig(**options, beta2=BETA),
            train_dataset=Dataset.from_list([{"prompt": "<eos>"}] * len(workload.batches[0])),
            processing_class=build_tokenizer(),
        )
        trainer.ref_model.load_state_dict(w.build_model(workload, w.REFERENCE).state_dict())  # not a copy of the policy
        return trainer

    def _inputs(self, workload: Workload, batch: int) -> tuple[Tensor, Tensor, int]:
        """Left-padded prompts and the chosen completions of the workload, [B, L], their mask and the width of those."""
        rows = len(workload.batches[batch])
        prompts, prompt_mask, ids, mask = (x[:rows] for x in completions(workload, batch))
        width = int(mask.sum(1).max())
        return torch.cat([prompts, ids[:, :width]], 1), torch.cat([prompt_mask, mask[:, :width]], 1), width

    @contextmanager
    def _recorded(self, record: Callable[[str, Tensor], None]) -> Iterator[None]:
        stock = self.trainer._get_sequence_logps

        def recorded(*args: Any) -> Tensor:
            sums = stock(*args)
            record(f"log-probs of the {'policy' if torch.is_grad_enabled() else 'reference'}", sums)
            return sums

        self.trainer._get_sequence_logps = recorded
        yield
        del self.trainer._get_sequence_logps

    def _run(self, batch: int) -> Tensor:
        self.trainer.given = self.inputs[batch]
        return self.trainer.training_step(self.model, [{"prompt": "<eos>"}])


class ExactA2POStep(ExactCompletions):
    """The ground truth of `A2POStep`."""

    COMPLETIONS = ("chosen_ids",)

    def _scale(self) -> float:
        """By which an error of a row changes its factor in the gradient, which is 0.25 or more without it."""
        return BETA / 0.25

    def _loss(self, ratios: Tensor) -> Tensor:
        return (BETA * ratios - advantages(len(ratios))).square().mean()
