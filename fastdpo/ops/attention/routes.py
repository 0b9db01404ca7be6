"""The route of a call of packed attention: a backend on a GPU, and `pieces` elsewhere, chosen by shapes and options.

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
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...logs import report, warn
from ..choice import tuning
from ..choice.tuning import Candidate
from ..choice.verdicts import Kernel, failure_of_candidate, outcome, works
from ..devices import current_stream, is_capturing, suits_triton
from . import device_layout, trials
from .device_layout import OP, Ahead, AttentionCall, AttentionOptions, DeviceLayout, Kind, Rows, rows_of
from .flash import LIBRARIES
from .pieces import PiecesCall
from .triton_backend import TritonBackend

T = TypeVar("T")


class Backend(Protocol):
    """A way to compute a whole layout at once."""

    def unsupported_reason(self, kind: Kind) -> str | None:
        """Why the backend cannot compute calls of a kind, or None if it can."""
        ...

    def call(self, kind: Kind) -> AttentionCall:
        """The call of a supported kind."""
        ...


TRITON, OWN = "triton", TritonBackend()
BACKENDS: dict[str, Backend] = {**LIBRARIES, TRITON: OWN}
"""Every backend by name, in the order of preference."""

VARIABLE = "FASTDPO_ATTENTION"
LEAST_TUNED = 1024  # packed tokens

replaced: dict[Kind, str] = {}  # by `Kind.of_kernels`, the backend that raised an error after it had been chosen
_is_trial: ContextVar[bool] = ContextVar("fastdpo_attention_trial", default=False)


class Prepared(NamedTuple):
    """The route of a call, and the rows of a layout in the form that it takes.

    Attributes:
        given: the kind of the call.
        kind: the same without a window that hides nothing.
        backend: its name, or None if no backend supports the call, so that `pieces` computes it.
        call: the forward and the backward.
        layout: the rows on the device.
        ahead: what islands add, if there are any, and its rows, int32 [I, 4] on the CPU.
    """

    given: Kind
    kind: Kind
    backend: str | None
    call: AttentionCall
    layout: DeviceLayout[Any]
    ahead: tuple[Ahead, Tensor] | None


def prepare(query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> Prepared:
    """The route of a call over the rows [S, 4], or over the mask [1, 1, S, 4] that a model's layers are given.

    Prepared once for all layers and passes with the same rows, and for each stream, whose copy to the device the
    others do not wait for. The environment is read once for each mask.

    Raises:
        ValueError, NotImplementedError: see `chosen`.
        ValueError: the rows do not tile the tokens, or a stream captures a CUDA graph and the layout has
            not been used before.
    """
    of_rows = rows_of(rows, len(query))
    settings = None if rows.dim() == 4 else (os.environ.get(VARIABLE), os.environ.get(tuning.VARIABLE))
    kind = Kind.of(query, value, options)
    state = kind, len(replaced), _is_trial.get(), settings
    key, kept = (state, current_stream(query.device)), of_rows.prepared
    found = kept.get(key)
    if found is None:
        if is_capturing(query.device):  # after a wait for the device, so that the copy is done
            found = kept.get(state)
        kept[key] = kept[state] = found = found or _prepared(kind, of_rows, (query, value))
    return found


def _prepared(given: Kind, rows: Rows, example: tuple[Tensor, Tensor]) -> Prepared:
    """The route depends on the rows by the length of the longest alone. A window as long as that hides nothing.
    Libraries run other kernels with a window, so what is probed, timed and replaced is the call without it.
    """
    kind = given._replace(options=given.options._replace(window=_visible_window(given, rows)))
    name, ahead = chosen(kind, rows, example), None
    call = PiecesCall(kind) if name is None else BACKENDS[name].call(kind)
    if rows.ahead is not None:
        tokens, of_islands = rows.ahead
        ahead = DeviceLayout(tokens, kind.device).contents, of_islands
    host = call.describe(rows)
    return Prepared(given, kind, name, call, DeviceLayout(host, kind.device, rows.sizes_with_room(host)), ahead)


def _visible_window(kind: Kind, rows: Rows) -> int | None:
    window = kind.options.window
    return None if window is not None and window >= rows.longest > 0 else window


def run(
    compute: Callable[[AttentionCall, tuple], T], prepared: Prepared, query: Tensor, value: Tensor, rows: Tensor
) -> tuple[Prepared, T]:
    """What `compute` returns for a call and its layout, and what was run: if a backend raises an error, the next one
    takes its place.

    Raises:
        ValueError, NotImplementedError: see `prepare`.
        NotFused: the backend raises an error, no other one supports the call, and `FASTDPO_STRICT=1`.
    """
    backend = prepared.backend
    try:
        return prepared, compute(prepared.call, prepared.layout.contents)
    except torch.OutOfMemoryError:  # no fault of the backend
        raise
    except Exception as error:  # a library may raise anything
        if backend is None:
            raise
        kind = prepared.kind.of_kernels
        is_known = replaced.get(kind) == backend  # since the call was prepared
        if not is_known and (kind in replaced or os.environ.get(VARIABLE) or is_capturing(query.device)):
            raise
        reason = f"{type(error).__name__}: {error}"
        if not is_known:
            replaced[kind] = backend
            tuning.withdraw(_tuned(prepared.kind), backend, reason)
        second = prepare(query, value, rows, prepared.given.options)
        other = second.backend
        if not is_known:
            message = f"{OP}: {backend} has failed and is replaced by {other or 'plain matrix products'}"
            (report if other is None else warn)(f"{message}: {reason}")
        return second, compute(second.call, second.layout.contents)


def refill(recorded: Rows, rows: Rows) -> bool:
    """Writes other rows of as many tokens into all that was prepared for recorded ones, as before a CUDA graph that
    holds calls with these is replayed. If they do not fit, or if a call would take another route, returns False
    instead and writes nothing.
    """
    found = {id(x): x for x in recorded.prepared.values()}.values()
    hosts = [rows.described(x.call) for x in found]
    windows = all(_visible_window(x.given, rows) == x.kind.options.window for x in found)
    if rows.ahead is not None or not windows or not all(x.layout.takes(y) for x, y in zip(found, hosts, strict=True)):
        return False
    for prepared, host in zip(found, hosts, strict=True):
        prepared.layout.fill(host)
    return True


def chosen(kind: Kind, rows: Rows, example: tuple[Tensor, Tensor]) -> str | None:
    """The name of the backend for calls of a kind, or None if no backend supports it.

    Where backends are timed, the rows, query and value of its first call are an example of it.

    Raises:
        ValueError: FASTDPO_ATTENTION is not the name of a backend.
        NotImplementedError: FASTDPO_ATTENTION names a backend that does not support this call; the
            message says why.
    """
    if not kind.tokens or (kind.device.type == "cpu" and not suits_triton(kind.device, kind.dtype)):
        return None
    selected = os.environ.get(VARIABLE, "")
    if selected:
        if selected not in BACKENDS:
            raise ValueError(f"{OP}: {VARIABLE} must be one of {', '.join(BACKENDS)}, or unset; got {selected}")
        reason = BACKENDS[selected].unsupported_reason(kind)
        if reason is None and selected == TRITON and not works(*OWN.kernel_and_trial(kind)):
            reason = "it is disabled, as logged"
        if reason is not None:
            rule = f"{VARIABLE} must name a backend that supports this call, or be unset"
            raise NotImplementedError(f"{OP}: {rule}; got {selected}: {reason}")
        return selected
    name = next((name for name in BACKENDS if _is_usable(name, kind)), None)
    if name is None:
        reason = OWN.unsupported_reason(kind)
        if reason is not None and not _is_trial.get():
            _log_unsupported(reason)
        return None
    if kind.tokens >= LEAST_TUNED and tuning.is_on(kind.device):
        return _fastest(name, kind, rows, example)
    return name


def forget() -> None:
    """Forgets what this process has prepared, the backends that have failed, and what was logged.

    A CUDA graph that was captured before must not be replayed afterwards: its layouts are no longer kept.
    """
    device_layout.forget()
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


def _fastest(builtin: str, kind: Kind, rows: Rows, example: tuple[Tensor, Tensor]) -> str:
    """The fastest usable backend for calls like this one."""

    def candidates() -> list[Candidate]:
        return [
            Candidate(name, run=_run_of(backend, kind, rows, *example), failure=partial(failure, name, kind))
            for name, backend in BACKENDS.items()
            if backend.unsupported_reason(kind) is None
        ]

    call = _tuned(kind)
    names = tuning.choose(call, builtin, candidates), *tuning.timed(call)
    return next((name for name in names if _is_usable(name, kind)), builtin)


def _tuned(kind: Kind) -> Kernel:
    """The calls for which backends are timed together."""
    d, d_v, h, h_kv, windowed, capped = kind.features.values()
    sizes = dict(T=tuning.bucket(kind.tokens), H=h, H_kv=h_kv, D=d, D_v=d_v, windowed=windowed, capped=capped)
    return Kernel(OP, kind.device, kind.dtype, tuple(f"{name} {x}" for name, x in sizes.items()))


def _run_of(backend: Backend, kind: Kind, rows: Rows, query: Tensor, value: Tensor) -> Callable[[], object]:
    """A function that runs forward and backward, prepared when it is first called. Queries stand in for keys."""
    key = query[:, : value.shape[1]]

    @cache
    def prepared() -> tuple[AttentionCall, tuple]:
        call = backend.call(kind)
        return call, DeviceLayout(call.describe(rows), kind.device).contents

    def run() -> None:
        call, layout = prepared()
        out, lse = call.forward(query, key, value, None, layout)
        call.backward(out, query, key, value, out, lse, layout)

    return run


@lru_cache
def _log_unsupported(reason: str) -> None:
    """Logs, once per reason, why the backend that supports the most calls does not support one."""
    warn(f"{OP}: plain matrix products are used instead of a backend: {TRITON}: {reason}")


def _is_usable(name: str, kind: Kind) -> bool:
    if BACKENDS[name].unsupported_reason(kind) is not None or replaced.get(kind.of_kernels) == name:
        return False
    return works(*OWN.kernel_and_trial(kind)) if name == TRITON else passes_probe(name, kind.of_kernels)


def failure(name: str, kind: Kind) -> str | None:
    """Why a backend that supports calls of a kind may not be used, or None."""
    if replaced.get(kind.of_kernels) == name:
        return "it has failed before, as logged"
    if name == TRITON:
        return failure_of_candidate(*OWN.kernel_and_trial(kind))
    return None if passes_probe(name, kind.of_kernels) else "it fails on a small case, as logged"


@lru_cache
def passes_probe(name: str, kind: Kind) -> bool:
    """Whether a library computes packed attention on a small case next to a row of large numbers.

    Runs once for each of `Kind.of_kernels`.
    """
    features = kind.features
    run = partial(trials.packed_attention, BACKENDS[name].call, with_sinks=False, whole_tiles=True, **features)
    reason = outcome(run, kind.device, kind.dtype)
    if reason is not None:
        of = f"head sizes {kind.d} and {kind.d_v}"
        options = dict(features, deterministic=kind.deterministic)
        of += "".join(f", {option}" for option in ("windowed", "capped", "deterministic") if options[option])
        warn(f"{OP}: {name} is disabled for {of}: {reason}")
    return reason is None
