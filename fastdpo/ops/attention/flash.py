"""Backends that call a flash-attention library for sequences of variable length.

A packed attention is one causal call of such a library, in which each row's keys are gathered
behind those of its prefix and queries are aligned with the end of their keys. The library's forward
and backward are called separately instead of through its autograd, so only the output and the
log-sum-exp are saved and both passes can include sinks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..choice import hub_builds
from ..devices import compute_capability
from .calls import (
    OP,
    AttentionOptions,
    flash_supports_scale,
    kernels_unsupported_reason,
    with_last_stride_1,
    with_sinks,
)
from .layouts import VarlenLayout, varlen_layout

HEAD_SIZE_MULTIPLE = 8  # of the head sizes that the libraries take


class HeadSizes(NamedTuple):
    """Head sizes of queries and keys, and of values."""

    d: int
    d_v: int


def equal_sizes(d: int, d_v: int, capability: int | None) -> HeadSizes:
    """The least multiple of 8 that both sizes fit in."""
    size = -(-max(d, d_v) // HEAD_SIZE_MULTIPLE) * HEAD_SIZE_MULTIPLE
    return HeadSizes(size, size)


def sizes_of_4(d: int, d_v: int, capability: int | None) -> HeadSizes:
    """The head sizes that flash-attn-4 takes: on data center Blackwell up to 128, (192, 128) and 256."""
    equal = equal_sizes(d, d_v, capability)
    if capability not in (10, 11) or equal.d <= 128:
        return equal
    of_latent_attention = HeadSizes(192, 128)
    fits = d <= of_latent_attention.d and d_v <= of_latent_attention.d_v
    return of_latent_attention if fits else HeadSizes(256, 256)


class VarlenFunctions(Protocol):
    """Forward and backward of a library.

    Tensors are [tokens, heads, D] with head sizes that the library takes, log-sum-exps [H, T].
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """out and log-sum-exps."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: VarlenLayout,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        ...


class TorchFlash:
    """torch's FlashAttention-2.

    `torch.nn.attention.activate_flash_attention_impl` may have replaced it.
    """

    def __init__(self) -> None:
        self.forward_function = torch.ops.aten._flash_attention_forward
        self.backward_function = torch.ops.aten._flash_attention_backward

    def forward(self, q, k, v, layout, options):
        positional = (*layout.lengths, 0.0, options.window is None, False)  # dropout, causal, debug mask
        out, lse, *_ = self.forward_function(q, k, v, *positional, **self._arguments(options))
        return out, lse

    def backward(self, grad, q, k, v, out, lse, layout, options):
        dropout_state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        positional = (*layout.lengths, 0.0, options.window is None, *dropout_state)
        return self.backward_function(grad, q, k, v, out, lse, *positional, **self._arguments(options))

    def _arguments(self, options: AttentionOptions) -> dict[str, Any]:
        left, right = _window_sizes(options)
        return {"scale": options.scale, "window_size_left": left, "window_size_right": right}


class FlashAttention2:
    """The package flash-attn, 2.8 or later (arXiv 2307.08691).

    Attributes:
        module_name: of the package.
        function_names: its forward and backward.
    """

    module_name = "flash_attn.flash_attn_interface"
    function_names = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"

    def __init__(self, module: ModuleType) -> None:
        self.forward_function, self.backward_function = (getattr(module, name) for name in self.function_names)

    def forward(self, q, k, v, layout, options):
        arguments = self._arguments(self.forward_function, layout, options)
        out, lse, *_ = _call_by_name(self.forward_function, q=q, k=k, v=v, **arguments)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, layout, options):
        grads = {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        deterministic = torch.are_deterministic_algorithms_enabled()
        arguments = self._arguments(self.backward_function, layout, options) | grads | {"deterministic": deterministic}
        _call_by_name(self.backward_function, dout=grad, q=q, k=k, v=v, out=out, softmax_lse=lse, **arguments)
        return grads["dq"], grads["dk"], grads["dv"]

    def _arguments(self, function: Callable, layout: VarlenLayout, options: AttentionOptions) -> dict[str, Any]:
        left, right = _window_sizes(options)
        return {
            **_length_arguments(layout),
            "softmax_scale": options.scale,
            "causal": True,
            "softcap": options.softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
            "dropout_p": 0.0,
            "alibi_slopes": None,
        }


class FlashAttention3(FlashAttention2):
    """The package flash-attn-3 (arXiv 2407.08608), imported as flash_attn_interface."""

    module_name = "flash_attn_interface"
    function_names = "_flash_attn_forward", "_flash_attn_backward"

    def _arguments(self, function: Callable, layout: VarlenLayout, options: AttentionOptions) -> dict[str, Any]:
        arguments = super()._arguments(function, layout, options)
        del arguments["dropout_p"], arguments["alibi_slopes"]
        parameters = inspect.signature(_unwrap(function)).parameters
        if "window_size" in parameters:  # versions before it became a custom op
            arguments["window_size"] = arguments.pop("window_size_left"), arguments.pop("window_size_right")
        if "is_causal" in parameters:  # the backward since July 2025
            arguments["is_causal"] = arguments.pop("causal")
        return arguments


class FlashAttention4:
    """The package flash-attn-4, a pre-release written in CuTe DSL."""

    module_name = "flash_attn.cute.interface"
    function_names = "_flash_attn_fwd", "_flash_attn_bwd"

    def __init__(self, module: ModuleType) -> None:
        self.forward_function, self.backward_function = (getattr(module, name) for name in self.function_names)

    def forward(self, q, k, v, layout, options):
        arguments = self._arguments(layout, options) | {"softcap": options.softcap, "return_lse": True}
        out, lse, *_ = _call_by_name(self.forward_function, q=q, k=k, v=v, **arguments)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, layout, options):
        deterministic = torch.are_deterministic_algorithms_enabled()
        more = {"softcap": options.softcap or 0.0, "deterministic": deterministic}
        arguments = self._arguments(layout, options) | more
        return _call_by_name(self.backward_function, q=q, k=k, v=v, out=out, dout=grad, lse=lse, **arguments)[:3]

    def _arguments(self, layout: VarlenLayout, options: AttentionOptions) -> dict[str, Any]:
        left, right = (None, None) if options.window is None else _window_sizes(options)
        common = {"softmax_scale": options.scale, "causal": True}
        return {**_length_arguments(layout), **common, "window_size_left": left, "window_size_right": right}


@dataclass(frozen=True)
class FlashLibrary:
    """The backend of one library.

    Attributes:
        load_functions: imports the library and returns its `VarlenFunctions`.
        capabilities: major compute capabilities of the NVIDIA devices that the library has kernels
            for.
        softcap: whether the library supports a softcap.
        head_sizes: the sizes to which heads are padded, from theirs and the major compute
            capability.
    """

    load_functions: Callable[[], VarlenFunctions]
    capabilities: tuple[int | None, ...]
    softcap: bool = True
    head_sizes: Callable[[int, int, int | None], HeadSizes] = equal_sizes

    needs_probe = True

    def unsupported_reason(self, query: Tensor, value: Tensor, options: AttentionOptions) -> str | None:
        reason = kernels_unsupported_reason(query, value)  # keys are gathered by a Triton kernel
        if reason is not None:
            return reason
        if query.dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16; got {query.dtype}"
        if options.softcap is not None and not self.softcap:
            return "it has no softcap"
        if not flash_supports_scale(options.scale):
            return f"it needs a positive scale; got {options.scale}"
        capability = compute_capability(query.device)
        if capability not in self.capabilities:
            return f"it has no kernels for this device (compute capability {capability})"
        functions, reason = load(self)
        return reason if functions is None else None

    def prepare(self, query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> VarlenCall:
        functions, reason = load(self)
        if functions is None:
            raise NotImplementedError(f"{OP}: the backend must be importable; got {reason}")
        sizes = self.head_sizes(query.shape[2], value.shape[2], compute_capability(query.device))
        return VarlenCall(functions, sizes, query, value, rows, options)


def _of_package(name: str) -> VarlenFunctions:
    """The functions of a package, or of a build from the Kernels Hub if the package cannot be imported."""
    library = PACKAGES[name]
    try:
        return library(import_module(library.module_name))
    except Exception:  # a package, or a library that it was built against, may raise anything at import
        build = hub_builds.of(name)
        if build is None:
            raise
        return library(build)


def use_build(module: ModuleType) -> None:
    """Makes a build from the Kernels Hub available as the backend of the package that it was made of.

    A build without the functions that the backend calls is ignored.
    """
    for name, library in PACKAGES.items():
        functions = [getattr(module, function, None) for function in library.function_names]
        if all(x is not None and "cu_seqlens_q" in inspect.signature(_unwrap(x)).parameters for x in functions):
            hub_builds.add(name, module)
            load.cache_clear()


PACKAGES: dict[str, type[FlashAttention2 | FlashAttention4]] = {
    "flash-attn-3": FlashAttention3,
    "flash-attn-4": FlashAttention4,
    "flash-attn-2": FlashAttention2,
}

LIBRARIES = {
    "flash-attn-3": FlashLibrary(partial(_of_package, "flash-attn-3"), (9,)),
    "flash-attn-4": FlashLibrary(partial(_of_package, "flash-attn-4"), (9, 10, 11, 12), head_sizes=sizes_of_4),
    "flash-attn-2": FlashLibrary(partial(_of_package, "flash-attn-2"), (8, 9, 10, 11, 12)),
    "torch": FlashLibrary(TorchFlash, (8, 9, 10, 11, 12), softcap=False),
}
"""The libraries by name, in the order of preference where nothing is measured."""


@lru_cache
def load(library: FlashLibrary) -> tuple[VarlenFunctions | None, str]:
    """The functions of a library, or None and the reason why they cannot be imported."""
    try:
        return library.load_functions(), ""
    except Exception as error:  # a package, or a library that it was built against, may raise anything at import
        return None, f"{type(error).__name__}: {error}"


class VarlenCall:
    """One call of a library, with heads that are padded with zeros to the sizes that it takes."""

    def __init__(
        self,
        functions: VarlenFunctions,
        padded: HeadSizes,
        query: Tensor,
        value: Tensor,
        rows: Tensor,
        options: AttentionOptions,
    ) -> None:
        self.functions, self.padded, self.options = functions, padded, options
        self.layout = varlen_layout(OP, rows, len(query), query.device)
        self.sizes = HeadSizes(query.shape[2], value.shape[2])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = self._gathered(key, value)
        q, k, v = _padded(query, self.padded.d), _padded(k, self.padded.d), _padded(v, self.padded.d_v)
        out, lse = self.functions.forward(q, k, v, self.layout, self.options)
        out = out[..., : self.sizes.d_v].contiguous()
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self._gathered(key, value)
        q, k = _padded(query, self.padded.d), _padded(k, self.padded.d)
        g, v, o = (_padded(x, self.padded.d_v) for x in (grad, v, out))
        dq, dk, dv = self.functions.backward(g, q, k, v, o, lse, self.layout, self.options)
        dq, dk = (x[..., : self.sizes.d].contiguous() for x in (dq, dk))
        dv = dv[..., : self.sizes.d_v].contiguous()
        places = self.layout.places
        if places is None:
            return dq, dk, dv
        from ...kernels.gather_keys import gather_keys_bwd

        return dq, *gather_keys_bwd(dk, dv, places.readers, places.first_reader)

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of each row in one piece, behind those of its prefix."""
        places = self.layout.places
        if places is None:
            return key, value
        from ...kernels.gather_keys import gather_keys_fwd

        return gather_keys_fwd(with_last_stride_1(key), with_last_stride_1(value), places.index)


