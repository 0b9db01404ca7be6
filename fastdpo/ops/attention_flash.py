"""Libraries of flash attention over sequences of several lengths, called alike.

A packed attention is one causal call of theirs in which each row's keys are gathered behind the prefix that it sees:
queries are aligned with the end of their keys. The forward and the backward of a library are called apart, not through
its autograd: so the output and the log-sum-exp are all that is saved, and both passes can count sinks in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_layouts import Varlen, varlen

OP = "packed_attention"


class Options(NamedTuple):
    """As in `packed_attention`."""

    scale: float
    window: int | None
    softcap: float | None


class Calls(Protocol):
    """Of a library: tensors are [tokens, heads, D] with one D, log-sum-exps [H, T]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: Varlen, options: Options) -> tuple[Tensor, Tensor]:
        """out and log-sum-exps."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Varlen, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        ...


class TorchCalls:
    """FlashAttention-2 as torch has it, or what `torch.nn.attention.activate_flash_attention_impl` put in its place."""

    def __init__(self) -> None:
        self.attend = torch.ops.aten._flash_attention_forward
        self.attend_back = torch.ops.aten._flash_attention_backward

    def forward(self, q, k, v, layout, options):
        out, lse, *_ = self.attend(q, k, v, *layout.lengths, 0.0, options.window is None, False, **self._named(options))
        return out, lse

    def backward(self, grad, q, k, v, out, lse, layout, options):
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        rest = (*layout.lengths, 0.0, options.window is None, *no_dropout)
        return self.attend_back(grad, q, k, v, out, lse, *rest, **self._named(options))

    def _named(self, options: Options) -> dict[str, Any]:
        left, right = _sides(options)
        return {"scale": options.scale, "window_size_left": left, "window_size_right": right}


class FlashAttention2:
    """The package flash-attn, 2.8 on (arXiv 2307.08691)."""

    def __init__(self) -> None:
        module = import_module("flash_attn.flash_attn_interface")
        self.attend, self.attend_back = module._flash_attn_varlen_forward, module._flash_attn_varlen_backward

    def forward(self, q, k, v, layout, options):
        out, lse, *_ = _call(self.attend, q=q, k=k, v=v, **self._named(self.attend, layout, options))
        return out, lse

    def backward(self, grad, q, k, v, out, lse, layout, options):
        grads = {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        deterministic = torch.are_deterministic_algorithms_enabled()
        given = self._named(self.attend_back, layout, options) | grads | {"deterministic": deterministic}
        _call(self.attend_back, dout=grad, q=q, k=k, v=v, out=out, softmax_lse=lse, **given)
        return grads["dq"], grads["dk"], grads["dv"]

    def _named(self, function: Callable, layout: Varlen, options: Options) -> dict[str, Any]:
        left, right = _sides(options)
        return {
            **_named_lengths(layout),
            "softmax_scale": options.scale,
            "causal": True,
            "softcap": options.softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
            "dropout_p": 0.0,
            "alibi_slopes": None,
        }


class FlashAttention3(FlashAttention2):
    """The package flash-attn-3 (arXiv 2407.08608), whose module is flash_attn_interface."""

    def __init__(self) -> None:
        module = import_module("flash_attn_interface")
        self.attend, self.attend_back = module._flash_attn_forward, module._flash_attn_backward

    def _named(self, function: Callable, layout: Varlen, options: Options) -> dict[str, Any]:
        named = super()._named(function, layout, options)
        del named["dropout_p"], named["alibi_slopes"]
        if "window_size" in inspect.signature(_plain(function)).parameters:  # before it was a custom op
            named["window_size"] = named.pop("window_size_left"), named.pop("window_size_right")
        return named


class FlashAttention4:
    """The package flash-attn-4, a pre-release, written in CuTe's Python."""

    def __init__(self) -> None:
        module = import_module("flash_attn.cute.interface")
        self.attend, self.attend_back = module._flash_attn_fwd, module._flash_attn_bwd

    def forward(self, q, k, v, layout, options):
        given = self._named(layout, options) | {"softcap": options.softcap, "return_lse": True}
        out, lse, *_ = _call(self.attend, q=q, k=k, v=v, **given)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, layout, options):
        deterministic = torch.are_deterministic_algorithms_enabled()
        given = self._named(layout, options) | {"softcap": options.softcap or 0.0, "deterministic": deterministic}
        return _call(self.attend_back, q=q, k=k, v=v, out=out, dout=grad, lse=lse, **given)[:3]

    def _named(self, layout: Varlen, options: Options) -> dict[str, Any]:
        left, right = (None, None) if options.window is None else _sides(options)
        common = {"softmax_scale": options.scale, "causal": True}
        return {**_named_lengths(layout), **common, "window_size_left": left, "window_size_right": right}


