"""The choice of a backend for packed attention on a GPU. Elsewhere, `pieces` computes it.

| backend | devices | dtypes | head size | window | softcap | sinks |
|---|---|---|---|---|---|---|
| `flash-attn-3` | Hopper | float16, bfloat16 | up to 256 | yes | yes | yes |
| `flash-attn-4` | Hopper, Blackwell | float16, bfloat16 | up to 256 | yes | yes | yes |
| `flash-attn-2` | NVIDIA, Ampere or later | float16, bfloat16 | up to 256 | yes | yes | yes |
| `torch` | NVIDIA, Ampere or later | float16, bfloat16 | up to 256 | yes | no | yes |
| `triton`, fastdpo's own | all that Triton supports | float16, bfloat16 | up to 256 | yes | yes | yes |

The fastest backend that is installed and supports the call is used (`tuning`), and the first of them
where nothing is measured. If there is none, as in float32, `pieces` computes the call on the
GPU, and one log line per reason says why. Each of the four libraries must first pass a probe for each
`Kind` of call: on a small case it must align queries with the end of their keys, and no sequence may
read from another. A library that fails is disabled with one log line, and so are fastdpo's kernels
(`verdicts`). A backend that passed but raises an error in a later call is replaced by the next
one for the rest of the process, once for each kind of call. The environment variable
FASTDPO_ATTENTION selects a backend by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...logs import report, warn
from ..choice import tuning
from ..choice.tuning import Candidate
from ..choice.verdicts import Kernel, failure_of_candidate, outcome
from ..devices import current_stream, is_capturing, suits_triton
from . import islands, trials
from .calls import OP, AttentionCall, AttentionOptions, Backend
from .flash import LIBRARIES
from .islands import Ahead
from .layout_cache import LayoutCache
from .triton_backend import TritonBackend

T = TypeVar("T")

TRITON, OWN = "triton", TritonBackend()
BACKENDS: dict[str, Backend] = {**LIBRARIES, TRITON: OWN}
"""Every backend by name, in the order of preference."""

VARIABLE = "FASTDPO_ATTENTION"
LEAST_TUNED = 1024  # packed tokens


replaced: dict[Kind, str] = {}  # by kind of call, the backend that raised an error after it had been chosen
_is_trial: ContextVar[bool] = ContextVar("fastdpo_attention_trial", default=False)


class Kind(NamedTuple):
    """Calls for which a library runs the same kernels, as far as is known."""

    device: torch.device
    dtype: torch.dtype
    d: int
    d_v: int
    windowed: bool
    capped: bool
    deterministic: bool

    @staticmethod
    def of(query: Tensor, value: Tensor, options: AttentionOptions) -> Kind:
        features = options.window is not None, options.softcap is not None
        sizes = query.shape[2], value.shape[2]
        return Kind(query.device, query.dtype, *sizes, *features, torch.are_deterministic_algorithms_enabled())


class Plan(NamedTuple):
    """How a layout is computed in one kind of call: what is decided and prepared once for all layers and both passes.

    Attributes:
        rows: int32 [S, 4] on the host, without islands.
        ahead: what islands add to the rows, if there are any.
        options: without a window that hides nothing.
        backend: the name of the backend, or None if no backend supports the call.
        call: of the backend.
    """

    rows: Tensor
    ahead: Ahead | None
    options: AttentionOptions
    backend: str | None = None
    call: AttentionCall | None = None


KEPT_PLANS = 32  # those of the last batches, with two kinds of layers and gradient accumulation
_plans: LayoutCache[Plan] = LayoutCache(KEPT_PLANS)
_PLANS = "_fastdpo_plans"  # the attribute of a mask that holds those of its layout


def compute(
    run: Callable[[AttentionCall], T],
    planned: Plan,
    query: Tensor,
    value: Tensor,
    rows: Tensor,
    options: AttentionOptions,
) -> tuple[Plan, T | None]:
    """What `run` returns for the call of a plan, if its backend has one, and the plan.

    If the backend raises an error, the next one takes its place, and its plan that of the given one.

    Raises:
        ValueError, NotImplementedError: see `plan`.
        NotFused: the backend raises an error, no other one supports the call, and `FASTDPO_STRICT=1`.
    """
    if planned.call is None:
        return planned, None
    try:
        return planned, run(planned.call)
    except torch.OutOfMemoryError:  # no fault of the backend
        raise
    except Exception as error:  # a library may raise anything
        kind, failed = Kind.of(query, value, planned.options), str(planned.backend)
        is_known = replaced.get(kind) == failed  # since the call was planned
        if not is_known and (kind in replaced or os.environ.get(VARIABLE) or is_capturing(query.device)):
            raise
        reason = f"{type(error).__name__}: {error}"
        if not is_known:
            replaced[kind] = failed
            tuning.withdraw(_tuned(query, value, planned.options), failed, reason)
        second = plan(query, value, rows, options)
        if not is_known:
            message = f"{OP}: {failed} has failed and is replaced by {second.backend or 'plain matrix products'}"
            (report if second.call is None else warn)(f"{message}: {reason}")
        return second, None if second.call is None else run(second.call)


def plan(query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> Plan:
    """The plan of a layout [S, 4], or of the mask [1, 1, S, 4] that a model's layers are given.

    It is kept by whatever decides on the backend and by the content of the rows, because gradient checkpointing
    passes on other tensors than it was given. A mask has it at hand: usually, all layers are given the same one.
    The environment is read once for each mask.

    Raises:
        ValueError, NotImplementedError: see `chosen`.
        ValueError: the rows do not tile the tokens, or a stream captures a CUDA graph and the layout has
            not been used before.
    """
    state = torch.are_deterministic_algorithms_enabled(), len(replaced), _is_trial.get()
    of_call = query.device, query.dtype, query.shape, value.shape, options, state
    if rows.dim() == 2:
        return plan_of_rows(query, value, rows, options, of_call)
    if rows.is_inference():  # it has no version, so a write to it would be missed
        return plan_of_rows(query, value, rows.flatten(0, 2), options, of_call)
    plans, key = vars(rows).setdefault(_PLANS, {}), (of_call, rows._version, current_stream(query.device))
    found = plans.get(key)
    if found is None:
        found = plans[key] = plan_of_rows(query, value, rows.flatten(0, 2), options, of_call)
    return found


def plan_of_rows(query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions, of_call: tuple) -> Plan:
    """The plan of a layout [S, 4], by its content and by what else decides on it."""
    rows, settings = rows.cpu(), (os.environ.get(VARIABLE), os.environ.get(tuning.VARIABLE))
    key = rows.contiguous().numpy().tobytes(), of_call, settings
    return _plans.get(query.device, key, partial(_made_plan, query, value, rows, options))


def _made_plan(query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> Plan:
    rows, ahead = islands.split(rows, query.device)
    options = without_an_idle_window(options, rows)
    name = chosen(query, value, rows, options)
    if name is None:
        return Plan(rows, ahead, options)
    return Plan(rows, ahead, options, name, BACKENDS[name].prepare(query, value, rows, options))


def without_an_idle_window(options: AttentionOptions, rows: Tensor) -> AttentionOptions:
    """Options without a window that is as long as the longest row, since it hides nothing.

    Libraries run other kernels with a window, so what is probed, timed and replaced is the call without it.
    """
    if options.window is None or not len(rows) or options.window < int((rows[:, 1] + rows[:, 3]).max()):
        return options
    return options._replace(window=None)


def chosen(query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> str | None:
    """The name of the backend for a call, or None if no backend supports it.

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
        return selected
    name = next((name for name in BACKENDS if _is_usable(name, query, value, options)), None)
    if name is None:
        reason = OWN.unsupported_reason(query, value, options)
        if reason is not None and not _is_trial.get():
            _log_unsupported(reason)
        return None
    if len(query) >= LEAST_TUNED and tuning.is_on(query.device):
        return _fastest(name, query, value, rows, options)
    return name


