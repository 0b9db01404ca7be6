"""Packed attention as an attention implementation of transformers.

    attention.switch(model)  # the model now takes packed batches as well
    hidden = model.base_model(**attention.inputs_of(layout, input_ids)).last_hidden_state  # [1, T, D]
    attention.restore(model)

Only the language model of a multimodal model is switched. Its image and audio towers keep their
attention.

A `Layout` reaches the attention layers as a 4-D int32 attention mask that stays on the CPU
(`Layout.mask`): transformers passes 4-D masks on untouched, both kinds of gradient checkpointing
keep them, and reading one takes no synchronisation. Calls without a layout behave as under the
model's prior implementation, padding masks included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ops.attention import routes
from ..ops.attention.flash import use_build
from ..ops.attention.packed_attention import attend, packed_attention
from ..packing import Layout, is_layout
from . import sequence_group
from .mixers import current
from .mixers.current import Witness
from .parts import language_model, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HUB_REPOSITORIES = tuple(
    f"kernels-community/{name}"
    for name in ("flash-attn", "flash-attn2", "flash-attn3", "vllm-flash-attn3", "flash-attn4", "aiter-flash-attn")
)
"""Builds of flash attention on the Kernels Hub. transformers takes some of them where flash attention is requested and
its package is not installed.
"""

FLASH_IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", *HUB_REPOSITORIES)
SUPPORTED_PRIORS = ("sdpa", "eager", *FLASH_IMPLEMENTATIONS)
"""Attention implementations that `switch` can replace, without the revision of a repository."""

PREFIX = "fastdpo_"
_SHORT = {"flash_attention_": "fa"}
_SHORT_IN_REPOSITORIES = {"/": "~~", "flash": "f~sh"}
"""For a name that contains "flash" or a slash, transformers looks for a package or on the Hub."""

IGNORED_ARGUMENTS = {"is_causal", "position_ids", "cache_position", "position_embeddings", "deterministic"}
"""Arguments that some model families pass to their attention and that
`packed_attention` does not need.
"""

IGNORED_BY_SDPA = {"softcap", "s_aux"}
"""Features that transformers' sdpa leaves out or refuses, depending on the version. Packed
attention in its place must not add them.
"""


@contextmanager
def witness() -> Iterator[Witness]:
    """Records the attention calls and the mixers of the block, which proves that every layer received
    the layout.

    Attention dropout is recorded, but not applied. The calls are not those of a training, whose dtype
    may be another one under autocast.
    """
    recorded = Witness()
    token = current.witness.set(recorded)
    try:
        with routes.trial():
            yield recorded
    finally:
        current.witness.reset(token)


def switch(model: PreTrainedModel) -> None:
    """Sets a transformers model to packed attention.

    The model then accepts `Layout.mask` as an attention mask, next to everything it accepted
    before. A model that was not switched raises an error when it is given one.

    Raises:
        RuntimeError: the model does not accept the implementation.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    prior = implementation(model)
    if repository(prior) in HUB_REPOSITORIES:
        _use_loaded_build(prior)
    name = packed_name(prior)
    AttentionInterface.register(name, _attention(prior))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[prior])
    language_model(model).set_attn_implementation(name)
    if present(model) != name:
        got = present(model)
        raise RuntimeError(f"attention: {type(model).__name__} must take the implementation {name}; got {got}")
    _hooks_of_mixers().switch(model)


def restore(model: PreTrainedModel, kept: Collection[nn.Module] = ()) -> None:
    """Sets a model back to the implementation that it had before `switch`, unless it has another by now.

    Modules look up their attention in the configuration of the model that they were made for. Where a model has layers
    of another one, the configuration of that one is set back, too.

    Args:
        model: the model.
        kept: modules of other switched models, which go on taking packed batches.
    """
    read = {id(x): x for x in (text_config(model), *map(_config_of, language_model(model).modules()))}
    for number in read.keys() - {id(_config_of(module)) for module in kept}:
        name = getattr(read[number], "_attn_implementation", None) or ""
        if name.startswith(PREFIX):
            read[number]._attn_implementation = prior_of(name)
    _hooks_of_mixers().restore(model, kept)


def inputs_of(layout: Layout, input_ids: Tensor) -> dict[str, Any]:
    """The keyword arguments with which a switched model runs on the packed tokens of a batch.

    They belong together: a model that is given packed ids without the layout takes them for one
    ordinary row, in which the rejected completion sees the chosen one, and returns wrong states
    without an error.

    Args:
        layout: of the padded batch.
        input_ids: int64 [R, L], the padded batch.

    Returns:
        `input_ids` [1, T], `position_ids` [1, T], `attention_mask` (`Layout.mask`) and `use_cache`.
    """
    return {
        "input_ids": layout.pack(input_ids),
        "position_ids": layout.position_ids[None],
        "attention_mask": layout.mask,
        "use_cache": False,
    }


def _attention(prior: str) -> Callable:
    is_flash = repository(prior) in FLASH_IMPLEMENTATIONS

    def forward(module, query, key, value, attention_mask, *args, **kwargs):
        packed = is_layout(attention_mask)
        if not torch.compiler.is_compiling() and (recorded := current.witness.get()) is not None:
            recorded.layouts += packed
            recorded.others += not packed
            recorded.windows.add(kwargs.get("sliding_window"))
            recorded.dropout = max(recorded.dropout, kwargs.pop("dropout", 0.0))
        if not packed:
            return _prior_forward(prior, module, query, key, value, attention_mask, *args, **kwargs)
        if is_flash:
            query, key, value = _in_flash_dtype(module, query, key, value)
        if prior == "sdpa":
            for name in IGNORED_BY_SDPA:
                kwargs.pop(name, None)
        if attention_mask.shape[1] > 1:
            return sequence_group.attend(
                _packed_forward, module, query, key, value, attention_mask, *args, **kwargs
            ), None
        return _packed_forward(module, query, key, value, attention_mask, *args, **kwargs), None

    return forward