def _padded(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[2]
    return with_last_stride_1(F.pad(x, (0, missing)) if missing else x)


def _window_sizes(options: AttentionOptions) -> tuple[int, int]:
    """How many keys a query sees before and after its own position; -1 for no limit."""
    return (-1, -1) if options.window is None else (options.window - 1, 0)


def _length_arguments(layout: VarlenLayout) -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), layout.lengths, strict=True))


def _unwrap(function: Any) -> Callable:
    """The function that a torch custom op was made of, whose signature can be inspected."""
    return getattr(function, "_init_fn", function)


def _call_by_name(function: Callable, **given: Any) -> Any:
    """Calls a function by parameter names, which differ between versions of a library.

    Parameters that have no default and are not given are passed as None.

    Raises:
        NotImplementedError: the function has no parameter for a given argument. Without the
            argument, it would compute a different attention.
    """
    function = _unwrap(function)
    parameters = inspect.signature(function).parameters
    missing = sorted(given.keys() - parameters.keys())
    if missing:
        name = f"{function.__module__}.{function.__name__}"
        raise NotImplementedError(f"{OP}: {name} must accept {', '.join(missing)}; this version does not")
    required = (name for name, parameter in parameters.items() if parameter.default is parameter.empty)
    return function(**{**dict.fromkeys(required), **given})
