"""Runs a few random rows packed and padded, and compares the hidden states.

A model is probed before anything is computed from packed batches. This finds models that mix tokens
in ways that neither their configuration nor their modules reveal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import packing
from ..accuracy import PROBE_FACTOR, fixed_rounding, model_unit, perturbed, probe_bound, row_errors
from ..reasons import Reason
from . import attention
from .mixers import finding, function_probe
from .parts import backbone, in_mode, text_config
from .reward_head import RewardHead
from .sharding import shared_reason
from .support import attention_window, logit_transform, rope_reason

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LONGEST_PROBE = 8192
"""Up to this window in tokens, the probe's rows are longer than the window. A longer window is
trusted once it has been passed to the attention.
"""

SHORTEST_BRANCH = 7

START = 3
"""Number of tokens at the start of a branch. Convolutions of width 4 see their prefix."""


class ProbeResult(NamedTuple):
    """The result of `probe`.

    Attributes:
        unsupported_reason: why its packed hidden states cannot be used; None if they equal the
            padded ones.
        is_random: whether two runs in training mode differ, because of dropout of any kind.
        attention_dropout: dropout of attention weights in training mode.
    """

    unsupported_reason: Reason | None
    is_random: bool = False
    attention_dropout: float = 0.0


def probe(model: PreTrainedModel, device: torch.device) -> ProbeResult:
    """Compares packed with padded hidden states of a model that is switched to packed attention.

    Two groups of rows are run, one of them longer than the model's attention window. The rows are
    the same in every process, so that ranks that run the model together come to the same result.
    """
    config = text_config(model)
    ids, mask, groups = _rows(config, attention_window(config))
    labels = ids.masked_fill(mask == 0, packing.IGNORE_INDEX)
    ids, mask, labels = (x.to(device) for x in (ids, mask, labels))
    reach = None if rope_reason(model, ids.shape[1]) is None else ids.shape[1]
    layout = packing.pack(ids, mask, labels, groups=groups, shifted=True, store_all=True, reach=reach)
    padded = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    return compare(model, layout, padded, attention.packed_inputs(model, layout, ids))


def compare(
    model: PreTrainedModel, layout: packing.Layout, padded: dict[str, Any], packed: dict[str, Any]
) -> ProbeResult:
    """Compares the packed hidden states of a batch with its padded ones.

    Runs without gradients and leaves buffers as they were; a model that writes to its buffers when
    it runs is unsupported, since they would then hold statistics of packed tokens. Rotary embeddings
    may write theirs: they follow the width of the batch.

    Args:
        model: a model that is switched to packed attention.
        layout: of the batch.
        padded, packed: the arguments of the model's backbone for the rows and for the packed tokens.
    """
    try:
        with torch.no_grad(), preserved_buffers(model) as written:
            result = _compare(model, layout, padded, packed)
    except packing.NotPackable as error:
        return ProbeResult(error.reason)
    if result.unsupported_reason is not None:
        return result
    name, buffers = type(model).__name__, ", ".join(written)
    reason = shared_reason(model, Reason("written-buffers", model=name, buffers=buffers) if written else None)
    return result._replace(unsupported_reason=reason)


def _compare(
    model: PreTrainedModel, layout: packing.Layout, padded: dict[str, Any], packed: dict[str, Any]
) -> ProbeResult:
    device = padded["input_ids"].device
    unit = model_unit(model, device)

    if function_probe.refuse_wrong_kernels(model, device):
        attention.switch(model)

    def run(inputs: dict[str, Any]) -> Tensor:
        return backbone(model)(**inputs).last_hidden_state.flatten(0, 1)

    with torch.autocast(device.type, enabled=False):
        with in_mode(model, training=False):
            with _running(model, "padded rows"):
                expected = run(padded)
                with perturbed([model.get_input_embeddings()], fixed_rounding, unit):
                    rounded = run({name: _rounded(x, unit) for name, x in padded.items()})
            with _running(model, "packed tokens"), attention.witness() as recorded:
                states = run(packed)
        (_, length), width = layout.padded_shape, layout.output_shape[1]
        scored = layout.output_index // width * length + layout.output_index % width  # in the padded batch
        states = states[layout.score_index][layout.output_source]
        difference = _difference(model, layout, states, expected[scored], rounded[scored])
        functions = function_probe.unsupported_reason(model, device)
        reason = shared_reason(model, _missed_layout(model, recorded) or functions or difference)
        if reason is not None:
            return ProbeResult(reason)
        devices = [] if device.type == "cpu" else [device]
        with (
            _running(model, "packed tokens in training mode"),
            in_mode(model, training=True),
            torch.random.fork_rng(devices),
            attention.witness() as recorded,
        ):
            first, second = run(packed), run(packed)
    return ProbeResult(None, not torch.equal(first, second), recorded.dropout)


@contextmanager
def _running(model: PreTrainedModel, batch: str) -> Iterator[None]:
    """Raises `NotPackable` if the block raises an error, on this rank or on one that runs the model with it."""
    reason = cause = None
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # models raise anything for rows or attention masks that they do not expect
        message = f"{type(error).__name__}: {error}"
        reason, cause = Reason("cannot-run", model=type(model).__name__, batch=batch, error=message), error
    reason = shared_reason(model, reason)
    if reason is not None:
        raise packing.NotPackable(reason) from cause


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[list[str]]:
    """Restores the buffers of a model after the block, and whatever else its rotary embeddings keep of
    the width of their last batch. Yields a list that then names the other buffers that had changed.
    """
    rotary = [
        (module, dict(vars(module)), dict(module._buffers))
        for module in model.modules()
        if hasattr(module, "rope_type")
    ]
    of_rotary = {id(x) for _, _, buffers in rotary for x in buffers.values()}
    before = [(name, x, x.clone()) for name, x in model.named_buffers() if x.device.type != "meta"]
    written: list[str] = []
    try:
        yield written
    finally:
        for name, x, copy in before:
            if not _equal(x, copy):
                written += [] if id(x) in of_rotary else [name]
                x.copy_(copy)
        for module, attributes, buffers in rotary:
            vars(module).update(attributes)
            module._buffers.update(buffers)


def head_difference(model: PreTrainedModel, device: torch.device) -> Reason | None:
    """Returns how logits of a model's class differ from its head and `logit_transform`, or None if
    they do not.
    """
    softcap, logit_scale = logit_transform(text_config(model))

    def own(batch: dict[str, Any]) -> Tensor:
        return type(model).forward(model, **batch, use_cache=False).logits

    def logits(hidden: Tensor, batch: dict[str, Any]) -> Tensor:
        head = cast(nn.Linear, model.get_output_embeddings())
        found = head(hidden.to(head.weight.device)).float() * logit_scale
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    error = _unexplained_error(model, device, 1, own, logits)
    return None if error is None else Reason("different-logits", model=type(model).__name__, error=error)


def score_difference(model: PreTrainedModel, device: torch.device, rewards: RewardHead) -> Reason | None:
    """Returns how the score of a reward model's class differs from that of its head at the scored token, or None
    if it does not.
    """

    def is_scored(batch: dict[str, Any]) -> Tensor:
        return rewards.with_scored_tokens(model, batch)["shift_labels"] != packing.IGNORE_INDEX

    def own(batch: dict[str, Any]) -> Tensor:
        return rewards.returned(type(model).forward(model, **batch, **rewards.own_arguments), is_scored(batch))

    def scores(hidden: Tensor, batch: dict[str, Any]) -> Tensor:
        return rewards.scores(model, hidden[is_scored(batch)])

    error = _unexplained_error(model, device, 4, own, scores)
    return None if error is None else Reason("different-scores", model=type(model).__name__, error=error)


def _unexplained_error(
    model: PreTrainedModel,
    device: torch.device,
    calls: int,
    own: Callable[[dict[str, Any]], Tensor],
    ending: Callable[[Tensor, dict[str, Any]], Tensor],
) -> float | None:
    """The relative error of what is computed from hidden states in the place of what a model returns, or None if
    rounding explains it.

    Compares with the forward of the class, since a trainer may have wrapped the model's own for
    another precision.

    Args:
        model: the model.
        device: of its inputs.
        calls: the number of calls with a row each, whose results are compared together.
        own: given the arguments of the call, what the forward of the class returns.
        ending: given hidden states [1, L, D] and the arguments of the call.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config(model).vocab_size, (calls, 1, 4), generator=generator, device="cpu").to(device)
    expected, found = [], []
    plainly = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), preserved_buffers(model), plainly, in_mode(model, training=False):
        for row in ids:
            batch = dict(input_ids=row, attention_mask=torch.ones_like(row))
            expected.append(own(batch).flatten())
            hidden = backbone(model)(**batch, use_cache=False).last_hidden_state
            found.append(ending(hidden, batch).flatten().to(expected[0].device))
        unit = max(model_unit(model, device), torch.finfo(expected[0].dtype).eps)
    error = row_errors(torch.cat(found), torch.cat(expected)).item()
    return None if error <= PROBE_FACTOR * unit else error


