"""Packed attention as an attention implementation of transformers.

    attention.switch(model)
    with attention.named(attention.configs_of(model)):  # the model takes packed batches as well
        hidden = model.base_model(**attention.inputs_of(layout, input_ids)).last_hidden_state  # [1, T, D]
    attention.restore(model)

Modules look up their attention in configurations by a name, which is that of packed attention in packed calls only, and
where a backward pass runs their checkpointed layers again. Between these, nothing of fastdpo shows in a configuration.
Only the language model of a multimodal model takes packed batches. Its image and audio towers keep their attention.

A `Layout` reaches the attention layers as a 4-D int32 attention mask that stays on the CPU
(`Layout.mask`): transformers passes 4-D masks on untouched, both kinds of gradient checkpointing
keep them, and reading one takes no synchronisation. Calls without a layout behave as under the
model's prior implementation, padding masks included.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..ops.attention import routes
from ..ops.attention.flash import use_build
from ..ops.attention.packed_attention import attend, packed_attention
from ..packing import Layout, is_layout
from .mixers import current
from .mixers.current import Witness
from .parts import language_model, text_config
from .ranks import sequence_group

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HUB_REPOSITORIES = tuple(
    f"kernels-community/{name}"
    for name in ("flash-attn", "flash-attn2", "flash-attn3", "vllm-flash-attn3", "flash-attn4", "aiter-flash-attn")
)
"""Builds of flash attention on the Kernels Hub. transformers takes some of them where flash attention is requested and
its package is not installed.
"""

FLASH_IMPLEMENTATIONS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", *HUB_REPOSITORIES)
SUPPORTED_PRIORS = ("sdpa", "eager", *FLASH_IMPLEMENTATIONS)
"""Attention implementations that packed attention can replace, without the revision of a repository."""

_NAME = "_attn_implementation_internal"
"""The attribute of a configuration that holds the name of its attention implementation."""

_packed_names: dict[str, str] = {}
"""The name of packed attention in the place of each implementation."""

_own_names: dict[str, str] = {}
"""The inverse of `_packed_names`."""

_holders: Counter[int] = Counter()
"""How many packed calls and backward passes there are now that run by each configuration, by its id."""

_lock = threading.RLock()
"""Of `_holders`. Threads may run models that share a configuration."""

IGNORED_ARGUMENTS = {"is_causal", "position_ids", "cache_position", "position_embeddings", "deterministic"}
"""Arguments that some model families pass to their attention and that
`packed_attention` does not need.
"""

IGNORED_BY_SDPA = {"softcap", "s_aux"}
"""Features that transformers' sdpa leaves out or refuses, depending on the version. Packed
attention in its place must not add them.
"""


@contextmanager
def witness(model: PreTrainedModel) -> Iterator[Witness]:
    """Records the attention calls and the mixers of the block, in which a switched model's configurations name packed
    attention (see `named`). This proves that every layer received the layout.

    Attention dropout is recorded, but not applied. The calls are not those of a training, whose dtype
    may be another one under autocast.
    """
    recorded = Witness()
    token = current.witness.set(recorded)
    try:
        with named(configs_of(model)), routes.trial():
            yield recorded
    finally:
        current.witness.reset(token)


def switch(model: PreTrainedModel) -> None:
    """Has a transformers model accept `Layout.mask` as an attention mask, next to everything it accepted before, where
    its configurations name packed attention (see `named`). Elsewhere, it raises an error when it is given one.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from .mixers import hooks  # imports Dynamo and, by that, Triton

    for own in {*map(_own_name, configs_of(model))}:
        if repository(own) in HUB_REPOSITORIES:
            _use_loaded_build(own)
        # For a name that contains "flash" or a slash, transformers would look for a package or on the Hub.
        name = _packed_names[own] = f"fastdpo_{own}".replace("flash", "fl").replace("/", "_")
        _own_names[name] = own
        AttentionInterface.register(name, _attention(own))
        AttentionMaskInterface.register(name, lambda *x, own=own, **y: ALL_MASK_ATTENTION_FUNCTIONS[own](*x, **y))
    hooks.switch(model)


