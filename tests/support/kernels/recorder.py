"""A stand-in for CUDA graphs on the CPU: records operators and kernels, and runs them again on the same memory.

Before a replay, all that the recordings of a pool have computed is NaN, apart from what the replay reads by right. A
value that was computed on the host for the first batch, a write that was not recorded, and activations that another
replay has overwritten are so found as wrong results. Like a capture, a recording fails where the host reads a value.
"""

import functools
import math
import weakref
from collections import deque
from typing import NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastdpo import distributed
from fastdpo.models.running import captures, compiled, graphs, recording
from fastdpo.models.running.pace import Pace
from fastdpo.ops import second_derivatives
from fastdpo.ops.attention import packed_attention, routes

aten = torch.ops.aten
HOST = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default}
ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


class Recording(TorchDispatchMode):
    """The operators and kernels of a function, in their order.

    Attributes:
        steps: functions that run one again.
        computed: the tensors whose memory they have allocated.
        read: the recordings that have computed what these read.
        last: by the places of computed tensors, the number of the last recording that reads one.
    """

    def __init__(self, number, earlier):
        super().__init__()
        self.number, self.earlier, self.last = number, earlier, {}
        self.steps, self.computed, self.read = [], [], weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given, made = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in ((args, kwargs), result))
        self.note_reads(given)
        storages = {x.untyped_storage().data_ptr() for x in given}
        if any(x.untyped_storage().data_ptr() in storages for x in made):  # a view, or written in place
            if function._schema.is_mutable:
                self.steps.append(lambda: function(*args, **kwargs))
            return result
        self.computed += made
        if function not in ALLOCATIONS:

            def run_again():
                new = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor)]
                for x, y in zip(made, new, strict=True):
                    x.copy_(y)

            self.steps.append(run_again)
        return result

    def launch(self, run, executor, args, kwargs):
        self.note_reads([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])

        def run_again():
            with _disable_current_modes():
                run(executor, *args, **kwargs)

        run_again()
        self.steps.append(run_again)

    def note_reads(self, tensors):
        storages = {x.untyped_storage().data_ptr() for x in tensors}
        for other in self.earlier:
            places = [i for i, x in enumerate(other.computed) if x.untyped_storage().data_ptr() in storages]
            other.last.update(dict.fromkeys(places, self.number))
            if places:
                self.read.add(other)

    def poison(self, after=math.inf):
        """Makes what no recording after one of this number reads NaN."""
        for i, x in enumerate(self.computed):
            if x.is_floating_point() and self.last.get(i, 0) <= after:
                x.fill_(torch.nan)


class Recorder:
    """Replaces `recording.record`.

    Attributes:
        recordings: of all pools, for as long as they are kept.
        replays: their number.
        fails_at: the number of the recording that fails, counted from 1.
    """

    def __init__(self):
        self.recordings, self.made, self.replays, self.fails_at = weakref.WeakSet(), 0, 0, None
        self.active = None

    def record(self, run, memory):
        memory.pool = memory.pool or object()
        self.made += 1
        recording = Recording(self.made, [x for x in self.recordings if x.memory is memory])
        recording.memory = memory
        self.active = recording
        try:
            with mock.patch.object(compiled, "compiled_run", return_value=_as_it_is), recording:
                result = run()
                if self.made == self.fails_at:
                    raise torch.OutOfMemoryError("planted")
        finally:
            self.active = None
            recording.earlier.clear()
        self.recordings.add(recording)

        @torch.no_grad()
        @torch.autocast("cpu", enabled=False)  # whose casts were recorded
        def replay():
            self.replays += 1
            for other in [x for x in self.recordings if x.memory is memory and x not in recording.read]:
                other.poison()
            for step in recording.steps:
                step()
            for other in recording.read:
                other.poison(recording.number)

        return replay, result


def _as_it_is(layer, args, kwargs):
    """Calls a layer that is compiled as it is: torch compiles nothing under a mode."""
    return layer._call_impl(*args, **kwargs)


