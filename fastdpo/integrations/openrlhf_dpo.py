"""OpenRLHF's DPOTrainer, entered where it scores a batch, in `concatenated_forward`.

Not in `Actor.forward`, which PPO and SFT share. Stock, logits and their float32 copy are stored for every token of
prompts and answers. Packed, padding is not computed whether or not `packing_samples` is set.

OpenRLHF reduces each number of its log by itself; here a log is one collective.
"""

# pyright: reportMissingImports=false
# OpenRLHF is not installed where types are checked.

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ..packing import IGNORE_INDEX
from . import qualify
from .fused_forward import Latest, Options, Request, Scored, decline, install, reason_off, router_loss
from .reference_memory import Memory, digests_of_pairs, key_of
from .replacements import Replacements, living

if TYPE_CHECKING:
    from openrlhf.models import Actor
    from openrlhf.trainer.dpo_trainer import DPOTrainer
    from transformers import PreTrainedModel

NAME = "openrlhf.DPOTrainer"

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "concatenated_inputs": ["self", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "_get_batch_logps": ["self", "per_token_logps", "attention_mask", "prompt_id_lens"],
}
_REDUCE_PARAMETERS = ["self", "data", "op"]

_OWN = "_fastdpo"

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


@dataclass
class _Own:
    """What a trainer that was built patched has of ours."""

    memory: Memory
    batch: Latest[_Batch] = field(default_factory=Latest)


