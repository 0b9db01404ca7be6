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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ...models import forward
from ...models.forward import Request, ScoredBatch
from ...models.router import router_loss
from ...packing import IGNORE_INDEX
from ..bypass import left_unpatched, report_if_unused
from ..last_result import LastResult
from ..protocol import STATE, PatchOptions
from ..reference_memory import Memory, digests_of_pairs, key_of
from ..replacements import Replacements
from ..signatures import signature_difference

if TYPE_CHECKING:
    from openrlhf.models import Actor
    from openrlhf.trainer.dpo_trainer import DPOTrainer
    from transformers import PreTrainedModel

NAME = "openrlhf.DPOTrainer"

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "concatenated_inputs": ["self", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "_get_batch_logps": ["self", "per_token_logps", "attention_mask", "prompt_id_lens"],
    "save_logs_and_checkpoints": ["self"],
}
_PATH = ("concatenated_forward",)
_REDUCE_PARAMETERS = ["self", "data", "op"]

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


@dataclass
class _OpenRLHFState:
    """The state of a trainer that was created after `patch()`."""

    memory: Memory
    has_logged: bool = False  # or is about to, for the first time
    batch: LastResult[_PairRows] = field(default_factory=LastResult)


class _PairRows(NamedTuple):
    """The rows of a batch, [2B, L] each, chosen ones first."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


class _LoaderWithCallback:
    """A data loader that calls a function at the end of each epoch."""

    def __init__(self, loader: Any, on_epoch_end: Callable[[], None]):
        self._loader, self._on_epoch_end = loader, on_epoch_end

    def __iter__(self) -> Iterator:
        yield from self._loader
        self._on_epoch_end()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def unsupported_reason() -> str | None:
    """Returns how OpenRLHF differs from the versions that this module was tested with, or None."""
    from openrlhf.trainer.dpo_trainer import DPOTrainer
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    for name, parameters in _PARAMETERS.items():
        difference = signature_difference(DPOTrainer, name, parameters, exact=False)  # some versions have more
        if difference is not None:
            return difference
    return signature_difference(DeepspeedStrategy, "all_reduce", _REDUCE_PARAMETERS, exact=False)


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
        self.train_dataloader = _LoaderWithCallback(loader, state.memory.exchange)
        try:
            return stock_fit(self, *args, **kwargs)
        finally:
            self.train_dataloader = loader

    @functools.wraps(stock_log)
    def save_logs_and_checkpoints(self, *args, **kwargs):
        state: _OpenRLHFState | None = vars(self).get(STATE)
        if state is not None and not state.has_logged:
            state.has_logged = True
            report_if_unused(self, NAME, _base(self.model))
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

        def score(*batch):
            reason = _strategy_unsupported_reason(self) or forward.disabled_reason(model, NAME)
            if reason is not None:
                forward.record_fallback(model, NAME, reason)
                return stock_forward(self, model, *batch)
            return _forward(self, state, model, *batch)

        if model is self.ref_model and _memory_enabled(self, state.memory):
            return _remembered(self, state, score, *batch)
        return score(*batch)

    @functools.wraps(stock_reduce)
    def all_reduce(self, data, op="mean"):
        if not isinstance(data, dict) or any(isinstance(x, Tensor | dict) for x in data.values()):
            return stock_reduce(self, data, op)
        reduced = stock_reduce(self, torch.tensor(list(data.values()), dtype=torch.float32), op)
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


def answer_labels(ids: Tensor, mask: Tensor, prompt_lengths: list[int] | Tensor) -> Tensor:
    """The labels of a batch of pairs: the real tokens of chosen and of rejected answers.

    Each row is masked by the length of the tokenized prompt, not by the tokens that the two rows
    have in common: a tokenizer may merge the end of a prompt with the beginning of an answer.

    Args:
        ids: [2B, L], chosen rows first, padded on the right.
        mask: [2B, L], 0 at padding.
        prompt_lengths: number of tokens of each of the B prompts.

    Returns:
        int64 [2B, L], `IGNORE_INDEX` where a token is not scored.

    Raises:
        ValueError: the number of lengths is not B.
    """
    lengths = torch.as_tensor(prompt_lengths, device=ids.device).flatten()
    if 2 * len(lengths) != len(ids):
        raise ValueError(
            f"answer_labels: prompt_lengths must have one entry for each of {len(ids) // 2} pairs; got {len(lengths)}"
        )
    in_prompt = torch.arange(ids.shape[1], device=ids.device) < lengths.repeat(2)[:, None]
    return ids.masked_fill(in_prompt | (mask == 0), IGNORE_INDEX)


def _batch(trainer: DPOTrainer, state: _OpenRLHFState, *batch: Any) -> _PairRows:
    """The rows of a batch, the same tensors for policy and reference."""
    *tensors, prompt_lengths = batch

    def make() -> _PairRows:
        ids, mask, _ = trainer.concatenated_inputs(*batch)
        return _PairRows(ids, mask, answer_labels(ids, mask, prompt_lengths))

    return state.batch.get(tuple(tensors), make)


Results = tuple[Tensor, Tensor, Any, Tensor]
"""The return value of OpenRLHF: log-probabilities of chosen and rejected answers
[B], router loss, loss of chosen answers.
"""


def _forward(trainer: DPOTrainer, state: _OpenRLHFState, actor: Actor, *batch: Any) -> Results:
    ids, mask, labels = _batch(trainer, state, *batch)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    if hasattr(_base(actor).config, "output_router_logits"):  # the actor sets it, whether it is needed or not
        inputs["output_router_logits"] = trainer.aux_loss
    output = actor.model(**inputs, fused_lm_head=True)
    n = len(ids) // 2
    if "log_probs" in output:
        sums = output["log_probs"].sum(-1)
        means = sums / (labels[:, 1:] != IGNORE_INDEX).sum(-1).to(sums.device)
    else:  # logits: the call has fallen back
        from openrlhf.models.utils import log_probs_from_logits

        logits = output["logits"].float() / actor.temperature
        logps = log_probs_from_logits(logits, ids.roll(-1, 1))[:, :-1]
        sums, means = trainer._get_batch_logps(logps, mask, batch[-1] * 2)
    return sums[:n], sums[n:], output.get("aux_loss", []), -means[:n].mean()


def _memory_enabled(trainer: DPOTrainer, memory: Memory) -> bool:
    """Whether a trainer remembers its reference. Starts its memory with the first batch."""
    if memory.enabled and not memory.started:
        from ...ref_logps import keys

        actor = trainer.ref_model
        sharded = getattr(trainer.strategy, "stage", 0) == 3
        reason = "ranks run the reference together (ZeRO-3), and might disagree on when to skip it" if sharded else None
        memory.start(reason, lambda: key_of("openrlhf", keys.model_digest(_base(actor)), actor.temperature))
    return memory.enabled


def _remembered(trainer: DPOTrainer, state: _OpenRLHFState, score: Callable[..., Results], *batch: Any) -> Results:
    """The results of `score` for a reference, which is run on the pairs that are not remembered."""
    *tensors, prompt_lengths = batch
    ids, mask, labels = _batch(trainer, state, *batch)
    scored = labels != IGNORE_INDEX

    digests = digests_of_pairs(ids, mask, scored)

    def compute(missing: list[int]) -> Tensor:
        part = (*(x[missing] for x in tensors), [prompt_lengths[i] for i in missing])
        chosen, rejected, *_ = score(*(batch if len(missing) == len(digests) else part))
        return torch.stack([chosen, rejected], 1)

    base = _base(trainer.ref_model)
    state.memory.check(base)
    logps = state.memory.log_probs(base, digests, compute)
    chosen, rejected = logps.to(ids.device, torch.float32).unbind(1)
    return chosen, rejected, [], -(chosen / scored[: len(chosen), 1:].sum(1)).mean()


def _base(actor: Actor) -> PreTrainedModel:
    """The causal LM in an actor, inside of DeepSpeed's engine and PEFT."""
    model = cast(Any, actor.model)
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _install(actor: Actor, role: str, options: PatchOptions) -> None:
    base = _base(actor)
    request = Request(
        NAME,
        role,
        temperature=actor.temperature,
        share_prompts=options.share_prompts,
        memory_budget=options.memory_budget,
    )
    forward.install(base, request, functools.partial(_make_output, base.config), prior_scores=False)


def _make_output(config: Any, scored: ScoredBatch, kwargs: dict) -> dict[str, Tensor]:
    output = {"log_probs": scored.logps.logps}
    if scored.router_logits is not None:
        output["aux_loss"] = router_loss(config, scored.router_logits, scored.multiplicity)
    return output


def _strategy_unsupported_reason(trainer: DPOTrainer) -> str | None:
    strategy = trainer.strategy
    if strategy.ring_attn_group is not None:
        return "sequences are split across ranks (ring attention)"
    if getattr(strategy, "ds_tensor_parallel_size", 1) > 1:
        return "the model is split across ranks (tensor parallelism)"
    return None