def _rounded(x: Any, unit: float) -> Any:
    return fixed_rounding(x, unit) if isinstance(x, Tensor) and x.is_floating_point() else x


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal. NaN equals NaN."""
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True))


def _rows(config: PretrainedConfig, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """ids and mask [5, L], groups [5]: three short rows with one
    prefix, and two long rows with another.
    """
    longest = 24 if window is None or window > LONGEST_PROBE else window + 8
    longest = min(longest, (getattr(config, "max_position_embeddings", None) or longest + 32) - 16)
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> Tensor:
        return torch.randint(config.vocab_size, (n,), generator=generator, device="cpu")

    rows = []
    for prefix, branches in ((tokens(5), (SHORTEST_BRANCH, 9, 8)), (tokens(longest), (11, 14))):
        rows += [torch.cat([prefix, tokens(n)]) for n in branches]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths, groups = torch.tensor([[len(row) for row in rows], [0, 0, 0, 1, 1]], device="cpu")
    return ids, (torch.arange(ids.shape[1], device="cpu") < lengths[:, None]).long(), groups


def _missed_layout(model: PreTrainedModel, recorded: attention.Witness) -> Reason | None:
    """Returns which layers did not receive the layout or the window, or None if all did."""
    mixers = finding.mixers_of(model)
    missed = [mixer for mixer in mixers if mixer not in recorded.mixers]
    if missed:
        kinds = ", ".join(sorted({type(mixer).__name__ for mixer in missed}))
        name = type(model).__name__
        return Reason("missed-mixers", missed=len(missed), all=len(mixers), model=name, kinds=kinds)
    config = text_config(model)
    layers = len(finding.attention_modules(model)) if mixers else config.num_hidden_layers
    window = attention_window(config)
    if recorded.others or recorded.layouts < layers:
        name, layouts, others = type(model).__name__, recorded.layouts, recorded.others
        return Reason("missed-attention", layouts=layouts, model=name, layers=layers, others=others)
    if window is not None and window > LONGEST_PROBE and window not in recorded.windows:
        return Reason("missed-window", window=window)
    return None


def _difference(
    model: PreTrainedModel, layout: packing.Layout, packed: Tensor, padded: Tensor, rounded: Tensor
) -> Reason | None:
    """Returns how packed hidden states [M, D] differ from padded ones
    by more than rounding, or None.
    """
    starts = bool(finding.mixers_of(model))  # what a convolution loses is lost by the first tokens of a branch
    error = _worst_error(layout, packed, padded, starts)
    tolerance = probe_bound(_worst_error(layout, rounded, padded, starts))
    if error <= tolerance:
        return None
    return Reason("different-states", model=type(model).__name__, error=error, allowed=tolerance)


def _worst_error(layout: packing.Layout, states: Tensor, expected: Tensor, starts: bool) -> float:
    """The largest relative error [M, D] of any row, each row by the median of its last tokens and, if
    `starts`, by that of the first tokens that it does not share.

    Rounding may route single tokens to other experts, which the median ignores.
    """
    errors = row_errors(states, expected)
    row = layout.output_index // layout.output_shape[1]
    own = layout.multiplicity[layout.score_index][layout.output_source] == 1
    judged = []
    for r in row.unique():
        judged += [errors[row == r][-SHORTEST_BRANCH:], *([errors[(row == r) & own][:START]] if starts else [])]
    return torch.stack([each.median() for each in judged if len(each)]).max().item()
