"""Which models can be packed: what their configuration and modules say, and what they do when they are run.

Nothing here knows names of models. Static signs refuse what is known to mix tokens in other ways. A probe then runs a
few random rows packed and padded, before anything is computed from the packed ones, and compares the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import attention, packing

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER_TYPES = {"full_attention", "sliding_attention"}

LONGEST_PROBE = 8192
"""A longer window is trusted once attention has been told of it; a shorter one is probed beyond its length."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Allowed of a hidden state, relative to its norm. Rounding makes 1e-6 of it in float32, 2e-3 with TF32; half precision
makes 1e-2. A wrong mask, window or position makes tenths."""

HALF_TOLERANCE = 0.1

SHORTEST_BRANCH = 7


def why_not(model: PreTrainedModel) -> str | None:
    """What of a model's configuration or modules can't be packed; None if nothing is known against it."""
    config = model.config
    name = type(model).__name__
    if config.get_text_config() is not config:
        return f"{name} is a multimodal model"
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder"
    if getattr(config, "alibi", False):
        return f"{name} biases its attention by distance (ALiBi)"
    if getattr(model, "_is_stateful", False) or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return f"{name} mixes tokens by other means than attention"
    other_layers = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if other_layers:
        return f"layers of type {', '.join(sorted(other_layers))} are not supported"
    if not model._can_set_attn_implementation():
        return f"{name} does not let its attention be set"
    prior = attention.implementation(model)
    if prior not in attention.PRIOR:
        return f"attention implementation {prior!r} is not supported yet (supported: {', '.join(attention.PRIOR)})"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn chooses an attention by the implementation's name"
    return None


def reach_of_positions(config: PretrainedConfig) -> bool:
    """Whether rotary embeddings depend on the largest position of the batch."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_each_layer_type = parameters.values() if "rope_type" not in parameters else [parameters]
    types = {(each or {}).get("rope_type", "default") for each in of_each_layer_type if isinstance(each, dict)}
    return any("dynamic" in rope or rope == "longrope" for rope in types)


def logit_transform(config: PretrainedConfig) -> tuple[float | None, float]:
    """(softcap, logit_scale) between a model's head and its logits: `softcap * tanh(logit_scale * z / softcap)`."""
    softcap = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere, Muse Glimmer, Falcon-H1
        if getattr(config, name, None) is not None:
            return softcap, getattr(config, name)
    scaling = getattr(config, "logits_scaling", None)  # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
    if scaling is None:
        return softcap, 1.0
    return softcap, scaling if config.model_type == "hyperclovax" else 1 / scaling


class Found(NamedTuple):
    """What running a model has shown.

    Attributes:
        wrong: why its packed hidden states can't be trusted; None if they equal its padded ones.
        random: whether two runs in training mode differ: dropout, of whatever kind.
        attention_dropout: of the weights of attention, in training mode.
    """

    wrong: str | None
    random: bool = False
    attention_dropout: float = 0.0


def probe(model: PreTrainedModel, device: torch.device) -> Found:
    """`_probe`, for a model that keeps no statistics of what it is run on: packed, they would be others."""
    with torch.no_grad(), buffers_kept(model) as written:
        found = _probe(model, device)
    if found.wrong is None and written:
        return Found(f"running {type(model).__name__} writes to its buffers: {', '.join(written)}")
    return found


