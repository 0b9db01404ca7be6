"""Backends that call a flash-attention library for sequences of variable length.

A packed attention is one causal call of such a library, in which each row's keys are gathered
behind those of its prefix and queries are aligned with the end of their keys. The library's forward
and backward are called separately instead of through its autograd, so only the output and the
log-sum-exp are saved and both passes can include sinks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..choice import notes
from ..devices import compute_capability
from .device_layout import OP, Kind, Rows, offsets
from .pieces import flash_supports_scale, with_last_stride_1, with_sinks
from .triton_backend import kernels_unsupported_reason

HEAD_SIZE_MULTIPLE = 8  # of the head sizes that the libraries take
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

Parameters = Mapping[str, inspect.Parameter]
Lengths = tuple[Tensor, Tensor, int, int]
"""Offsets and maximum lengths of queries and keys, in the order in which the libraries take them."""


class HeadSizes(NamedTuple):
    """Head sizes of queries and keys, and of values."""

    d: int
    d_v: int


def equal_sizes(d: int, d_v: int, capability: int | None) -> HeadSizes:
    """The least multiple of 8 that both sizes fit in."""
    size = -(-max(d, d_v) // HEAD_SIZE_MULTIPLE) * HEAD_SIZE_MULTIPLE
    return HeadSizes(size, size)


def sizes_of_flash_4(d: int, d_v: int, capability: int | None) -> HeadSizes:
    """The head sizes that flash-attn-4 takes: on data center Blackwell up to 128, (192, 128) and 256."""
    equal = equal_sizes(d, d_v, capability)
    if capability not in (10, 11) or equal.d <= 128:
        return equal
    of_latent_attention = HeadSizes(192, 128)
    fits = d <= of_latent_attention.d and d_v <= of_latent_attention.d_v
    return of_latent_attention if fits else HeadSizes(256, 256)


class KeyPlaces(NamedTuple):
    """Where keys are gathered so that those of each row are contiguous. int32."""

    index: Tensor  # [M] the token whose key is copied to each place
    readers: Tensor  # [M] the places that hold each token's key, sorted by token
    first_reader: Tensor  # [T + 1] where the places of each token start in `readers`


class VarlenLayout(NamedTuple):
    """The rows as sequences of variable length, each with the keys of its prefix before its own.

    Attributes:
        cu_queries: int32 [S + 1], offsets of each row's queries.
        cu_keys: int32 [S + 1], offsets of each row's keys.
        max_queries: the most queries of a row.
        max_keys: the most keys of a row.
        places: None if no row has a prefix, so that no key has to be copied.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    places: KeyPlaces | None

    @property
    def lengths(self) -> Lengths:
        return self.cu_queries, self.cu_keys, self.max_queries, self.max_keys


def varlen_layout(rows: Rows) -> VarlenLayout:
    """The rows as sequences of variable length, for libraries of flash attention, whatever the default device."""
    lengths = [(x.own_length, x.prefix_length) for x in rows.checked]
    own, before = torch.tensor(lengths, dtype=torch.long, device="cpu").view(-1, 2).unbind(1)
    longest, places = max(own.tolist(), default=0), None
    if before.any():
        pieces = [piece for row in rows.checked for piece in row.pieces]
        index = np.concatenate([np.arange(start, start + length) for start, length, _ in pieces])
        readers, counts = index.argsort(kind="stable"), np.bincount(index, minlength=rows.tokens)
        places = KeyPlaces(torch.from_numpy(index), torch.from_numpy(readers), offsets(torch.from_numpy(counts)))
    return VarlenLayout(offsets(own), offsets(own + before), longest, rows.longest, places)


class TorchFlash:
    """torch's FlashAttention-2.

    `torch.nn.attention.activate_flash_attention_impl` may have replaced it.

    Tensors are [tokens, heads, D] with head sizes that the library takes, log-sum-exps [H, T], as in all libraries.
    """

    def __init__(self) -> None:
        self.forward_function = torch.ops.aten._flash_attention_forward
        self.backward_function = torch.ops.aten._flash_attention_backward

    def arguments(self, kind: Kind) -> Any:
        """What all calls have in common, whatever their layouts."""
        causal = kind.options.window is None
        left, right = _window_sizes(kind)
        named = {"scale": kind.options.scale, "window_size_left": left, "window_size_right": right}
        return (0.0, causal, False), (0.0, causal, *_no_dropout(kind.device)), named  # dropout, causal, debug mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, arguments: Any) -> tuple[Tensor, Tensor]:
        """out and log-sum-exps."""
        positional, _, named = arguments
        out, lse, *_ = self.forward_function(q, k, v, *lengths, *positional, **named)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Lengths, arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        _, positional, named = arguments
        return self.backward_function(grad, q, k, v, out, lse, *lengths, *positional, **named)


@lru_cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset. The same tensors for all calls, which can so be compared."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


