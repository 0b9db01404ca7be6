"""The choice of a backend for packed attention on a GPU. Elsewhere, `attention_pieces` computes it.

| backend | devices | dtypes | head size | window | softcap | sinks |
|---|---|---|---|---|---|---|
| `flash-attn-4` | Blackwell | float16, bfloat16 | up to 256 | yes | yes | yes |
| `flash-attn-3` | Hopper | float16, bfloat16 | up to 256 | yes | yes | yes |
| `flash-attn-2` | NVIDIA, Ampere or later | float16, bfloat16 | up to 256 | yes | yes | yes |
| `torch` | NVIDIA, Ampere or later | float16, bfloat16 | up to 256 | yes | no | yes |
| `triton`, fastdpo's own | all that Triton supports | float16, bfloat16 | up to 256 | yes | yes | yes |

The fastest backend that is installed and supports the call is used (`tuning`), and the first of them
where nothing is measured. If there is none, as in float32, `attention_pieces` computes the call on the
GPU, and one log line per reason says why. Each of the four libraries must
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
from . import kernel_trials, tuning
from .attention_calls import OP, AttentionCall, AttentionOptions, Backend
from .attention_flash import LIBRARIES
from .attention_triton import TritonBackend
from .devices import suits_triton
from .kernel_verdicts import Kernel, failure_of_candidate, outcome
from .tuning import Candidate

TRITON, OWN = "triton", TritonBackend()
BACKENDS: dict[str, Backend] = {**LIBRARIES, TRITON: OWN}
"""Every backend by name, in the order of preference."""

VARIABLE = "FASTDPO_ATTENTION"
LEAST_TUNED = 1024  # packed tokens


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
        if name is not None and len(query) >= LEAST_TUNED and tuning.is_on(query.device):
            name = _fastest(name, query, value, rows, options)
    if name is None:
        reason = OWN.unsupported_reason(query, value, options)
        if reason is not None:
            _log_unsupported(reason)
        return None
    if options.window is not None and options.window >= int((rows[:, 1] + rows[:, 3]).max()):
        options = options._replace(window=None)  # as long as the longest row: it hides nothing
    return BACKENDS[name].prepare(query, value, rows, options)


def _fastest(builtin: str, query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> str:
    """The fastest backend for calls like this one."""
    (t, h, d), (_, h_kv, d_v) = query.shape, value.shape
    sizes = dict(T=tuning.bucket(t), H=h, H_kv=h_kv, D=d, D_v=d_v)
    features = dict(sizes, windowed=options.window is not None, capped=options.softcap is not None)
    described = tuple(f"{name} {x}" for name, x in features.items())

    def candidates() -> list[Candidate]:
        return [
            Candidate(
                name,
                run=partial(_run, backend, query, value, rows, options),
                failure=partial(_failure, name, query, value, options),
            )
            for name, backend in BACKENDS.items()
            if backend.unsupported_reason(query, value, options) is None
        ]

    name = tuning.choose(Kernel(OP, query.device, query.dtype, described), builtin, candidates)
    return name if _is_usable(name, query, value, options) else builtin


def _run(backend: Backend, query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> None:
    """Runs forward and backward. Queries stand in for keys."""
    key = query[:, : value.shape[1]]
    call = backend.prepare(query, value, rows, options)
    out, lse = call.forward(query, key, value, None)
    call.backward(out, query, key, value, out, lse)


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


def _failure(name: str, query: Tensor, value: Tensor, options: AttentionOptions) -> str | None:
    """Why a backend that supports a call may not be used, or None."""
    if not BACKENDS[name].needs_probe:
        return failure_of_candidate(*OWN.kernel_and_trial(query, value, options))
    passes = passes_probe(name, query.device, query.dtype, query.shape[2], value.shape[2])
    return None if passes else "it fails on a small case, as logged"


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