def forget() -> None:
    """Forgets the plans of this process, the backends that have failed, and what was logged.

    A CUDA graph that was captured before must not be replayed afterwards: its plans are no longer kept.
    """
    _plans.clear()
    replaced.clear()
    _log_unsupported.cache_clear()


@contextmanager
def trial() -> Iterator[None]:
    """Calls in the block are not those of a training, so that what they cannot use is not logged."""
    token = _is_trial.set(True)
    try:
        yield
    finally:
        _is_trial.reset(token)


def _fastest(builtin: str, query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> str:
    """The fastest usable backend for calls like this one."""

    def candidates() -> list[Candidate]:
        return [
            Candidate(
                name,
                run=_run_of(backend, query, value, rows, options),
                failure=partial(_failure, name, query, value, options),
            )
            for name, backend in BACKENDS.items()
            if backend.unsupported_reason(query, value, options) is None
        ]

    call = _tuned(query, value, options)
    names = tuning.choose(call, builtin, candidates), *tuning.timed(call)
    return next((name for name in names if _is_usable(name, query, value, options)), builtin)


def _tuned(query: Tensor, value: Tensor, options: AttentionOptions) -> Kernel:
    """The kind of call for which backends are timed."""
    (t, h, d), (_, h_kv, d_v) = query.shape, value.shape
    sizes = dict(T=tuning.bucket(t), H=h, H_kv=h_kv, D=d, D_v=d_v)
    features = dict(sizes, windowed=options.window is not None, capped=options.softcap is not None)
    return Kernel(OP, query.device, query.dtype, tuple(f"{name} {x}" for name, x in features.items()))


def _run_of(
    backend: Backend, query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions
) -> Callable[[], object]:
    """A function that runs forward and backward, prepared when it is first called. Queries stand in for keys."""
    prepare = cache(partial(backend.prepare, query, value, rows, options))
    key = query[:, : value.shape[1]]

    def run() -> None:
        out, lse = prepare().forward(query, key, value, None)
        prepare().backward(out, query, key, value, out, lse)

    return run


@lru_cache
def _log_unsupported(reason: str) -> None:
    """Logs, once per reason, why the backend that supports the most calls does not support one."""
    warn(f"{OP}: plain matrix products are used instead of a backend: {TRITON}: {reason}")


def _is_usable(name: str, query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    backend = BACKENDS[name]
    if backend.unsupported_reason(query, value, options) is not None:
        return False
    kind = Kind.of(query, value, options)
    if replaced.get(kind) == name:
        return False
    return passes_probe(name, kind) if backend.needs_probe else OWN.works(query, value, options)


def _failure(name: str, query: Tensor, value: Tensor, options: AttentionOptions) -> str | None:
    """Why a backend that supports a call may not be used, or None."""
    kind = Kind.of(query, value, options)
    if replaced.get(kind) == name:
        return "it has failed before, as logged"
    if not BACKENDS[name].needs_probe:
        return failure_of_candidate(*OWN.kernel_and_trial(query, value, options))
    return None if passes_probe(name, kind) else "it fails on a small case, as logged"


@lru_cache
def passes_probe(name: str, kind: Kind) -> bool:
    """Whether a library computes packed attention on a small case next to a row of large numbers.

    Runs once for each kind of call.
    """
    sizes = dict(d=kind.d, d_v=kind.d_v, windowed=kind.windowed, capped=kind.capped)
    run = partial(trials.packed_attention, BACKENDS[name].prepare, with_sinks=False, whole_tiles=True, **sizes)
    reason = outcome(run, kind.device, kind.dtype)
    if reason is not None:
        of = f"head sizes {kind.d} and {kind.d_v}"
        features = "windowed", "capped", "deterministic"
        of += "".join(f", {feature}" for feature in features if getattr(kind, feature))
        warn(f"{OP}: {name} is disabled for {of}: {reason}")
    return reason is None
