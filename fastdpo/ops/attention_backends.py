"""Which way a packed attention is computed on a GPU; `attention_pieces` has the ways for everywhere else.

| backend | devices | dtypes | heads | window | softcap | sinks |
|---|---|---|---|---|---|---|
| `flash-attn-4` | Blackwell | float16, bfloat16 | up to 256 wide | yes | yes | yes |
| `flash-attn-3` | Hopper | float16, bfloat16 | up to 256 wide | yes | yes | yes |
| `flash-attn-2` | NVIDIA from Ampere on | float16, bfloat16 | up to 256 wide | yes | yes | yes |
| `torch` | NVIDIA from Ampere on | float16, bfloat16 | up to 256 wide | yes | no | yes |
| `triton`, fastdpo's own | whatever Triton compiles for | these and float32 | up to 256 wide | yes | yes | yes |

The first that is installed and takes the call is used. Each of the four libraries must show on a small case first that
it aligns queries with the end of their keys and that a sequence reads nothing of another. One that does not is left
out, which is said once. The environment variable FASTDPO_ATTENTION names a backend to be used instead of the first.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache

import torch
from torch import Tensor

from .attention_flash import LIBRARIES, OP, Flash, Options, load, takes_scale, words_together
from .attention_layouts import blocks
from .devices import suits_triton

WIDEST = 256  # head
HALVES = (torch.float16, torch.bfloat16)
TRITON = "triton"
BACKENDS = (*LIBRARIES, TRITON)
VARIABLE = "FASTDPO_ATTENTION"

logger = logging.getLogger("fastdpo")


class Kernels:
    """A call of fastdpo's own."""

    def __init__(self, query: Tensor, value: Tensor, rows: Tensor, options: Options) -> None:
        from ..kernels.packed_attention import cut

        self.cut = cut(query.shape[2], value.shape[2], _capability(query.device) == 9)
        self.rows, self.options = rows, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out [T, H, D_v] and log-sum-exps [H, T], sinks among them."""
        from ..kernels.packed_attention import packed_attention_fwd

        size = self.cut.forward
        plan = blocks(OP, self.rows, len(query), size.queries, size.keys, query.device)
        q, k, v = words_together(query), words_together(key), words_together(value)
        sinks = None if sinks is None else sinks.float().contiguous()
        return packed_attention_fwd(q, k, v, plan.rows, plan.queries, size, sinks, *self.options)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        from ..kernels.packed_attention import packed_attention_bwd

        sizes = self.cut.of_queries.queries, self.cut.of_keys.keys
        plan = blocks(OP, self.rows, len(query), *sizes, query.device)
        q, k, v = words_together(query), words_together(key), words_together(value)
        return packed_attention_bwd(grad, q, k, v, out, lse, plan, self.cut, *self.options)


def backend(query: Tensor, value: Tensor, rows: Tensor, options: Options) -> Flash | Kernels | None:
    """The way to compute a whole call, or None: in pieces.

    Raises:
        ValueError: FASTDPO_ATTENTION names no backend.
        NotImplementedError: it names one that does not take this call; the message says why.
    """
    if not len(query) or (query.device.type == "cpu" and not suits_triton(query.device, query.dtype)):
        return None
    wanted = os.environ.get(VARIABLE, "")
    if wanted:
        if wanted not in BACKENDS:
            raise ValueError(f"{OP}: {VARIABLE} must be one of {', '.join(BACKENDS)}, or unset; got {wanted}")
        reason = refusal(wanted, query, value, options)
        if reason is not None:
            rule = f"{VARIABLE} must name a backend that takes this call, or be unset"
            raise NotImplementedError(f"{OP}: {rule}; got {wanted}: {reason}")
        name = wanted
    else:
        name = next((name for name in BACKENDS if _is_chosen(name, query, value, options)), None)
    if name is None:
        return None
    if options.window is not None and options.window >= int((rows[:, 1] + rows[:, 3]).max()):
        options = options._replace(window=None)  # it hides nothing
    return _call_of(name, query, value, rows, options)


def refusal(name: str, query: Tensor, value: Tensor, options: Options) -> str | None:
    """Why a backend can't compute a call; None if it can."""
    widest = max(query.shape[2], value.shape[2])
    if not suits_triton(query.device, query.dtype):  # which the libraries need for their keys too
        return f"it needs Triton, a device that Triton compiles for, and no float64; here {query.device}, {query.dtype}"
    if widest > WIDEST:
        return f"heads must be at most {WIDEST} wide; they are {widest}"
    if name == TRITON:
        return None
    library = LIBRARIES[name]
    if query.dtype not in HALVES:
        return f"it needs float16 or bfloat16; got {query.dtype}"
    if options.softcap is not None and not library.softcap:
        return "it has no softcap"
    if not takes_scale(options.scale):
        return f"it needs a positive scale; got {options.scale}"
    if _capability(query.device) not in library.capabilities:
        return f"it has no kernels for this device (compute capability {_capability(query.device)})"
    calls, reason = load(name)
    return reason if calls is None else None


def _is_chosen(name: str, query: Tensor, value: Tensor, options: Options) -> bool:
    if refusal(name, query, value, options) is not None:
        return False
    return name == TRITON or is_sound(name, query.device, query.dtype, query.shape[2], value.shape[2])


def _call_of(name: str, query: Tensor, value: Tensor, rows: Tensor, options: Options) -> Flash | Kernels:
    if name == TRITON:
        return Kernels(query, value, rows, options)
    calls, reason = load(name)
    if calls is None:
        raise NotImplementedError(f"{OP}: {name}: {reason}")
    return Flash(calls, query, value, rows, options)


@lru_cache
def _capability(device: torch.device) -> int | None:
    """The major one of NVIDIA's; None elsewhere."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.version.hip is None else None


@lru_cache
def is_sound(name: str, device: torch.device, dtype: torch.dtype, d: int, d_v: int) -> bool:
    """Whether a library equals fastdpo's kernels on a pair beside another that is full of NaN. Asked once a kind."""
    rows = torch.tensor([[0, 0, 0, 5], [0, 3, 5, 4], [9, 0, 9, 3]], dtype=torch.int32, device="cpu")
    shapes = ((12, 2, d), (12, 1, d), (12, 1, d_v), (12, 2, d_v))
    q, k, v, grad = (torch.arange(a * b * c).sin().view(a, b, c).to(device, dtype) for a, b, c in shapes)
    for x in (q, k, v, grad):
        x[9:] = torch.nan
    found = []
    try:
        for way in (name, TRITON):
            attend = _call_of(way, q, v, rows, Options(d**-0.5, None, None))
            out, lse = attend.forward(q, k, v, None)
            found.append([out, *attend.backward(grad, q, k, v, out, lse)])
    except Exception as reason:  # of a library; those of our kernels will be seen again
        logger.warning("%s: %s is not used: %s: %s", OP, name, type(reason).__name__, reason)
        return False
    sound = all(torch.allclose(a[:9], b[:9], rtol=0.05, atol=0.05) for a, b in zip(*found, strict=True))
    if not sound:
        logger.warning("%s: %s is not used: it is wrong on a small case", OP, name)
    return sound
