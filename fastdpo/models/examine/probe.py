"""Runs a few random rows packed and padded, and compares hidden states and gradients.

A model is probed before anything is computed from packed batches, in the mode in which it is called.
This finds models that mix tokens in ways that neither their configuration nor their modules reveal,
and backward passes that depend on more than the gradients that they are given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from ... import packing
from ...accuracy import PROBE_FACTOR, fixed_rounding, perturbed, probe_bound, product_unit, row_errors
from ...reasons import Reason
from .. import attention
from ..mixers import finding, function_probe
from ..parts import attention_window, backbone, logit_transform, text_config
from ..ranks.sharding import is_sharded, shared_reason
from ..reward_head import RewardHead
from .comparable import is_quantized, undisturbed
from .rows import ALIKE, LONGEST, SHORTEST_BRANCH, TOKENS, Rows, random_rows, special_ids_of
from .runs import Run, differentiable, gradient_difference, least_unit, run_backbone
from .snapshot import restored
from .support import has_own_code, rope_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_PROBE = 8192
"""Up to this window in tokens, rows that are longer than the window are run. A longer window is
trusted once it has been passed to the attention.
"""

LONG = 8192
"""Number of tokens up to which ranks that run a model with code of its own together examine it at once."""

COMPARED = {"keeps-state", "unknown-randomness", "added-gradients", "different-gradients", "different-states"}
"""Names of the reasons that a comparison gives, and that hold for another model with the same code."""

START = 3
"""Number of tokens at the start of a branch. Convolutions of width 4 see their prefix."""


LeftPadding = Literal["ignored", "counted", "seen"]
"""How padding on the left changes the hidden states of a row: not at all, as those of a model with rotary embeddings;
because the model's own positions count it, as those of GPT-2; or in another way.
"""

NONDETERMINISTIC = 1024
"""By how many units of rounding two runs of the same batch may differ, since kernels add up in different orders."""

_OF_ROWS = {"cannot-run", "different-states", "different-gradients", "not-finite"}
"""Names of the reasons of `_is_of_rows`."""


class ProbeResult(NamedTuple):
    """The result of `probe`, for a model in the mode, training or evaluation, that it had.

    Attributes:
        unsupported_reason: why packed batches cannot be used; None if they make no difference.
        is_random: whether torch's dropout is active.
        attention_dropout: dropout of attention weights.
        packing_reason: why a model that ranks run together runs padded rows, and was not run here.
        left_padding: how padding on the left changes the states of rows.
        is_audited: whether ranks that run the model together audit its calls, since one of them has custom code.
    """

    unsupported_reason: Reason | None
    is_random: bool = False
    attention_dropout: float = 0.0
    packing_reason: Reason | None = None
    left_padding: LeftPadding = "ignored"
    is_audited: bool = False


def probe(model: PreTrainedModel, device: torch.device, special_ids: Sequence[int] = ()) -> ProbeResult:
    """Compares packed with padded rows of a model that is switched to packed attention, in the mode that it is in.

    The functions of its mixers are compared first, since rows tell little of them (see `function_probe`).
    Groups of rows are run, one of them padded on the left, as far as the model ignores that. The rows are the same
    in every process, so that ranks that run the model together come to the same result. Gradients are compared as well:
    those of the embeddings' output and, in training mode, of the parameters that are trained. If the model's attention
    has a window, rows that are longer are run, too, without gradients, since they may be long.

    Args:
        model: the model.
        device: of its inputs.
        special_ids: of tokens that the rows hold next to random ones and to those that the configuration names.
    """
    with undisturbed(model):
        reason = shared_reason(model, function_probe.unsupported_reason(model, device, attention.switch))
    if reason is not None:
        return ProbeResult(reason)
    window = attention_window(text_config(model))
    specials = special_ids_of(model, special_ids) if has_own_code(model) else None
    rows = functools.partial(random_rows, text_config(model), specials, device)
    with torch.inference_mode(False):
        trains = _trains(model)
        result = _probe_padding(model, rows, gradients=trains or _may_be_differentiated(model))
        if not trains and result.unsupported_reason is not None and result.unsupported_reason.name == "cannot-run":
            result = _probe_padding(model, rows, gradients=False)  # kernels for inference have no backward pass
        further = [(window + 8, 1)] if window is not None and LONGEST - 8 < window <= LONGEST_PROBE else []
        if specials is not None and is_sharded(model):
            further.append((LONGEST, LONG // TOKENS + 1))
        for longest, copies in further:
            if result.unsupported_reason is None:
                longer = _probe_rows(model, rows, longest, gradients=False, copies=copies)
                result = result._replace(unsupported_reason=longer.unsupported_reason)
    return result


def _probe_padding(model: PreTrainedModel, rows: Rows, gradients: bool) -> ProbeResult:
    """Probes a model with rows that are padded on the left, too, as far as it ignores that padding or counts it. What
    it computes of rows without such padding must be right in any case: where it counts padding, fewer rows share a
    prefix, and an error is smaller.
    """

    def probed(left_padding: LeftPadding) -> ProbeResult:
        return _probe_rows(model, rows, LONGEST, gradients, left_padding)._replace(left_padding=left_padding)

    result = probed("ignored")
    if _is_of_rows(result):
        result, counted = probed("seen"), probed("counted")
        is_right = result.unsupported_reason is None or counted.unsupported_reason is not None
        return counted if is_right and not _is_of_rows(counted) else result
    return result


def _is_of_rows(result: ProbeResult) -> bool:
    """Whether a model is unsupported for a reason that other rows may not have."""
    return result.unsupported_reason is not None and result.unsupported_reason.name in _OF_ROWS


def _probe_rows(
    model: PreTrainedModel,
    rows: Rows,
    longest: int,
    gradients: bool,
    left_padding: LeftPadding = "seen",
    copies: int = 1,
) -> ProbeResult:
    """Probes a model with rows whose longest prefix has `longest` tokens, if the model has as many positions, or with
    several times as many rows. Rows are padded on the left, too, unless padding is seen there.
    """
    limit = getattr(text_config(model), "max_position_embeddings", None) or sys.maxsize
    ids, mask, groups = rows(min(longest, max(limit - 16, 0)), min(ALIKE, limit), left_padding != "seen", copies)
    labels = torch.where(mask == 0, packing.IGNORE_INDEX, 0)  # of all tokens, whatever is predicted there
    reach = None if rope_reason(model, ids.shape[1]) is None else ids.shape[1]
    form = packing.Form(groups, store_all=True, reach=reach, count_padding=left_padding == "counted")
    layout = packing.make_layout(ids, mask, labels, form, shifted=True)
    padded = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    return compare(model, layout, padded, attention.inputs_of(layout, ids), gradients=gradients)


def compare(
    model: PreTrainedModel,
    layout: packing.Layout,
    padded: dict[str, Any],
    packed: dict[str, Any],
    *,
    gradients: bool = False,
) -> ProbeResult:
    """Compares the packed hidden states of a batch, and their gradients, with its padded ones.

    The model is left as it was. One whose modules change when it runs is unsupported: they would keep
    what they have seen of packed tokens.

    Args:
        model: a model that is switched to packed attention.
        layout: of the batch.
        padded, packed: the arguments of the model's backbone for the rows and for the packed tokens.
        gradients: whether gradients are compared.
    """
    try:
        with undisturbed(model) as dropout:
            reason, recorded = _compare(model, layout, padded, packed, gradients)
    except packing.NotPackable as error:
        return ProbeResult(error.reason)
    return ProbeResult(shared_reason(model, reason), dropout.is_random, recorded.dropout)


def _compare(
    model: PreTrainedModel, layout: packing.Layout, padded: dict[str, Any], packed: dict[str, Any], gradients: bool
) -> tuple[Reason | None, attention.Witness]:
    unit = product_unit(padded["input_ids"].device)
    (_, length), width = layout.padded_shape, layout.output_shape[1]
    scored = layout.output_index // width * length + layout.output_index % width  # in the padded batch
    weight = 1.0 if gradients else None
    of_rows, of_tokens = (functools.partial(_running, model, x) for x in ("padded rows", "packed tokens"))
    with attention.witness(model):
        expected = run_backbone(model, padded, scored, weight, of_rows)
        with perturbed([model.get_input_embeddings()], fixed_rounding, unit):
            inputs = {name: _rounded(x, unit) for name, x in padded.items()}
            rounded = run_backbone(model, inputs, scored, weight, of_rows)
    with attention.witness(model) as recorded:
        found = run_backbone(model, packed, layout.label_index, weight, of_tokens)
    with attention.witness(model):
        again = run_backbone(model, packed, layout.label_index, 0.0 if gradients else None, of_tokens)
    own, has_own = expected, has_own_code(model)
    is_any = attention.implementation(model) in ("eager", "sdpa")  # flash attention does not run in float32
    if is_any and (has_own or is_sharded(model)):  # ranks that run a model together run it equally often
        # By the name of its own attention: code may choose by it, and an eager function be another than the file's.
        own = run_backbone(model, padded, scored, None, of_rows)
    if not has_own or recorded.dropout:  # which packed attention leaves out under a witness
        own = expected

    name = type(model).__name__
    changed = _changed(expected, rounded, found, again)
    if changed:
        return Reason("keeps-state", model=name, names=changed), recorded
    if not expected.states.isfinite().all():
        return Reason("not-finite", model=name), recorded
    starts = bool(finding.mixers_of(model))  # what a convolution loses is lost by the first tokens of a branch
    least = least_unit(model, found)
    allowed = probe_bound(max(_worst_error(layout, rounded.states, expected.states, starts), least / 16))
    random = _worst_error(layout, again.states, found.states, starts)
    if random > min(allowed, NONDETERMINISTIC * least):  # noise has made `allowed` larger
        return Reason("unknown-randomness", model=name), recorded
    reason = _missed_layout(model, recorded)
    if reason is not None:
        return reason, recorded
    error = max(_worst_error(layout, x.states, own.states, starts) for x in (found, expected))
    if not error <= allowed:  # nor is NaN
        return Reason("different-states", model=name, error=error, allowed=allowed), recorded
    if any((x.abs() > 0).any() for x in again.gradients.values()):  # which 0 times anything is not
        return Reason("added-gradients", model=name), recorded
    return gradient_difference(name, found, expected, rounded, least / 2), recorded


def _trains(model: PreTrainedModel) -> bool:
    """Whether calls of a model, in the mode that it is in, are differentiated."""
    parameters = [*model.parameters()]
    is_frozen = not any(x.requires_grad for x in parameters) or any(x.is_inference() for x in parameters)
    return model.training and not is_frozen


def _may_be_differentiated(model: PreTrainedModel) -> bool:
    """Whether a model that does not train may be. Engines prepare a backward pass in models that train."""
    return not is_sharded(model) and not any(x.is_inference() or is_quantized(x) for x in model.parameters())


def _changed(*runs: Run) -> str:
    """Names of what runs have changed in a model, as far as they fit into a line."""
    names = [*dict.fromkeys(name for run in runs for name in run.changed)]
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])


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
    expected, found, dtypes = [], [], set()
    with (
        undisturbed(model),
        restored(model),
        attention.witness(model),  # which leaves out attention dropout
        differentiable(model, gradients=False),
    ):
        for row in ids:
            batch = dict(input_ids=row, attention_mask=torch.ones_like(row))
            expected.append(own(batch).detach().flatten())
            hidden = backbone(model)(**batch, use_cache=False).last_hidden_state
            dtypes |= {hidden.dtype, expected[-1].dtype}
            found.append(ending(hidden, batch).detach().flatten().to(expected[0].device))
    unit = max(product_unit(device), *(torch.finfo(dtype).eps for dtype in dtypes))
    error = row_errors(torch.cat(found), torch.cat(expected)).item()
    return None if error <= PROBE_FACTOR * unit else error


def _rounded(x: Any, unit: float) -> Any:
    return fixed_rounding(x, unit) if isinstance(x, Tensor) and x.is_floating_point() else x


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
