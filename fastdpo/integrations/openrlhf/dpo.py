"""OpenRLHF's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

`Actor.forward` is not patched, since PPO and SFT use it, too. OpenRLHF stores logits and their
float32 copy for every token of prompts and answers. Here, no padding is computed, whether or not
`packing_samples` is set, and only answers are scored.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without OpenRLHF.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...models import forward
from ...models.batch import inputs_once
from ...models.parts import base_of
from ...models.sharding import is_sharded
from ...models.state import ForwardOptions
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ...ref_logps.memory import Memory, digests_of_pairs, key_of
from ..admission.evidence import first_difference
from ..replacements import temporarily
from ..scored_rows import Inputs, ScoredRows
from .line import OpenRLHFLine, strategy_unsupported_reason

if TYPE_CHECKING:
    from openrlhf.models import Actor
    from openrlhf.trainer.dpo_trainer import DPOTrainer

Results = tuple[Tensor, Tensor, Any, Tensor]
"""The return value of OpenRLHF: log-probabilities of chosen and rejected answers
[B], router loss, loss of chosen answers.
"""

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "concatenated_inputs": ["self", "chosen_ids", "c_mask", "reject_ids", "r_mask", "prompt_id_lens"],
    "_get_batch_logps": ["self", "per_token_logps", "attention_mask", "prompt_id_lens"],
    "save_logs_and_checkpoints": ["self"],
}
_ACTOR_PARAMETERS = {"forward": ["self", "sequences"]}


class OpenRLHFDPOLine(OpenRLHFLine):
    parameters = _PARAMETERS
    relies_on = MappingProxyType({"reference_memory": ("fit", "evaluate")})
    replaced = (*OpenRLHFLine.replaced, "fit", "evaluate")

    def unsupported_reason(self) -> Reason | None:
        from openrlhf.models import Actor

        return super().unsupported_reason() or first_difference(Actor, _ACTOR_PARAMETERS, exact=False)

    def models(self, trainer: DPOTrainer) -> dict[str, nn.Module]:
        return {"policy": trainer.model, "reference": trainer.ref_model}

    def request(self, trainer: DPOTrainer, role: str) -> ForwardOptions:
        actor = trainer.model if role == "policy" else trainer.ref_model
        return super().request(trainer, role)._replace(temperature=actor.temperature)

    def fit(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        state = self.state_of(trainer)
        if state is None or not state.memory.enabled:
            stock(trainer, *args, **kwargs)
            return
        loader = LoaderWithCallback(trainer.train_dataloader, state.memory.exchange)
        with temporarily(trainer, train_dataloader=loader):
            stock(trainer, *args, **kwargs)

    def evaluate(self, stock: Callable, trainer: DPOTrainer, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        state = self.state_of(trainer)
        if state is not None and state.memory.enabled:
            state.memory.exchange()

    def concatenated_forward(
        self,
        stock: Callable,
        trainer: DPOTrainer,
        model: Actor,
        chosen_ids: Tensor,
        c_mask: Tensor,
        reject_ids: Tensor,
        r_mask: Tensor,
        prompt_id_lens: list[int],
    ) -> Results:
        batch = (chosen_ids, c_mask, reject_ids, r_mask, prompt_id_lens)
        state = self.state_of(trainer)
        if state is None:  # created before patch()
            return stock(trainer, model, *batch)
        scored = functools.partial(self._scored, stock, trainer, model)
        if model is trainer.ref_model and memory_enabled(trainer, state.memory, chosen_ids.device):
            return remembered(trainer, state.memory, self._rows_of(trainer, *batch), scored, *batch)
        return scored(*batch)

    def _scored(self, stock: Callable, trainer: DPOTrainer, model: Actor, *batch: Any) -> Results:
        reason = strategy_unsupported_reason(trainer) or forward.unsupported_reason(model, self.name)
        if reason is not None:
            forward.record_fallback(model, self.name, reason)
            return stock(trainer, model, *batch)
        return score(trainer, model, self._rows_of(trainer, *batch), batch[-1])

    def _rows_of(self, trainer: DPOTrainer, *batch: Any) -> Inputs:
        """`rows_of`, with the same tensors for policy and reference."""
        return inputs_once(self.state_of(trainer), batch[:-1], lambda: rows_of(trainer, *batch))


def rows_of(trainer: DPOTrainer, *batch: Any) -> Inputs:
    """The rows of a batch, given as the arguments of `concatenated_forward`."""
    ids, mask, _ = trainer.concatenated_inputs(*batch)
    return {"input_ids": ids, "attention_mask": mask, "labels": answer_labels(ids, mask, batch[-1])}


def score(trainer: DPOTrainer, actor: Actor, rows: Inputs, prompt_lengths: list[int]) -> Results:
    """What `concatenated_forward` returns for these rows, from one call of the actor's model."""
    inputs = {**rows, "use_cache": False}
    config = base_of(actor, "openrlhf").config
    if hasattr(config, "output_router_logits"):  # the actor sets it, whether it is needed or not
        inputs["output_router_logits"] = trainer.aux_loss
    output = actor.model(**inputs, fused_lm_head=True)
    if isinstance(output, ScoredRows):
        sums, means, aux_loss = output.sums(), output.means(), output.aux_loss
    else:  # logits: the call has fallen back
        from openrlhf.models.utils import log_probs_from_logits

        logits = output["logits"].float() / actor.temperature
        logps = log_probs_from_logits(logits, rows["input_ids"].roll(-1, 1))[:, :-1]
        sums, means = trainer._get_batch_logps(logps, rows["attention_mask"], prompt_lengths * 2)
        aux_loss = output.get("aux_loss")
    chosen, rejected = sums.chunk(2)
    return chosen, rejected, [] if aux_loss is None else aux_loss, -means[: len(chosen)].mean()


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


