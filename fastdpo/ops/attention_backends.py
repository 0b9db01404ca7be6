"""The choice of a backend for packed attention on a GPU. Elsewhere, `attention_pieces` computes it.

| backend | devices | dtypes | head size | window | softcap | sinks |
|---|---|---|---|---|---|---|
| `flash-attn-4` | Blackwell | float16, bfloat16 | up to 256 | yes | yes | yes |
| `flash-attn-3` | Hopper | float16, bfloat16 | up to 256 | yes | yes | yes |
| `flash-attn-2` | NVIDIA, Ampere or later | float16, bfloat16 | up to 256 | yes | yes | yes |
| `torch` | NVIDIA, Ampere or later | float16, bfloat16 | up to 256 | yes | no | yes |
| `triton`, fastdpo's own | all that Triton supports | float16, bfloat16 | up to 256 | yes | yes | yes |

The first backend that is installed and supports the call is used. If there is none, as in float32,
`attention_pieces` computes the call on the GPU, and one log line per reason says why. Each of the four libraries must
first pass a probe: on a small case it must align queries with the end of their keys, and no
sequence may read from another. A library that fails is disabled with one log line, and so are
fastdpo's kernels (`kernel_verdicts`). The environment variable FASTDPO_ATTENTION selects a backend
by name.
"""

from __future__ import annotations

import os
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..logs import warn
from . import kernel_trials
from .attention_calls import OP, AttentionCall, AttentionOptions, Backend
from .attention_flash import LIBRARIES
from .attention_triton import TritonBackend
from .devices import suits_triton
from .kernel_verdicts import outcome

TRITON, OWN = "triton", TritonBackend()
BACKENDS: dict[str, Backend] = {**LIBRARIES, TRITON: OWN}
"""Every backend by name, in the order of preference."""

VARIABLE = "FASTDPO_ATTENTION"


def prepare_call(query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> AttentionCall | None:
    """The call of the chosen backend, or None if no backend supports it.

    Raises:
        ValueError: FASTDPO_ATTENTION is not the name of a backend.
        NotImplementedError: FASTDPO_ATTENTION names a backend that does not support this call; the
            message says why.
    """
    if not len(query) or (query.device.type == "cpu" and not suits_triton(query.device, query.dtype)):
        return None
    selected = os.environ.get(VARIABLE, "")
    if selected:
        if selected not in BACKENDS:
            raise ValueError(f"{OP}: {VARIABLE} must be one of {', '.join(BACKENDS)}, or unset; got {selected}")
        reason = BACKENDS[selected].unsupported_reason(query, value, options)
        if reason is None and selected == TRITON and not OWN.works(query, value, options):
            reason = "it is disabled, as logged"
        if reason is not None:
            rule = f"{VARIABLE} must name a backend that supports this call, or be unset"
            raise NotImplementedError(f"{OP}: {rule}; got {selected}: {reason}")
        name = selected
    else:
        name = next((name for name in BACKENDS if _is_usable(name, query, value, options)), None)
    if name is None:
        reason = OWN.unsupported_reason(query, value, options)
        if reason is not None:
            _log_unsupported(reason)
        return None
    if options.window is not None and options.window >= int((rows[:, 1] + rows[:, 3]).max()):
        options = options._replace(window=None)  # as long as the longest row: it hides nothing
    return BACKENDS[name].prepare(query, value, rows, options)


@lru_cache
def _log_unsupported(reason: str) -> None:
    """Logs, once per reason, why the backend that supports the most calls does not support one."""
    warn(f"{OP}: plain matrix products are used instead of a backend: {TRITON}: {reason}")


def _is_usable(name: str, query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    backend = BACKENDS[name]
    if backend.unsupported_reason(query, value, options) is not None:
        return False
    if backend.needs_probe:
        return passes_probe(name, query.device, query.dtype, query.shape[2], value.shape[2])
    return OWN.works(query, value, options)


@lru_cache
def passes_probe(name: str, device: torch.device, dtype: torch.dtype, d: int, d_v: int) -> bool:
    """Whether a backend computes packed attention on a small case next to a row of NaN.

    Runs once per device, dtype and head sizes.
    """
    trial = partial(kernel_trials.packed_attention, BACKENDS[name].prepare, d=d, d_v=d_v, with_sinks=False)
    reason = outcome(trial, device, dtype)
    if reason is not None:
        warn(f"{OP}: {name} is disabled: {reason}")
    return reason is None