def _probe(model: PreTrainedModel, device: torch.device) -> Found:
    """Runs a few random rows padded and packed, and packed in training mode. Without gradients.

    Two groups of rows, of which the longer outgrows the model's attention window. The rows are the same in every
    process, so that ranks that run this together come to one answer.
    """
    window = _window(model.config)
    ids, mask, groups = _rows(model.config, window)
    labels = ids.masked_fill(mask == 0, packing.IGNORE_INDEX)
    ids, mask, labels = (x.to(device) for x in (ids, mask, labels))
    reach = ids.shape[1] if reach_of_positions(model.config) else None
    layout = packing.pack(ids, mask, labels, groups=groups, shifted=True, store_all=True, reach=reach)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        how = "padded rows"
        try:
            with _mode(model, training=False):
                padded = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                how = "packed tokens"
                with attention.witness() as seen:
                    packed = run(model, layout, ids).last_hidden_state
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model does with rows, or with an attention mask, that it doesn't expect
            return Found(f"{type(model).__name__} can't be run on {how}: {type(error).__name__}: {error}")
        wrong = agreed(model, _unseen(model, window, seen) or _difference(model, layout, padded, packed))
        if wrong is not None:
            return Found(wrong)
        devices = [] if device.type == "cpu" else [device]
        with _mode(model, training=True), torch.random.fork_rng(devices), attention.witness() as seen:
            first, second = (run(model, layout, ids).last_hidden_state for _ in range(2))
    return Found(None, not torch.equal(first, second), seen.dropout)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[list[str]]:
    """Gives buffers the values back that they had. Names those that were written to, after the block."""
    before = [(name, x, x.clone()) for name, x in model.named_buffers() if x.device.type != "meta"]
    written: list[str] = []
    try:
        yield written
    finally:
        for name, x, copy in before:
            if not _equal(x, copy):
                written.append(name)
                x.copy_(copy)


def agreed(model: PreTrainedModel, reason: str | None) -> str | None:
    """The reason of the first rank that has one, where ranks run a model together: they must not go different ways.

    Every rank must call this then. Elsewhere each rank keeps its own.
    """
    if not is_sharded(model):
        return reason
    from ..ref_logps.passes import of_all_ranks

    return next((found for found in of_all_ranks(reason) if found is not None), None)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of a model's parameters, and so run it together: FSDP, tensor parallelism, ZeRO-3."""
    in_units = any(type(module).__module__.startswith("torch.distributed.fsdp.") for module in model.modules())
    return in_units or any(isinstance(x, DTensor) or hasattr(x, "ds_id") for x in model.parameters())


def probe_head(model: PreTrainedModel, device: torch.device) -> str | None:
    """How a model's logits differ from what its head and `logit_transform` make of hidden states; None if they don't.

    The logits of its class's forward: a trainer may have left another precision around the model's own.
    """
    softcap, logit_scale = logit_transform(model.config.get_text_config())
    ids = torch.randint(model.config.vocab_size, (1, 4), generator=torch.Generator().manual_seed(0)).to(device)
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _mode(model, training=False):
        expected = type(model).forward(model, **batch).logits.float()
        hidden = model.base_model(**batch).last_hidden_state
        head = cast(nn.Linear, model.get_output_embeddings())
        found = head(hidden.to(head.weight.device)).float().to(expected.device) * logit_scale
    found = found if softcap is None else softcap * torch.tanh(found / softcap)
    error = ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    if error <= _tolerance(model):
        return None
    return f"the head of {type(model).__name__} makes other logits than its forward, by {error:.2g} of their size"


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal, NaN where the other is NaN."""
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True))


def run(model: PreTrainedModel, layout: packing.Layout, input_ids: Tensor, **options: object):
    """The backbone's outputs of the packed tokens of a padded batch; hidden states [1, T, D]."""
    return model.base_model(
        input_ids=layout.pack(input_ids),
        attention_mask=layout.mask,
        position_ids=layout.position_ids[None],
        use_cache=False,
        **options,
    )


def _window(config: PretrainedConfig) -> int | None:
    """The window that some layers attend in, as far as the configuration says."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    layers = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if layers is None or "sliding_attention" in layers else None


def _rows(config: PretrainedConfig, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """ids and mask [5, L], groups [5]: three short rows on one prefix, and two long ones on another."""
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


def _unseen(model: PreTrainedModel, window: int | None, seen: attention.Witness) -> str | None:
    layers = model.config.num_hidden_layers
    if seen.others or seen.layouts < layers:
        return (
            f"{seen.layouts} attention calls of {type(model).__name__}'s {layers} layers got the packed layout, "
            f"{seen.others} did not"
        )
    if window is not None and window > LONGEST_PROBE and window not in seen.windows:
        return f"the window of {window} tokens is not passed to the attention"
    return None


def _difference(model: PreTrainedModel, layout: packing.Layout, padded: Tensor, packed: Tensor) -> str | None:
    """Compares the ends of the rows, each by its median token: rounding may send single tokens to other experts."""
    expected = padded.flatten(0, 1)[layout.output_index].float()  # [M, D]
    found = packed[0][layout.score_index][layout.output_source].float()
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
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