class LoaderWithCallback:
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


def memory_enabled(trainer: DPOTrainer, memory: Memory, device: torch.device) -> bool:
    """Whether a trainer remembers its reference. Starts its memory with the first batch.

    Args:
        trainer: the trainer.
        memory: its memory.
        device: that of the batch, for collectives. Parameters may be offloaded.
    """
    if memory.enabled and not memory.started:
        from ...ref_logps import keys

        base, temperature = base_of(trainer.ref_model, "reference_memory"), trainer.ref_model.temperature
        vote_on = device if is_sharded(base) else None
        memory.start(None, lambda: key_of("openrlhf", keys.model_digest(base), temperature), vote_on)
    return memory.enabled


def remembered(
    trainer: DPOTrainer, memory: Memory, rows: Inputs, score: Callable[..., Results], *batch: Any
) -> Results:
    """The results of `score` for a reference, which is run on the pairs that are not remembered.

    Args:
        trainer: the trainer.
        memory: its memory.
        rows: of the batch.
        score: computes what `concatenated_forward` returns.
        batch: the arguments of `concatenated_forward`.
    """
    *tensors, prompt_lengths = batch
    ids, scored = rows["input_ids"], rows["labels"] != IGNORE_INDEX
    digests = digests_of_pairs(ids, rows["attention_mask"], scored)

    def compute(missing: list[int]) -> Tensor:
        part = (*(x[missing] for x in tensors), [prompt_lengths[i] for i in missing])
        chosen, rejected, *_ = score(*(batch if len(missing) == len(digests) else part))
        return torch.stack([chosen, rejected], 1)

    base = base_of(trainer.ref_model, "reference_memory")
    memory.check(base, ids.shape[1])
    logps = memory.log_probs(base, digests, compute, ids.numel())
    if logps is None:
        return score(*batch)
    chosen, rejected = logps.to(ids.device, torch.float32).unbind(1)
    return chosen, rejected, [], -(chosen / scored[: len(chosen), 1:].sum(1)).mean()