class _Batch(NamedTuple):
    """Of the rows of a batch, [2B, L], chosen ones first."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


class _Epochs:
    """A loader that says when an epoch has ended."""

    def __init__(self, loader: Any, ended: Callable[[], None]):
        self._loader, self._ended = loader, ended

    def __iter__(self) -> Iterator:
        yield from self._loader
        self._ended()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def why_not() -> str | None:
    """What of the seam is not as this module knows it; None if all is."""
    from openrlhf.trainer.dpo_trainer import DPOTrainer
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    expected = {(DPOTrainer, name): parameters for name, parameters in _PARAMETERS.items()}
    expected[DeepspeedStrategy, "all_reduce"] = _REDUCE_PARAMETERS
    for (owner, name), parameters in expected.items():
        function = getattr(owner, name, None)
        found = None if function is None else list(inspect.signature(function).parameters)
        if found is None or found[: len(parameters)] != parameters:  # `_get_batch_logps` had one more, which stays
            return f"{owner.__name__}.{name} must begin with the parameters {parameters}; found {found}"
    return None


def enable(options: Options) -> None:
    from openrlhf.trainer.dpo_trainer import DPOTrainer
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    stock_init = DPOTrainer.__init__
    stock_forward = DPOTrainer.concatenated_forward
    stock_fit = DPOTrainer.fit
    stock_evaluate = DPOTrainer.evaluate
    stock_reduce = DeepspeedStrategy.all_reduce

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        stock_init(self, *args, **kwargs)
        vars(self)[_OWN] = _Own(Memory(options.reference_memory, NAME))
        _trainers.add(self)
        for role, actor in (("policy", self.model), ("reference", self.ref_model)):
            _install(actor, role, options)

    @functools.wraps(stock_fit)
    def fit(self, *args, **kwargs):
        own: _Own | None = vars(self).get(_OWN)
        if own is None or not own.memory.on:
            return stock_fit(self, *args, **kwargs)
        loader, self.train_dataloader = self.train_dataloader, _Epochs(self.train_dataloader, own.memory.share)
        try:
            return stock_fit(self, *args, **kwargs)
        finally:
            self.train_dataloader = loader

    @functools.wraps(stock_evaluate)
    def evaluate(self, *args, **kwargs):
        stock_evaluate(self, *args, **kwargs)
        own: _Own | None = vars(self).get(_OWN)
        if own is not None and own.memory.on:
            own.memory.share()

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens):
        batch = (chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens)
        own: _Own | None = vars(self).get(_OWN)
        if own is None:  # built before
            return stock_forward(self, model, *batch)

        def score(*batch):
            reason = _why_not_here(self) or reason_off(model, NAME)
            if reason is not None:
                decline(model, NAME, reason)
                return stock_forward(self, model, *batch)
            return _forward(self, own, model, *batch)

        if model is self.ref_model and _remembers(self, own.memory):
            return _remembered(self, own, score, *batch)
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
    _replacements.put(DPOTrainer, "evaluate", evaluate)
    _replacements.put(DeepspeedStrategy, "all_reduce", all_reduce)


def disable() -> None:
    _replacements.undo()
    for trainer in list(_trainers):
        vars(trainer).pop(_OWN, None)
    _trainers.clear()


def living_trainers() -> list[DPOTrainer]:
    """Trainers that exist already: their models were not entered."""
    from openrlhf.trainer.dpo_trainer import DPOTrainer

    return living(DPOTrainer)


def answer_labels(ids: Tensor, mask: Tensor, prompt_lengths: list[int] | Tensor) -> Tensor:
    """The labels of a batch of pairs: its answers' real tokens, those of chosen and of rejected answers alike.

    A prompt is as long as its tokens are by themselves, which need not be how the two rows begin: a tokenizer may merge
    the end of a prompt with an answer. So rows are masked by that length, not by what they have in common.

    Args:
        ids: [2B, L], chosen rows first, padded on the right.
        mask: [2B, L], 0 where padded.
        prompt_lengths: of the B prompts.

    Raises:
        ValueError: there is not one length for each pair.
    """
    lengths = torch.as_tensor(prompt_lengths, device=ids.device).flatten()
    if 2 * len(lengths) != len(ids):
        raise ValueError(
            f"answer_labels: prompt_lengths must have one entry for each of {len(ids) // 2} pairs; got {len(lengths)}"
        )
    in_prompt = torch.arange(ids.shape[1], device=ids.device) < lengths.repeat(2)[:, None]
    return ids.masked_fill(in_prompt | (mask == 0), IGNORE_INDEX)


def _batch(trainer: DPOTrainer, own: _Own, *batch: Any) -> _Batch:
    """The same tensors for policy and reference."""
    *tensors, prompt_lengths = batch

    def make() -> _Batch:
        ids, mask, _ = trainer.concatenated_inputs(*batch)
        return _Batch(ids, mask, answer_labels(ids, mask, prompt_lengths))

    return own.batch.get(tuple(tensors), make)


Results = tuple[Tensor, Tensor, Any, Tensor]
"""What stock returns: sums of chosen and rejected answers [B], the router's loss, and chosen answers' mean loss."""


def _forward(trainer: DPOTrainer, own: _Own, actor: Actor, *batch: Any) -> Results:
    ids, mask, labels = _batch(trainer, own, *batch)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    if hasattr(_base(actor).config, "output_router_logits"):  # which an actor turns on, wanted or not
        inputs["output_router_logits"] = trainer.aux_loss
    output = actor.model(**inputs, fused_lm_head=True)
    n = len(ids) // 2
    if "log_probs" in output:
        sums = output["log_probs"].sum(-1)
        means = sums / (labels[:, 1:] != IGNORE_INDEX).sum(-1).to(sums.device)
    else:  # logits: of a batch, or a first one, that can't be fused
        from openrlhf.models.utils import log_probs_from_logits

        logits = output["logits"].float() / actor.temperature
        logps = log_probs_from_logits(logits, ids.roll(-1, 1))[:, :-1]
        sums, means = trainer._get_batch_logps(logps, mask, batch[-1] * 2)
    return sums[:n], sums[n:], output.get("aux_loss", []), -means[:n].mean()


def _remembers(trainer: DPOTrainer, memory: Memory) -> bool:
    if memory.on and not memory.begun:
        from ..ref_logps import keys

        actor = trainer.ref_model
        together = getattr(trainer.strategy, "stage", 0) == 3
        reason = "ranks run the reference together (ZeRO-3), and could disagree on leaving it out" if together else None
        memory.begin(reason, lambda: key_of("openrlhf", keys.model_digest(_base(actor)), actor.temperature))
    return memory.on


def _remembered(trainer: DPOTrainer, own: _Own, score: Callable[..., Results], *batch: Any) -> Results:
    """What `score` returns of a reference, run on the pairs that are new."""
    *tensors, prompt_lengths = batch
    ids, mask, labels = _batch(trainer, own, *batch)
    scored = labels != IGNORE_INDEX

    digests = digests_of_pairs(ids, mask, scored)

    def compute(missing: list[int]) -> Tensor:
        part = (*(x[missing] for x in tensors), [prompt_lengths[i] for i in missing])
        chosen, rejected, *_ = score(*(batch if len(missing) == len(digests) else part))
        return torch.stack([chosen, rejected], 1)

    base = _base(trainer.ref_model)
    own.memory.check(base)
    found = own.memory.log_probs(base, digests, compute)
    chosen, rejected = found.to(ids.device, torch.float32).unbind(1)
    return chosen, rejected, [], -(chosen / scored[: len(chosen), 1:].sum(1)).mean()


def _base(actor: Actor) -> PreTrainedModel:
    """The causal LM in an actor, below DeepSpeed's engine and PEFT."""
    model = cast(Any, actor.model)
    model = getattr(model, "module", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _install(actor: Actor, role: str, options: Options) -> None:
    base = _base(actor)
    request = Request((), actor.temperature, False, *qualify.logit_transform(base.config.get_text_config()))
    install(base, NAME, role, request, options, functools.partial(_answer, base.config), stock_scores=False)


def _answer(config: Any, scored: Scored, kwargs: dict) -> dict[str, Tensor]:
    found = {"log_probs": scored.logps.logps}
    if scored.router_logits is not None:
        found["aux_loss"] = router_loss(config, scored)
    return found


def _why_not_here(trainer: DPOTrainer) -> str | None:
    strategy = trainer.strategy
    if strategy.ring_attn_group is not None:
        return "sequences are spread over ranks (ring attention)"
    if getattr(strategy, "ds_tensor_parallel_size", 1) > 1:
        return "the model is spread over ranks (tensor parallelism)"
    return None
