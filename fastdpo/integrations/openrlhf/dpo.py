"""OpenRLHF's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

`Actor.forward` is not patched, since PPO and SFT use it, too. OpenRLHF stores logits and their
float32 copy for every token of prompts and answers. Here, no padding is computed, whether or not
`packing_samples` is set, and only answers are scored.

OpenRLHF reduces each number of its log in a collective of its own. Here, a log is one collective.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without OpenRLHF.

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models import forward
from ...models.forward import Request
from ...models.language_model import text_config
from ...models.wrapped import base_of
from ...reasons import Reason
from ...ref_logps.memory import Memory
from ..bypass import left_unpatched, report_if_unused
from ..concatenated import results_of
from ..last_result import LastResult
from ..protocol import STATE, PatchOptions
from ..replacements import Replacements
from ..signatures import first_difference
from .batches import PairRows, rows_of, score
from .memory import LoaderWithCallback, memory_enabled, remembered

if TYPE_CHECKING:
    from openrlhf.models import Actor
    from openrlhf.trainer.dpo_trainer import DPOTrainer

NAME = "openrlhf.DPOTrainer"

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "concatenated_inputs": ["self", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "_get_batch_logps": ["self", "per_token_logps", "attention_mask", "prompt_id_lens"],
    "save_logs_and_checkpoints": ["self"],
}
_PATH = ("concatenated_forward",)
_STRATEGY_PARAMETERS = {"all_reduce": ["self", "data", "op"]}

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


@dataclass
class _OpenRLHFState:
    """The state of a trainer that was created after `patch()`."""

    memory: Memory
    has_logged: bool = False  # or is about to, for the first time
    rows: LastResult[PairRows] = field(default_factory=LastResult)


def unsupported_reason() -> Reason | None:
    """Returns how OpenRLHF differs from the versions that this module was tested with, or None."""
    from openrlhf.trainer.dpo_trainer import DPOTrainer
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    checked = ((DPOTrainer, _PARAMETERS), (DeepspeedStrategy, _STRATEGY_PARAMETERS))
    differences = (first_difference(owner, names, exact=False) for owner, names in checked)  # some versions have more
    return next(filter(None, differences), None)


def trainer_class() -> type[DPOTrainer]:
    from openrlhf.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def enable(options: PatchOptions) -> None:
    from openrlhf.trainer.dpo_trainer import DPOTrainer
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    stock_init = DPOTrainer.__init__
    stock_forward = DPOTrainer.concatenated_forward
    stock_fit = DPOTrainer.fit
    stock_log = DPOTrainer.save_logs_and_checkpoints
    stock_evaluate = DPOTrainer.evaluate
    stock_reduce = DeepspeedStrategy.all_reduce

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        stock_init(self, *args, **kwargs)
        _trainers.add(self)
        if left_unpatched(self, NAME, DPOTrainer, _PATH):
            return
        vars(self)[STATE] = _OpenRLHFState(Memory(options.reference_memory, NAME))
        for role, actor in (("policy", self.model), ("reference", self.ref_model)):
            _install(actor, role, options)

    @functools.wraps(stock_fit)
    def fit(self, *args, **kwargs):
        state: _OpenRLHFState | None = vars(self).get(STATE)
        if state is None or not state.memory.enabled:
            return stock_fit(self, *args, **kwargs)
        loader = self.train_dataloader
        self.train_dataloader = LoaderWithCallback(loader, state.memory.exchange)
        try:
            return stock_fit(self, *args, **kwargs)
        finally:
            self.train_dataloader = loader

    @functools.wraps(stock_log)
    def save_logs_and_checkpoints(self, *args, **kwargs):
        state: _OpenRLHFState | None = vars(self).get(STATE)
        if state is not None and not state.has_logged:
            state.has_logged = True
            report_if_unused(self, NAME, base_of(self.model, NAME))
        return stock_log(self, *args, **kwargs)

    @functools.wraps(stock_evaluate)
    def evaluate(self, *args, **kwargs):
        stock_evaluate(self, *args, **kwargs)
        state: _OpenRLHFState | None = vars(self).get(STATE)
        if state is not None and state.memory.enabled:
            state.memory.exchange()

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens):
        batch = (chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens)
        state: _OpenRLHFState | None = vars(self).get(STATE)
        if state is None:  # created before patch()
            return stock_forward(self, model, *batch)

        def rows(*batch):  # the same tensors for policy and reference
            return state.rows.get(batch[:-1], lambda: rows_of(self, *batch))

        def scored(*batch):
            reason = _strategy_unsupported_reason(self) or forward.disabled_reason(model, NAME)
            if reason is not None:
                forward.record_fallback(model, NAME, reason)
                return stock_forward(self, model, *batch)
            return score(self, model, rows(*batch), batch[-1])

        if model is self.ref_model and memory_enabled(self, state.memory, chosen_ids.device):
            return remembered(self, state.memory, rows(*batch), scored, *batch)
        return scored(*batch)

    @functools.wraps(stock_reduce)
    def all_reduce(self, data, op="mean"):
        if not isinstance(data, dict) or any(isinstance(x, Tensor | dict) for x in data.values()):
            return stock_reduce(self, data, op)
        reduced = stock_reduce(self, torch.tensor(list(data.values()), dtype=torch.float32, device="cpu"), op)
        return dict(zip(data, reduced.tolist(), strict=True))

    _replacements.put(DPOTrainer, "__init__", __init__)
    _replacements.put(DPOTrainer, "concatenated_forward", concatenated_forward)
    _replacements.put(DPOTrainer, "fit", fit)
    _replacements.put(DPOTrainer, "save_logs_and_checkpoints", save_logs_and_checkpoints)
    _replacements.put(DPOTrainer, "evaluate", evaluate)
    _replacements.put(DeepspeedStrategy, "all_reduce", all_reduce)


def disable() -> None:
    _replacements.undo()
    for trainer in list(_trainers):
        vars(trainer).pop(STATE, None)
    _trainers.clear()


def _install(actor: Actor, role: str, options: PatchOptions) -> None:
    base = base_of(actor, NAME)
    request = Request(
        NAME,
        role,
        temperature=actor.temperature,
        **options.of_forward(),
    )
    forward.install(base, request, functools.partial(results_of, text_config(base)), prior_scores=False)


def _strategy_unsupported_reason(trainer: DPOTrainer) -> Reason | None:
    strategy = trainer.strategy
    if strategy.ring_attn_group is not None:
        return Reason("split-sequences", method="ring attention")
    if getattr(strategy, "ds_tensor_parallel_size", 1) > 1:
        return Reason("split-model")
    return None
