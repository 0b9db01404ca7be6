"""`RewardTrainer.training_step` on prepared batches, its ground truth and its floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from benchmarks.sides import workload as w
from benchmarks.sides.exact import ExactStep, Results
from benchmarks.sides.floor import FloorStep
from benchmarks.sides.trainer import TrainerStep, build_tokenizer, trainer_options
from benchmarks.sides.workload import Workload
from fastdpo import packing
from fastdpo.models.reward_head import CLASSIFIER_HEAD
from fastdpo.packing import Layout


def build_model(workload: Workload, attention: str = "sdpa") -> PreTrainedModel:
    """A Llama with one label and random weights that are equal in every process."""
    config = AutoConfig.for_model("llama", **w.decoder_entries(workload), num_labels=1)
    torch.manual_seed(w.POLICY)
    with w.device():
        dtype = getattr(torch, workload.weights)
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype, attn_implementation=attention)


def examples(workload: Workload, batch: int) -> list[dict[str, list[int]]]:
    """The pairs of a batch, each row with its prompt."""
    return [
        {name: pair["prompt_ids"] + pair[name] for name in ("chosen_ids", "rejected_ids")}
        for pair in workload.examples(batch)
    ]


class RewardStep(TrainerStep):
    """Forward and backward of a reward model. No optimizer."""

    TRAINER = "trl.RewardTrainer"
    KINDS = ("policy",)
    SCORES = "rewards"

    def _build(self, workload: Workload, directory: Path, attention: str) -> RewardTrainer:
        return RewardTrainer(
            model=build_model(workload, attention),
            args=RewardConfig(**trainer_options(workload, directory)),
            train_dataset=Dataset.from_list(examples(workload, 0)),
            processing_class=build_tokenizer(),
        )

    def _examples(self, workload: Workload, batch: int) -> list[dict[str, Any]]:
        return examples(workload, batch)

    def _scores_of(self, output: Any) -> Tensor:
        return output.logits.squeeze(-1)


class ExactRewardStep(ExactStep):
    """The ground truth of `RewardStep`. A row's score is its reward [1]."""

    SCORES = "rewards"
    HAS_REFERENCE = False

    def _build_policy(self) -> PreTrainedModel:
        return build_model(self.workload)

    def _scale(self) -> float:
        return 1.0

    def _loss_of_tokens(self, logps: list[Tensor], reference_logps: list[Tensor]) -> tuple[Tensor, Results]:
        chosen, rejected = torch.cat(logps).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean(), {}

    def _logps(self, model: Any, ids: Tensor, start: int, exact: bool) -> Tensor:
        """The label of a row's last token."""
        with torch.autocast(w.device().type, torch.bfloat16, enabled=self.workload.bf16 and not exact):
            hidden = model.base_model(input_ids=ids[None].to(w.device()), use_cache=False).last_hidden_state
            score = model.score(hidden[0, -1])
        return score.to(torch.promote_types(score.dtype, torch.float32))


class RewardFloorStep(FloorStep):
    """The lower bound of `RewardStep`: the layers on the distinct tokens, and the label of each row's last one."""

    def _build_policy(self, workload: Workload) -> PreTrainedModel:
        return build_model(workload)

    def _build_reference(self, workload: Workload) -> None:
        """There is none."""

    def _pack(self, workload: Workload, batch: int, device: torch.device) -> tuple[Tensor, Layout]:
        inputs = DataCollatorForPreference(w.PAD)(examples(workload, batch))
        inputs = CLASSIFIER_HEAD.with_scored_tokens(self.policy, {name: x.to(device) for name, x in inputs.items()})
        tensors = inputs["input_ids"], inputs["attention_mask"], inputs["shift_labels"]
        layout = packing.pack(*tensors, groups="content", shifted=True)
        return layout.pack(inputs["input_ids"]), layout

    def step(self, batch: int) -> None:
        self.policy.score(self._hidden(self.policy, *self.packed[batch])).sum().backward()
