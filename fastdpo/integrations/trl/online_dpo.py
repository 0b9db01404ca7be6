"""TRL's OnlineDPOTrainer, patched where it scores completions, in `_forward`.

TRL stores a softmax over the vocabulary at each position, padding included, for policy and
reference. Here the two completions of a prompt share it, and only their tokens are scored.

Loss, gradients, rewards and log-probabilities equal those of TRL. Four metrics differ if
completions have different lengths: `objective/kl`, `objective/entropy`,
`objective/non_score_reward` and `objective/rlhf_reward`. TRL also sums them over the padding after
the end of a completion. Here they are sums over its tokens, whether a batch is fused or falls back.
TRL masks the padding in its loss, too.

Positions count from the first real token, as during generation. TRL passes no positions, so that
behind left padding a model with learned positions, such as GPT-2, sees other positions in
`_forward` than those that it generated with.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models import forward
from ...models.forward import Request, ScoredBatch
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..gathering import of_all_ranks
from ..protocol import STATE, PatchOptions
from ..replacements import Replacements
from ..signatures import first_difference
from .created_trainers import CreatedTrainers, TrainerState, state_of
from .models import new_models
from .names import ONLINE_DPO

if TYPE_CHECKING:
    from trl.experimental.online_dpo import OnlineDPOTrainer

_PARAMETERS = {
    "_forward": [*("self", "model", "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "vision_inputs")],
    "create_accelerator_and_postprocess": ["self"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
}
_PATH = ("training_step", "_forward")

_replacements = Replacements()
_trainers = CreatedTrainers(ONLINE_DPO, _PATH)


@dataclass(eq=False, kw_only=True)
class _OnlineDPOState(TrainerState):
    models: weakref.WeakSet = field(default_factory=weakref.WeakSet)


def trainer_class() -> type[OnlineDPOTrainer]:
    try:
        from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer
    except ModuleNotFoundError as error:
        if error.name is not None and not error.name.startswith("trl."):  # TRL 0.29 to 1.13 needs requests
            raise
        # TRL before 0.26
        from trl.trainer.online_dpo_trainer import OnlineDPOTrainer  # pyright: ignore[reportMissingImports]
    return OnlineDPOTrainer


def unsupported_reason() -> Reason | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    return first_difference(trainer_class(), _PARAMETERS)


def enable(options: PatchOptions) -> None:
    trainer = trainer_class()
    stock_forward = trainer._forward
    stock_step = trainer.training_step

    @functools.wraps(stock_step)
    def training_step(self, model, inputs, num_items_in_batch=None, *args, **kwargs):  # some are of a newer TRL
        is_patched = state_of(self, _OnlineDPOState) is not None  # otherwise created before patch()
        with of_all_ranks(self.accelerator) if is_patched else nullcontext():
            return stock_step(self, model, inputs, num_items_in_batch, *args, **kwargs)

    @functools.wraps(stock_forward)
    def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
        inputs = (prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)
        if not forward.is_installed(model, ONLINE_DPO):  # its trainer was created before patch()
            return stock_forward(self, model, *inputs)
        padding = completion_mask == 0
        if vision_inputs is not None:  # the call falls back, and the model logs why
            return stock_forward(self, functools.partial(model, fused_lm_head=True), *inputs).masked_fill(padding, 0)
        output = model(**batch_of(self.max_length, *inputs[:4]), fused_lm_head=True)
        if not isinstance(output, Tensor):  # logits, from which TRL computes log-probabilities
            return stock_forward(self, lambda *args, **kwargs: output, *inputs).masked_fill(padding, 0)
        return output[:, output.shape[1] - completion_ids.shape[1] :].to(completion_ids.device)

    # Models are prepared by accelerate afterwards, which then wraps our forwards, not the reverse.
    prepare = functools.partial(_install, options=options)
    _trainers.watch(_replacements, trainer, new_state=_OnlineDPOState, prepare=prepare)
    _replacements.put(trainer, "training_step", training_step)
    _replacements.put(trainer, "_forward", _forward)


def disable() -> None:
    _replacements.undo()
    _trainers.discard_states()


def _install(trainer: OnlineDPOTrainer, options: PatchOptions) -> None:
    state: _OnlineDPOState | None = vars(trainer).get(STATE)
    if state is None:
        return
    for role, model in new_models(trainer, state.models):
        request = Request(ONLINE_DPO, role, **options.of_forward())
        forward.install(model, request, _make_output, prior_scores=False)


def _make_output(scored: ScoredBatch, kwargs: dict) -> Tensor:
    return scored.logps.logps


def batch_of(
    max_length: int, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> dict[str, Tensor]:
    """Prompts, truncated on the left to `max_length` as in TRL, and completions, whose real tokens
    are the labels.

    If nothing of the prompts is left, TRL scores token i at position i, whose hidden state has seen
    it.
    """
    cut = max(prompt_ids.shape[1] + completion_ids.shape[1] - max_length, 0)
    prompt_ids, prompt_mask = prompt_ids[:, cut:], prompt_mask[:, cut:]
    targets = completion_ids.masked_fill(completion_mask == 0, IGNORE_INDEX)
    unscored = torch.full_like(prompt_ids, IGNORE_INDEX)
    return {
        "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
        "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
        "labels" if prompt_ids.shape[1] else "shift_labels": torch.cat([unscored, targets], dim=1),
    }