@dataclass(frozen=True)
class Library:
    """What one of them takes.

    Attributes:
        calls: makes its `Calls`.
        capabilities: major compute capabilities of NVIDIA's devices that it has kernels for.
        softcap: whether it knows one.
    """

    calls: Callable[[], Calls]
    capabilities: tuple[int, ...]
    softcap: bool = True


LIBRARIES = {  # the fastest first
    "flash-attn-4": Library(FlashAttention4, (10, 11)),
    "flash-attn-3": Library(FlashAttention3, (9,)),
    "flash-attn-2": Library(FlashAttention2, (8, 9, 10, 11, 12)),
    "torch": Library(TorchCalls, (8, 9, 10, 11, 12), softcap=False),
}


@lru_cache
def load(name: str) -> tuple[Calls | None, str]:
    """A library's calls, or None and the reason."""
    try:
        return LIBRARIES[name].calls(), ""
    except Exception as reason:  # whatever a package, or the library that it was built against, has to say
        return None, f"{type(reason).__name__}: {reason}"


class Flash:
    """A call of a library. They take equal sizes of heads, multiples of 8; others are padded with zeros."""

    def __init__(self, calls: Calls, query: Tensor, value: Tensor, rows: Tensor, options: Options) -> None:
        self.calls, self.options = calls, options
        self.layout = varlen(OP, rows, len(query), query.device)
        self.widths = query.shape[2], query.shape[2], value.shape[2]
        self.width = -(-max(self.widths) // 8) * 8

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out [T, H, D_v] and log-sum-exps [H, T], sinks among them."""
        q, k, v = self._wide(query), *map(self._wide, self._placed(key, value))
        out, lse = self.calls.forward(q, k, v, self.layout, self.options)
        out = out[..., : self.widths[2]].contiguous()
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        k, v = map(self._wide, self._placed(key, value))
        g, q, o = (self._wide(x) for x in (grad, query, out))
        found = self.calls.backward(g, q, k, v, o, lse, self.layout, self.options)
        dq, dk, dv = (x[..., :width].contiguous() for x, width in zip(found, self.widths, strict=True))
        places = self.layout.places
        if places is None:
            return dq, dk, dv
        from ..kernels.gather_keys import gather_keys_bwd

        return dq, *gather_keys_bwd(dk, dv, places.readers, places.first_reader)

    def _placed(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of each row behind one another."""
        places = self.layout.places
        if places is None:
            return key, value
        from ..kernels.gather_keys import gather_keys_fwd

        return gather_keys_fwd(words_together(key), words_together(value), places.index)

    def _wide(self, x: Tensor) -> Tensor:
        return words_together(x if x.shape[2] == self.width else F.pad(x, (0, self.width - x.shape[2])))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The output [T, H, D_v], in place, and log-sum-exps [H, T] of a softmax in which each head's sink takes part."""
    logits = sinks.to(lse.dtype)[:, None]
    return out.mul_(torch.sigmoid(lse - logits).t()[..., None]), torch.logaddexp(lse, logits)


def takes_scale(scale: float) -> bool:
    """Whether flash attention computes right with a scale: it hides with -inf, and finds maxima, before it scales."""
    return scale >= torch.finfo(torch.float32).tiny


def words_together(x: Tensor) -> Tensor:
    """With a last stride of 1, as all kernels want it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sides(options: Options) -> tuple[int, int]:
    """How many keys before and after its own a query sees; -1: no bound but causality."""
    return (-1, -1) if options.window is None else (options.window - 1, 0)


def _named_lengths(layout: Varlen) -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), layout.lengths, strict=True))


def _plain(function: Any) -> Callable:
    """What a custom op of torch calls, which has the signature."""
    return getattr(function, "_init_fn", function)


def _call(function: Callable, **given: Any) -> Any:
    """With None for parameters that have no default and are not given: versions differ in those they have.

    Raises:
        NotImplementedError: it lacks one that is given. Left out, another attention would be computed.
    """
    function = _plain(function)
    parameters = inspect.signature(function).parameters
    lacking = sorted(given.keys() - parameters.keys())
    if lacking:
        name = f"{function.__module__}.{function.__name__}"
        raise NotImplementedError(f"{OP}: {name} must take {', '.join(lacking)}; this version does not")
    required = (name for name, parameter in parameters.items() if parameter.default is parameter.empty)
    return function(**{**dict.fromkeys(required), **given})
