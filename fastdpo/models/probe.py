"""Runs a few random rows packed and padded, and compares the hidden states.

A model is probed before anything is computed from packed batches. This finds models that mix tokens
in ways that neither their configuration nor their modules reveal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import packing
from . import attention
from .support import attention_window, logit_transform, rope_depends_on_length, shared_reason

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LONGEST_PROBE = 8192
"""Up to this window in tokens, the probe's rows are longer than the window. A longer window is trusted
once it has been passed to the attention."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Allowed difference of a hidden state, relative to its norm. Rounding makes 1e-6 of it in float32, 2e-3
with TF32 and 1e-2 in half precision. A wrong mask, window or position makes tenths."""

HALF_TOLERANCE = 0.1

SHORTEST_BRANCH = 7


class ProbeResult(NamedTuple):
    """What running a model has shown.

    Attributes:
        unsupported_reason: why its packed hidden states cannot be used; None if they equal the padded ones.
        is_random: whether two runs in training mode differ, because of dropout of any kind.
        attention_dropout: dropout of attention weights in training mode.
    """

    unsupported_reason: str | None
    is_random: bool = False
    attention_dropout: float = 0.0


def probe(model: PreTrainedModel, device: torch.device) -> ProbeResult:
    """Compares packed with padded hidden states of a model that is switched to packed attention.

    Two groups of rows are run, one of them longer than the model's attention window. The rows are the
    same in every process, so that ranks that run the model together come to the same result. Runs
    without gradients and leaves buffers as they were; a model that writes to its buffers when it runs
    is unsupported, since they would then hold statistics of packed tokens.
    """
    with torch.no_grad(), preserved_buffers(model) as written:
        result = _probe(model, device)
    if result.unsupported_reason is None and written:
        return ProbeResult(f"running {type(model).__name__} writes to its buffers: {', '.join(written)}")
    return result


def _probe(model: PreTrainedModel, device: torch.device) -> ProbeResult:
    window = attention_window(model.config)
    ids, mask, groups = _rows(model.config, window)
    labels = ids.masked_fill(mask == 0, packing.IGNORE_INDEX)
    ids, mask, labels = (x.to(device) for x in (ids, mask, labels))
    reach = ids.shape[1] if rope_depends_on_length(model.config) else None
    layout = packing.pack(ids, mask, labels, groups=groups, shifted=True, store_all=True, reach=reach)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        batch = "padded rows"
        try:
            with _mode(model, training=False):
                padded = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                batch = "packed tokens"
                with attention.witness() as recorded:
                    packed = run_packed(model, layout, ids).last_hidden_state
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # models raise anything for rows or attention masks that they do not expect
            name = type(model).__name__
            return ProbeResult(f"{name} cannot be run on {batch}: {type(error).__name__}: {error}")
        missed = _missed_layout(model, window, recorded)
        reason = shared_reason(model, missed or _difference(model, layout, padded, packed))
        if reason is not None:
            return ProbeResult(reason)
        devices = [] if device.type == "cpu" else [device]
        with _mode(model, training=True), torch.random.fork_rng(devices), attention.witness() as recorded:
            first, second = (run_packed(model, layout, ids).last_hidden_state for _ in range(2))
    return ProbeResult(None, not torch.equal(first, second), recorded.dropout)


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[list[str]]:
    """Restores the values of buffers after the block. Yields a list that then names those that had changed."""
    before = [(name, x, x.clone()) for name, x in model.named_buffers() if x.device.type != "meta"]
    written: list[str] = []
    try:
        yield written
    finally:
        for name, x, copy in before:
            if not _equal(x, copy):
                written.append(name)
                x.copy_(copy)


def head_difference(model: PreTrainedModel, device: torch.device) -> str | None:
    """Returns how logits of a model's class differ from its head and `logit_transform`, or None if they do not.

    Compares with the forward of the class, since a trainer may have wrapped the model's own for
    another precision.
    """
    softcap, logit_scale = logit_transform(model.config.get_text_config())
    ids = torch.randint(model.config.vocab_size, (1, 4), generator=torch.Generator().manual_seed(0)).to(device)
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _mode(model, training=False):
        expected = type(model).forward(model, **batch).logits.float()
        hidden = model.base_model(**batch).last_hidden_state
        head = cast(nn.Linear, model.get_output_embeddings())
        logits = head(hidden.to(head.weight.device)).float().to(expected.device) * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    error = ((logits - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    if error <= _tolerance(model):
        return None
    return f"the head of {type(model).__name__} gives other logits than its forward (relative difference {error:.2g})"


def run_packed(model: PreTrainedModel, layout: packing.Layout, input_ids: Tensor, **options: object):
    """The backbone's outputs for the packed tokens of a padded batch; hidden states [1, T, D]."""
    return model.base_model(
        input_ids=layout.pack(input_ids),
        attention_mask=layout.mask,
        position_ids=layout.position_ids[None],
        use_cache=False,
        **options,
    )


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal. NaN equals NaN."""
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True))


def _rows(config: PretrainedConfig, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """ids and mask [5, L], groups [5]: three short rows with one prefix, and two long rows with another."""
    longest = 24 if window is None or window > LONGEST_PROBE else window + 8
    longest = min(longest, (getattr(config, "max_position_embeddings", None) or longest + 32) - 16)
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> Tensor:
        return torch.randint(config.vocab_size, (n,), generator=generator)

    rows = []
    for prefix, branches in ((tokens(5), (SHORTEST_BRANCH, 9, 8)), (tokens(longest), (11, 14))):
        rows += [torch.cat([prefix, tokens(n)]) for n in branches]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long(), torch.tensor([0, 0, 0, 1, 1])


def _missed_layout(model: PreTrainedModel, window: int | None, recorded: attention.Witness) -> str | None:
    """Returns which layers did not receive the layout or the window, or None if all did."""
    layers = model.config.num_hidden_layers
    if recorded.others or recorded.layouts < layers:
        return (
            f"{recorded.layouts} attention calls of {type(model).__name__}'s {layers} layers got the packed layout, "
            f"{recorded.others} did not"
        )
    if window is not None and window > LONGEST_PROBE and window not in recorded.windows:
        return f"the window of {window} tokens is not passed to the attention"
    return None


def _difference(model: PreTrainedModel, layout: packing.Layout, padded: Tensor, packed: Tensor) -> str | None:
    """Compares the last tokens of each row by their median error: rounding may route single tokens to other experts."""
    expected = padded.flatten(0, 1)[layout.output_index].float()  # [M, D]
    actual = packed[0][layout.score_index][layout.output_source].float()
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    row = layout.output_index // layout.output_shape[1]
    worst = torch.stack([errors[row == r][-SHORTEST_BRANCH:].median() for r in range(layout.output_shape[0])]).max()
    tolerance = _tolerance(model)
    if worst <= tolerance:
        return None
    return (
        f"the packed hidden states of {type(model).__name__} differ from its padded ones by {worst:.2g} of their size "
        f"(allowed: {tolerance:g})"
    )


def _tolerance(model: PreTrainedModel) -> float:
    dtypes = {p.dtype for p in model.parameters()}
    least_precise = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 1.0)
    return TOLERANCES.get(least_precise, HALF_TOLERANCE)


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