def install(monkeypatch, *, dense: bool = True) -> Recorder:
    """Makes the CPU a device that has graphs, and on which they always pay.

    Args:
        monkeypatch: the fixture.
        dense: whether attention runs `DenseBackend`. If not, Triton's interpreter must be installed.
    """
    recorder = Recorder()
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(graphs, "has_room", lambda device: True)
    monkeypatch.setattr(graphs, "note_recordings", lambda *_: None)
    monkeypatch.setattr(recording, "record", recorder.record)
    memory_of = functools.cache(lambda device, has_backward: captures.Memory(device))
    monkeypatch.setattr(recording, "memory_of", memory_of)
    always(monkeypatch)
    monkeypatch.setattr(second_derivatives, "uses", deque(maxlen=0))  # by other tests of the process
    monkeypatch.setattr(packed_attention, "is_traced", torch.compiler.is_compiling)  # a capture is no trace
    if dense:
        monkeypatch.setattr(routes, "BACKENDS", {"dense": DenseBackend()})
        monkeypatch.setattr(routes, "suits_triton", lambda *_: True)
    else:
        _record_launches(monkeypatch, recorder)
    return recorder


def always(monkeypatch) -> None:
    """Makes recordings pay, whatever they take."""
    for name in ("is_recorded", "is_kept"):
        monkeypatch.setattr(Pace, name, lambda *_: True)


def compile_layers(monkeypatch) -> None:
    """Plants a clock by which compiled layers are tried after some calls, take half the time, and pay."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(distributed, "STEPS_OF_NOTICE", 1)
    monkeypatch.setattr(Pace, "gain_of_compiling", lambda self, *_: float(self.calls > 2))
    monkeypatch.setattr(Pace, "saving", lambda *_: 0.5)
    monkeypatch.setattr(Pace, "between", 1e6)


def _record_launches(monkeypatch, recorder: Recorder) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def record_and_launch(executor, *args, **kwargs):
        if recorder.active is None:
            launch(executor, *args, **kwargs)
        else:
            recorder.active.launch(launch, executor, args, kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", record_and_launch)


class Visible(NamedTuple):
    """int32, on the device."""

    keys: torch.Tensor  # [T, T], 1 where a query sees a key
    blocks: torch.Tensor  # as many as a kernel would have: 10 for each row


class DenseBackend:
    """A backend of packed attention that reads the rows from the device alone, as those of GPUs do."""

    def unsupported_reason(self, kind):
        return "it has no softcap" if kind.options.softcap else None

    def call(self, kind):
        return DenseCall(kind.heads // kind.key_heads, kind.options.scale, kind.options.window)


def _sums(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums: float32, or that of the tensor if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class DenseCall(NamedTuple):
    groups: int
    scale: float
    window: int | None

    def describe(self, rows):
        visible = torch.zeros(rows.tokens, rows.tokens, dtype=torch.int32, device="cpu")
        for row in rows.checked:
            keys = torch.cat([torch.arange(x.start, x.start + x.length, device="cpu") for x in row.pieces])
            for i in range(row.own_length):
                seen = keys[: row.prefix_length + i + 1]
                visible[row.own + i, seen[-self.window :] if self.window else seen] = 1
        return Visible(visible, torch.zeros(10 * len(rows.checked), dtype=torch.int32, device="cpu"))

    def forward(self, query, key, value, sinks, layout):
        scores = (
            torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(self.groups, 1)).to(_sums(query)) * self.scale
        )
        scores = scores.masked_fill(layout.keys[: len(query)] == 0, -torch.inf)
        lse = (
            scores.logsumexp(-1) if sinks is None else torch.logaddexp(scores.logsumexp(-1), sinks[:, None].to(scores))
        )
        weights = (scores - lse[..., None]).exp().to(value.dtype)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(self.groups, 1)).contiguous(), lse

    def backward(self, grad, query, key, value, out, lse, layout):
        keys, values = (x.repeat_interleave(self.groups, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, keys).to(_sums(query)) * self.scale
        weights = (scores - lse[..., None]).exp().masked_fill(layout.keys[: len(query)] == 0, 0)
        slopes = torch.einsum("qhd,khd->hqk", grad, values).to(lse) - (grad * out).to(lse).sum(-1).t()[..., None]
        slopes = (weights * slopes * self.scale).to(query.dtype)
        gradients = (
            torch.einsum("hqk,qhd->khd", slopes, query),
            torch.einsum("hqk,qhd->khd", weights.to(grad.dtype), grad),
        )
        summed = (x.unflatten(1, (-1, self.groups)).sum(2) for x in gradients)
        return torch.einsum("hqk,khd->qhd", slopes, keys).contiguous(), *(x.contiguous() for x in summed)