def _packed_forward(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D_v]
    layout: Tensor,  # [1, 1, S, 4]
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [H]
    **others: object,
) -> Tensor:  # [1, T, H, D_v]
    if dropout:
        raise NotImplementedError("packed attention: dropout must be 0; pad this model's batches instead")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError("packed attention: is_causal must be True; pad this model's batches instead")
    unknown = [k for k, x in others.items() if k not in IGNORED_ARGUMENTS and (isinstance(x, Tensor) or callable(x))]
    if unknown:
        raise NotImplementedError(f"packed attention: {', '.join(unknown)} must be None; pad this model's batches")
    q, k, v = query.shape, key.shape, value.shape
    if s_aux is None and q[2:] == k[2:] and k[:3] == v[:3] and 0 not in (sliding_window, softcap):
        return attend(query, key, value, layout, scale=scaling, window=sliding_window, softcap=softcap, sinks=None)
    # The gradient of squeeze is a view; that of an index would be a copy into zeros.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    options = {"scale": scaling, "window": sliding_window, "softcap": softcap}
    return packed_attention(query, key, value, layout.flatten(0, 2), sinks=s_aux, **options).unsqueeze(0)


def _in_flash_dtype(module: nn.Module, *tensors: Tensor) -> Iterator[Tensor]:
    """Casts as transformers does for flash attention: layers in float32 may return a wider dtype."""
    from transformers.integrations import flash_attention

    dtype = getattr(flash_attention, "get_target_dtype", _target_dtype)(tensors[0], module)
    return (x if dtype is None else x.to(dtype) for x in tensors)


def _target_dtype(query: Tensor, module: nn.Module) -> torch.dtype | None:
    """What `get_target_dtype` returns, which transformers 4 does not have: a dtype if the query is in float32."""
    if query.dtype != torch.float32:
        return None
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    config: Any = module.config
    if hasattr(config, "_pre_quantization_dtype"):  # quantized layers may be of another class
        return config._pre_quantization_dtype
    return next(layer for layer in module.modules() if isinstance(layer, nn.Linear)).weight.dtype


def _prior_forward(prior: str, module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    if prior == "eager":  # each modeling file has its own; the subclass that FSDP2 creates lies in another file
        files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
        forward = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
        return forward(module, *args, **kwargs)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if repository(prior) in FLASH_IMPLEMENTATIONS:  # they read the implementation's name from the configuration
        module = _WithAttributes(module, config=_WithAttributes(module.config, _attn_implementation=prior))
    return ALL_ATTENTION_FUNCTIONS[prior](module, *args, **kwargs)


class _WithAttributes:
    """A view of an object in which some attributes have other values."""

    def __init__(self, base: object, **attributes: object) -> None:
        self.__dict__.update(attributes, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _use_loaded_build(prior: str) -> None:
    """Makes the build that transformers has loaded for an implementation a backend of packed attention."""
    from transformers import modeling_flash_attention_utils as loaded

    function = getattr(loaded, "_flash_varlen_fn", None)
    module = sys.modules.get(getattr(function, "__module__", ""))
    if getattr(loaded, "_loaded_implementation", None) == prior and module is not None:
        use_build(module)


def _config_of(module: nn.Module) -> Any:
    """The configuration that a module looks up its attention in, or None."""
    return vars(module).get("config")


def _hooks_of_mixers() -> ModuleType:
    """Imported late: it imports Dynamo and, by that, Triton."""
    from .mixers import hooks

    return hooks


def implementation(model: PreTrainedModel) -> str:
    """The model's attention implementation, or the one that it had before `switch`."""
    return prior_of(present(model) or "eager")


def present(model: PreTrainedModel) -> str | None:
    """The model's attention implementation."""
    return text_config(model)._attn_implementation


def repository(name: str) -> str:
    """A name without the revision and the function that may follow that of a repository."""
    return name.partition(":")[0].partition("@")[0].strip()


@cache
def packed_name(prior: str) -> PackedName:
    """The name of packed attention in the place of an implementation."""
    for long, short in (_SHORT_IN_REPOSITORIES if "/" in prior else _SHORT).items():
        prior = prior.replace(long, short)
    return PackedName(PREFIX + prior)


def prior_of(name: str) -> str:
    """The inverse of `packed_name`. Other names stay as they are."""
    if not name.startswith(PREFIX):
        return name
    prior = name.removeprefix(PREFIX)
    for long, short in (_SHORT_IN_REPOSITORIES if _SHORT_IN_REPOSITORIES["/"] in prior else _SHORT).items():
        prior = prior.replace(short, long)
    return prior


class PackedName(str):
    """The name of a packed attention. Copies and pickles of a configuration hold the prior name
    instead.

    A copy of a model is not switched, and another process has not registered the packed attention.

    The compiler of torch 2.11 finds it in a dictionary only if it is the key itself (see `packed_name`), and traces
    those of its methods that are written in Python.
    """

    __slots__ = ()

    def startswith(self, prefix: str | tuple[str, ...], *bounds: int) -> bool:
        if isinstance(prefix, str) and len(prefix) <= len(PREFIX) and not bounds:
            return PREFIX.startswith(prefix)
        return super().startswith(prefix, *bounds)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (prior_of(self),)