def restore(model: PreTrainedModel, kept: Collection[nn.Module] = ()) -> None:
    """Undoes `switch`.

    Args:
        model: the model.
        kept: modules of other switched models, which go on taking packed batches.
    """
    from .mixers import hooks

    hooks.restore(model, kept)


@contextmanager
def named(configs: Sequence[PretrainedConfig]) -> Iterator[None]:
    """In the block, the `configs_of` a switched model name packed attention. Calls without a layout run as under its
    own implementation then, padding masks included.
    """
    _hold(configs, 1)
    try:
        yield
    finally:
        _hold(configs, -1)


def run(configs: Sequence[PretrainedConfig], function: Callable, *args: Any) -> Any:
    """Returns what a function returns that runs packed tokens, while these configurations name packed attention.

    They name it again in each backward pass, from where it reaches a tensor of the result until it ends or raises.
    There, checkpointed layers run again and look up their attention anew, whatever checkpoints them and in whichever
    thread.
    """
    with named(configs):
        results = function(*args)

    def name_again(_: Tensor) -> None:
        naming, engine = ExitStack(), cast(Any, torch.autograd.Variable._execution_engine)
        naming.enter_context(named(configs))
        engine.queue_callback(naming.close)  # dropped if the pass raises an error, which ends `named`, too

    for x in tree_leaves(results) if configs else ():
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(name_again)
    return results


def _hold(configs: Sequence[PretrainedConfig], holders: int) -> None:
    """Adds to the number of holders of configurations, which name packed attention for as long as they have any."""
    with _lock:
        for config in configs:
            _holders[id(config)] += holders
            own = _own_name(config)
            vars(config)[_NAME] = _packed_names.get(own, own) if _holders[id(config)] else own


def inputs_of(layout: Layout, input_ids: Tensor) -> dict[str, Any]:
    """The keyword arguments with which a switched model runs on the packed tokens of a batch.

    They belong together: a model that is given packed ids without the layout takes them for one
    ordinary row, in which the rejected completion sees the chosen one, and returns wrong states
    without an error.

    Args:
        layout: of the padded batch.
        input_ids: int64 [R, L], the padded batch, of which the layout was made.

    Returns:
        `input_ids` [1, T], `position_ids` [1, T], `attention_mask` (`Layout.mask`) and `use_cache`.
    """
    return {
        "input_ids": input_ids.reshape(-1)[layout.token_index][None],
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
        run = partial(sequence_group.attend, _packed_forward) if attention_mask.shape[1] > 1 else _packed_forward
        return run(module, query, key, value, attention_mask, *args, **kwargs), None

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


def implementation(model: PreTrainedModel) -> str:
    """The model's own attention implementation."""
    return _own_name(text_config(model))


def functions_of(config: PretrainedConfig) -> tuple[str, Callable | None, Callable | None]:
    """The name of a language model's own attention implementation, and the functions that transformers has for it: the
    attention, which is None if that is eager, and what makes its masks.
    """
    name = _own_name(config)
    of_attention, of_masks = _tables()
    return name, of_attention.get(name), of_masks.get(name)


@cache
def _tables() -> tuple[Any, Any]:
    """Those of transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def configs_of(model: PreTrainedModel) -> list[PretrainedConfig]:
    """The configurations that the modules of a model's language model look up their attention in."""
    modules = language_model(model).modules()
    found: dict[int, Any] = {id(x): x for x in (text_config(model), *(vars(y).get("config") for y in modules))}
    return [x for x in found.values() if getattr(x, _NAME, None)]


def repository(name: str) -> str:
    """A name without the revision and the function that may follow that of a repository."""
    return name.partition(":")[0].partition("@")[0].strip()


def _own_name(config: PretrainedConfig) -> str:
    name = config._attn_implementation or "eager"
    return _own_names.get(name, name)