class FlashAttention2:
    """The package flash-attn, 2.8 or later (arXiv 2307.08691).

    Its functions are called by parameter names, which differ between versions of a library.

    Attributes:
        module_name: of the package.
        function_names: its forward and backward.
        tensors: the parameters of the backward that differ from call to call.
    """

    module_name = "flash_attn.flash_attn_interface"
    function_names = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
    tensors = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")

    def __init__(self, module: ModuleType) -> None:
        functions = [_unwrap(getattr(module, name)) for name in self.function_names]
        self.forward_function, self.backward_function = functions
        self.parameters = [inspect.signature(function).parameters for function in functions]

    def arguments(self, kind: Kind) -> tuple[dict[str, Any], dict[str, Any]]:
        """As those of `TorchFlash`.

        Raises:
            NotImplementedError: a function has no parameter for an argument.
        """
        of_forward, of_backward = self.parameters
        forward = self._complete(0, ("q", "k", "v"), self._options_of_forward(kind, of_forward))
        return forward, self._complete(1, self.tensors, self._options_of_backward(kind, of_backward))

    def forward(self, q, k, v, lengths, arguments):
        out, lse, *_ = self.forward_function(q=q, k=k, v=v, **_named(lengths), **arguments[0])
        return out, lse

    def backward(self, grad, q, k, v, out, lse, lengths, arguments):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = dict(dout=grad, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv)
        self.backward_function(**given, **_named(lengths), **arguments[1])
        return dq, dk, dv

    def _options_of_forward(self, kind: Kind, parameters: Parameters) -> dict[str, Any]:
        left, right = _window_sizes(kind)
        return {
            "softmax_scale": kind.options.scale,
            "causal": True,
            "softcap": kind.options.softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
            "dropout_p": 0.0,
            "alibi_slopes": None,
        }

    def _options_of_backward(self, kind: Kind, parameters: Parameters) -> dict[str, Any]:
        return self._options_of_forward(kind, parameters) | {"deterministic": kind.deterministic}

    def _complete(self, function: int, tensors: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
        """The given arguments, and None for other parameters that have no default.

        Raises:
            NotImplementedError: the function has no parameter for a given argument. Without the
                argument, it would compute a different attention.
        """
        parameters = self.parameters[function]
        given_in_call = (*tensors, *LENGTHS)
        missing = sorted({*given_in_call, *given} - parameters.keys())
        if missing:
            name = f"{self.module_name}.{self.function_names[function]}"
            raise NotImplementedError(f"{OP}: {name} must accept {', '.join(missing)}; this version does not")
        required = (name for name, x in parameters.items() if x.default is x.empty and name not in given_in_call)
        return {**dict.fromkeys(required), **given}


class FlashAttention3(FlashAttention2):
    """The package flash-attn-3 (arXiv 2407.08608), imported as flash_attn_interface."""

    module_name = "flash_attn_interface"
    function_names = "_flash_attn_forward", "_flash_attn_backward"

    def _options_of_forward(self, kind: Kind, parameters: Parameters) -> dict[str, Any]:
        given = super()._options_of_forward(kind, parameters)
        del given["dropout_p"], given["alibi_slopes"]
        if "window_size" in parameters:  # versions before it became a custom op
            given["window_size"] = given.pop("window_size_left"), given.pop("window_size_right")
        if "is_causal" in parameters:  # the backward since July 2025
            given["is_causal"] = given.pop("causal")
        return given


class FlashAttention4(FlashAttention2):
    """The package flash-attn-4, a pre-release written in CuTe DSL."""

    module_name = "flash_attn.cute.interface"
    function_names = "_flash_attn_fwd", "_flash_attn_bwd"
    tensors = ("dout", "q", "k", "v", "out", "lse")

    def backward(self, grad, q, k, v, out, lse, lengths, arguments):
        given = dict(q=q, k=k, v=v, out=out, dout=grad, lse=lse)
        return self.backward_function(**given, **_named(lengths), **arguments[1])[:3]

    def _options_of_forward(self, kind: Kind, parameters: Parameters) -> dict[str, Any]:
        return self._common(kind) | {"softcap": kind.options.softcap, "return_lse": True}

    def _options_of_backward(self, kind: Kind, parameters: Parameters) -> dict[str, Any]:
        of_backward = {"softcap": kind.options.softcap or 0.0, "deterministic": kind.deterministic}
        return self._common(kind) | of_backward

    def _common(self, kind: Kind) -> dict[str, Any]:
        left, right = (None, None) if kind.options.window is None else _window_sizes(kind)
        common = {"softmax_scale": kind.options.scale, "causal": True}
        return {**common, "window_size_left": left, "window_size_right": right}


VarlenFunctions = TorchFlash | FlashAttention2
"""Forward and backward of a library."""


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

    def unsupported_reason(self, kind: Kind) -> str | None:
        reason = kernels_unsupported_reason(kind)  # keys are gathered by a Triton kernel
        if reason is not None:
            return reason
        if kind.dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16; got {kind.dtype}"
        if kind.options.softcap is not None and not self.softcap:
            return "it has no softcap"
        if not flash_supports_scale(kind.options.scale):
            return f"it needs a positive scale; got {kind.options.scale}"
        capability = compute_capability(kind.device)
        if capability not in self.capabilities:
            return f"it has no kernels for this device (compute capability {capability})"
        functions, reason = load(self)
        return reason if functions is None else None

    def call(self, kind: Kind) -> VarlenCall:
        from ...kernels import gather_keys

        functions = cast(VarlenFunctions, load(self)[0])  # which a call that is supported has
        sizes = HeadSizes(kind.d, kind.d_v)
        padded = self.head_sizes(*sizes, compute_capability(kind.device))
        return VarlenCall(functions, functions.arguments(kind), gather_keys, sizes, padded)


def _of_package(name: str) -> VarlenFunctions:
    """The functions of a package, or of a build from the Kernels Hub if the package cannot be imported."""
    library = PACKAGES[name]
    try:
        return library(import_module(library.module_name))
    except Exception:  # a package, or a library that it was built against, may raise anything at import
        if name not in notes.builds:
            raise
        return library(notes.builds[name])


def use_build(module: ModuleType) -> None:
    """Makes a build from the Kernels Hub available as the backend of the package that it was made of.

    A build without the functions that the backend calls is ignored.
    """
    for name, library in PACKAGES.items():
        functions = [getattr(module, function, None) for function in library.function_names]
        if all(x is not None and "cu_seqlens_q" in inspect.signature(_unwrap(x)).parameters for x in functions):
            notes.builds.setdefault(name, module)
            load.cache_clear()


PACKAGES: dict[str, type[FlashAttention2]] = {
    "flash-attn-3": FlashAttention3,
    "flash-attn-4": FlashAttention4,
    "flash-attn-2": FlashAttention2,
}

LIBRARIES = {
    "flash-attn-3": FlashLibrary(partial(_of_package, "flash-attn-3"), (9,)),
    "flash-attn-4": FlashLibrary(partial(_of_package, "flash-attn-4"), (9, 10, 11, 12), head_sizes=sizes_of_flash_4),
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


class VarlenCall(NamedTuple):
    """One kind of call of a library.

    Attributes:
        functions: of the library.
        arguments: those that do not depend on the layout.
        kernels: the module that gathers keys, which imports Triton.
        sizes: of the heads.
        padded: the sizes to which they are padded with zeros.
    """

    functions: VarlenFunctions
    arguments: Any
    kernels: ModuleType
    sizes: HeadSizes
    padded: HeadSizes

    @property
    def is_padded(self) -> bool:
        return self.sizes != self.padded

    def describe(self, rows: Rows) -> VarlenLayout:
        return varlen_layout(rows)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: VarlenLayout
    ) -> tuple[Tensor, Tensor]:
        q, (k, v) = with_last_stride_1(query), self._gathered(key, value, layout.places)
        if self.is_padded:
            q, k, v = self._pad(q, k, v)
        out, lse = self.functions.forward(q, k, v, layout.lengths, self.arguments)
        out = (out[..., : self.sizes.d_v] if self.is_padded else out).contiguous()
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, layout: VarlenLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, q, places = with_last_stride_1(grad), with_last_stride_1(query), layout.places
        k, v = self._gathered(key, value, places)
        if self.is_padded:
            q, k, v = self._pad(q, k, v)
            g, out = _padded(g, self.padded.d_v), _padded(out, self.padded.d_v)
        dq, dk, dv = self.functions.backward(g, q, k, v, out, lse, layout.lengths, self.arguments)
        if self.is_padded:
            dq, dk, dv = dq[..., : self.sizes.d], dk[..., : self.sizes.d], dv[..., : self.sizes.d_v]
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        if places is not None:
            dk, dv = self.kernels.gather_keys_bwd(dk, dv, places.readers, places.first_reader)
        return dq, dk, dv

    def _pad(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _padded(q, self.padded.d), _padded(k, self.padded.d), _padded(v, self.padded.d_v)

    def _gathered(self, key: Tensor, value: Tensor, places: KeyPlaces | None) -> tuple[Tensor, Tensor]:
        """The keys and values of each row in one piece, behind those of its prefix."""
        key, value = with_last_stride_1(key), with_last_stride_1(value)
        return (key, value) if places is None else self.kernels.gather_keys_fwd(key, value, places.index)


def _padded(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[2]))


def _named(lengths: Lengths) -> dict[str, Any]:
    return dict(zip(LENGTHS, lengths, strict=True))


def _window_sizes(kind: Kind) -> tuple[int, int]:
    """How many keys a query sees before and after its own position; -1 for no limit."""
    window = kind.options.window
    return (-1, -1) if window is None else (window - 1, 0)


def _unwrap(function: Any) -> Callable:
    """The function that a torch custom op was made of, whose signature can be inspected."""
    return getattr(function, "_init_fn", function)
