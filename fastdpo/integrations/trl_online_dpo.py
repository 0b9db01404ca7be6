"""TRL's OnlineDPOTrainer, entered where it scores completions, in `_forward`.

Stock, a softmax over the vocabulary at each position, padding included, is stored for policy and reference. Here the
two completions of a prompt share it, and only their tokens are scored.

Loss, gradients, rewards and log-probabilities are stock's. Four metrics are not wherever completions differ in length:
`objective/kl`, `objective/entropy`, `objective/non_score_reward` and `objective/rlhf_reward`. Stock sums them over the
padding after the end of a completion too; here they are sums over its tokens, as padding is never computed, and is left
out where a batch goes to stock's path. The loss masks padding out in stock as well.

Positions count from the first real token, as they do while generating. Stock passes none, so that models with learned
positions (GPT-2, say) see other ones behind left padding in `_forward` than those that they generated with.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..packing import IGNORE_INDEX
from . import qualify
from .deferred_metrics import Ledger, codes_of, deferring, is_overridden, shown_to_others, stored
from .fused_forward import ENTERED, Options, Request, Scored, install, is_wrapped, models_to_enter
from .replacements import Replacements, living

if TYPE_CHECKING:
    from trl.experimental.online_dpo import OnlineDPOTrainer

NAME = "trl.OnlineDPOTrainer"

_FORWARD_PARAMETERS = [
    *("self", "model", "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "vision_inputs")
]
_CREATE_PARAMETERS = ["self"]
_STEP_PARAMETERS = ["self", "model", "inputs", "num_items_in_batch"]
_LOG_PARAMETERS = [
    *("self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate")
]
_LEDGER = "_fastdpo_ledger"

_replacements = Replacements()
_trainers: weakref.WeakSet[OnlineDPOTrainer] = weakref.WeakSet()


def trainer_class() -> type[OnlineDPOTrainer]:
    """From where this TRL keeps it."""
    try:
        from trl.experimental.online_dpo import OnlineDPOTrainer
    except ModuleNotFoundError:  # before it moved
        from trl.trainer.online_dpo_trainer import OnlineDPOTrainer  # pyright: ignore[reportMissingImports]
    return OnlineDPOTrainer


def why_not() -> str | None:
    """What of the seam is not as this module knows it; None if all is."""
    for name, expected in (
        ("_forward", _FORWARD_PARAMETERS),
        ("create_accelerator_and_postprocess", _CREATE_PARAMETERS),
        ("training_step", _STEP_PARAMETERS),
        ("_maybe_log_save_evaluate", _LOG_PARAMETERS),
    ):
        function = getattr(trainer_class(), name, None)
        found = None if function is None else list(inspect.signature(function).parameters)
        if found != expected:
            return f"OnlineDPOTrainer.{name} must have the parameters {expected}; found {found}"
    return None


def enable(options: Options) -> None:
    trainer = trainer_class()
    stock_init = trainer.__init__
    stock_create = trainer.create_accelerator_and_postprocess
    stock_forward = trainer._forward
    stock_step = trainer.training_step
    stock_log = trainer._maybe_log_save_evaluate
    codes = codes_of(stock_step)

    @functools.wraps(stock_create)
    def create_accelerator_and_postprocess(self):
        """The last step before models are prepared: what accelerate puts around their forwards goes around ours."""
        stock_create(self)
        _install_models(self, options)

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        vars(self)[_LEDGER] = Ledger()
        _trainers.add(self)
        stock_init(self, *args, **kwargs)
        _install_models(self, options)

    @functools.wraps(stock_step)
    def training_step(self, model, inputs, num_items_in_batch=None):
        ledger = _ledger(self)
        if ledger is None:  # built before
            return stock_step(self, model, inputs, num_items_in_batch)
        try:
            with deferring(self.accelerator, ledger, codes):
                loss = stock_step(self, model, inputs, num_items_in_batch)
        finally:
            ledger.take(stored(self, "stats"))
        ledger.settle_if_due(seen=is_overridden(self, trainer, ("training_step", "_maybe_log_save_evaluate", "stats")))
        return loss

    @functools.wraps(stock_log)
    def _maybe_log_save_evaluate(self, *args, **kwargs):
        ledger = _ledger(self)
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if ledger is not None and logs:  # stock has a collective there, too
            ledger.settle()
        return stock_log(self, *args, **kwargs)

    @functools.wraps(stock_forward)
    def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
        inputs = (prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)
        if not is_wrapped(model, NAME):  # of a trainer that was built before
            return stock_forward(self, model, *inputs)
        padding = completion_mask == 0
        if vision_inputs is not None:  # the model says why not
            return stock_forward(self, functools.partial(model, fused_lm_head=True), *inputs).masked_fill(padding, 0)
        output = model(**_batch(self.max_length, *inputs[:4]), fused_lm_head=True)
        if not isinstance(output, Tensor):  # logits: stock goes on from them
            return stock_forward(self, lambda *args, **kwargs: output, *inputs).masked_fill(padding, 0)
        return output[:, output.shape[1] - completion_ids.shape[1] :].to(completion_ids.device)

    _replacements.put(trainer, "__init__", __init__)
    _replacements.put(trainer, "create_accelerator_and_postprocess", create_accelerator_and_postprocess)
    _replacements.put(trainer, "training_step", training_step)
    _replacements.put(trainer, "_maybe_log_save_evaluate", _maybe_log_save_evaluate)
    _replacements.put(trainer, "_forward", _forward)
    _replacements.put(trainer, "stats", shown_to_others("stats", _ledger, codes))


def disable() -> None:
    _replacements.undo()
    for trainer in list(_trainers):
        ledger: Ledger | None = vars(trainer).pop(_LEDGER, None)
        if ledger is not None:
            ledger.close(trainer)
        vars(trainer).pop(ENTERED, None)
    _trainers.clear()


def _ledger(trainer: Any) -> Ledger | None:
    return vars(trainer).get(_LEDGER)


def living_trainers() -> list[OnlineDPOTrainer]:
    """Trainers that exist already: their models have been prepared without any patch."""
    return living(trainer_class())


def _install_models(trainer: OnlineDPOTrainer, options: Options) -> None:
    for role, base in models_to_enter(trainer):
        request = Request((), 1.0, False, *qualify.logit_transform(base.config.get_text_config()))
        install(base, NAME, role, request, options, _answer, stock_scores=False)


def _answer(scored: Scored, kwargs: dict) -> Tensor:
    return scored.logps.logps


def _batch(
    max_length: int, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
) -> dict[str, Tensor]:
    """Prompts, cut on the left to `max_length` as stock cuts them, and completions, whose real tokens are labels.

    Of a prompt that is cut away whole, stock scores token i at position i, which has seen it.
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
