"""CUDA graphs of the backbone for packed calls.

A recording has a fixed number of tokens, one of few. Once batches that one number is the least for have been seen so
often that a recording is expected to pay (`pace`), the passes of the backbone over one are recorded (`recording`).
Later such batches replay them. The head, the loss, the trainer and the optimizer run as without.

A recording holds for one verdict about the model, and so for as long as its identity stays the same, and for the state
that identities leave out: addresses of tensors, which of them are trained, autocast. It is used only if a batch with
other rows has given what the layers give, and in less time.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...accuracy import run_bound, training_unit
from ...logs import logger, report
from ...reasons import Reason
from ..calls import calls, due
from ..examine.comparable import forked_random_state, without_trace
from ..examine.snapshot import restored
from . import pace
from .captures import has_room, note_recordings
from .pace import Pace, Trial
from .recordable import have_hooks, offloading_reason, unsupported_reason
from .recording import Inputs, Recording, Unsupported, padded, run_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_RECORDINGS = 24
"""Number of recordings of a model. The one that was not replayed for the longest time goes first."""

BOUND = 1 / 32
"""The largest distance of a replay from the layers, relative to the norm of each token's state, and of the gradient of
all parameters. Other algorithms for matrix products differ by less, and a token that sees other tokens by more.
"""

DEVICE = "cuda"
"""The type of devices that have graphs."""


class _Basis:
    """What recordings of a model are based on, for one verdict about it."""

    def __init__(self, model: PreTrainedModel, backbone: PreTrainedModel, verdict: Any) -> None:
        self.verdict, self.backbone, modules = verdict, backbone, [*backbone.modules()]
        self.tensors: list[Tensor] = [*backbone.parameters(), *backbone.buffers()]
        self.reason = unsupported_reason(model, modules, self.tensors)
        self.replays: Counter[bool] = Counter()  # with gradients and without

    def trained(self) -> list[Tensor]:
        return [x for x in self.tensors if x.requires_grad] if torch.is_grad_enabled() else []

    def state(self, trained: list[Tensor]) -> tuple:
        """What the verdict does not tell, when these parameters are trained."""
        device = self.tensors[0].device.type
        return (
            [*map(Tensor.data_ptr, self.tensors)],
            [*map(id, trained)],
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )


class Graphs:
    """The CUDA graphs of one model.

    Args:
        integration: name under which calls are counted.
        role: of the model, for log lines.
    """

    def __init__(self, integration: str, role: str) -> None:
        self._integration, self._kind = integration, ""
        self._name = f"{integration} ({role})"
        self._reason: Reason | None = None
        self._said: set[Reason] = set()
        self._bases: dict[int, _Basis] = {}
        self._recordings: dict[tuple, Recording] = {}  # the one that was used last at the end
        self._latest: dict[tuple, Inputs] = {}  # the latest batch of each number of tokens that no recording has taken
        self._seen: Counter[tuple] = Counter()
        self._rooms: Counter[tuple] = Counter()
        self._made: set[tuple] = set()
        self._replaced = self._replays = 0
        self._is_full = False

    def begin(
        self, model: PreTrainedModel, backbone: PreTrainedModel, verdict: object, kind: str, obstacle: str | None
    ) -> bool:
        """Whether a call of the model may replay a graph. If not, the reason is logged once.

        Args:
            model: the model.
            backbone: of the model.
            verdict: the same object for as long as the model is what it was.
            kind: of the call (see `calls.calls`).
            obstacle: what the model does in the call that cannot be recorded, or None.
        """
        basis = self._bases.get(id(verdict))
        if basis is None:
            if len(self._bases) >= MAX_RECORDINGS:
                self.forget()
            basis = self._bases[id(verdict)] = _Basis(model, backbone, verdict)
        if basis.tensors[0].device.type != DEVICE:
            return False
        reason = self._reason or basis.reason or offloading_reason()
        if reason is None and obstacle is not None:
            reason = Reason("graphs-model", model=type(model).__name__, kind=obstacle)
        if reason is not None:
            self._say(reason)
        self._kind = kind
        return reason is None

    def states(self, verdict: object, inputs: Inputs, index: Tensor, pace: Pace) -> Tensor | None:
        """The states [N, D] of some tokens of a batch. None if the layers are to run.

        Args:
            verdict: as `begin` was given it.
            inputs: of the backbone.
            index: int64 [N], the tokens.
            pace: of such calls.
        """
        if pace.is_slower():
            self._stop(Reason("graphs-slower"))
            return None
        basis = self._bases[id(verdict)]
        if pace.is_busy is None and pace.between < torch.inf:
            pace.is_busy = is_device_busy(basis.backbone, inputs)
            pace.interrupt()
        recording = self._recording(basis, inputs, basis.trained(), pace)
        if recording is None or (basis.verdict.is_audited and not self._agrees(basis, recording, inputs, pace)):
            return None
        self._replays += 1
        calls[self._integration, self._kind, "replayed"] += 1
        return recording.states(inputs, index)

    def begin_training(self) -> None:
        """Drops what was counted and recorded before, which may leave the training less memory than it needs."""
        self._seen.clear()
        self.forget()

    def forward(self, backbone: nn.Module, inputs: Inputs) -> Callable[[], object] | None:
        """A replay of a forward without gradients, of which nothing is kept. None if calls replay nothing, or if it
        cannot be recorded.
        """
        if not self._recordings:
            return None
        try:
            size = rounded_up(inputs["input_ids"].shape[1])
            recording = Recording(backbone, padded(inputs, size), 1, [], None)
        except Exception:  # as of `_new`, which says why
            return None
        return lambda: recording.run_forward(None)

    def forget(self) -> None:
        """Drops all recordings."""
        for known in (self._bases, self._recordings, self._latest):
            known.clear()

    def release(self) -> bool:
        """Drops all recordings for good, and gives back their memory. Returns whether there were any."""
        if not self._recordings:
            return False
        for recording in self._recordings.values():
            recording.memory.owner = None
        self._stop(Reason("graphs-memory-left"))
        gc.collect()
        torch.cuda.empty_cache()
        return True

    def _recording(self, basis: _Basis, inputs: Inputs, trained: list[Tensor], pace: Pace) -> Recording | None:
        """A recording that has taken a batch, if there is one, or if making one pays."""
        size = rounded_up(inputs["input_ids"].shape[1])
        key = id(basis.verdict), torch.is_grad_enabled(), size
        self._seen[key[1:]] += 1
        recording = self._recordings.pop(key, None)
        if recording is not None and (recording.state != basis.state(trained) or not recording.fill(inputs)):
            self._rooms[key] += 1
            self._latest[key], recording = inputs, None
        elif recording is None:
            latest, self._latest[key] = self._latest.get(key), inputs
            if latest is None or self._is_full or not pace.is_recorded(size, self._seen[key[1:]]):
                return None
            recording = self._new(basis, latest, inputs, 2 + self._rooms[key], pace)
            self._replaced += key in self._made
            self._made.add(key)
            if self._replaced >= MAX_RECORDINGS and 2 * self._replaced > self._replays:
                self._stop(Reason("graphs-replaced", replaced=self._replaced, replays=self._replays))
                return None
            if recording is not None:
                note_recordings(inputs["input_ids"].device, len(self._recordings) + 1)
        if recording is not None:
            self._recordings[key] = recording
            for oldest in [*self._recordings][:-MAX_RECORDINGS]:
                del self._recordings[oldest]
        return recording

    def _new(self, basis: _Basis, first: Inputs, inputs: Inputs, room: int, pace: Pace) -> Recording | None:
        """A new recording by one batch, which has taken another one. None if it does not pay, if the
        batch needs more room, or, with a logged reason, if the model cannot be recorded.
        """
        backbone, trained, is_differentiated = basis.backbone, basis.trained(), torch.is_grad_enabled()
        size = rounded_up(inputs["input_ids"].shape[1])
        try:
            if not has_room(inputs["input_ids"].device):
                self._is_full = True
                self._say(Reason("graphs-memory", tokens=size))
                return None
            if have_hooks(basis.tensors):  # since the verdict
                raise Unsupported(Reason("graphs-hooks", module=type(backbone).__name__))
            with pace.making(), torch.inference_mode(False), torch.set_grad_enabled(is_differentiated):
                recording = Recording(backbone, padded(first, size), room, trained, basis.state(trained))
                if not recording.fill(inputs):
                    return None
                distance = recording.distance = recording.distance_of(inputs)
                if distance <= BOUND:
                    trial = None if pace.is_sure(size) else trial_of(recording, inputs)
                    is_kept, found = True, "as those of other sizes"
                    if trial is not None:
                        pace.trials.append(trial)
                        is_kept = pace.is_kept(trial)
                        found = f"the layers take {1e3 * trial.before:.1f} ms, and a replay {1e3 * trial.after:.1f} ms"
                    result = "recorded" if is_kept else "did not record"
                    logger.info("fastdpo: %s: %s batches of up to %d tokens: %s", self._name, result, size, found)
                    return recording if is_kept else None
            reason = Reason("graphs-differ", distance=f"{distance:.1e}")
        except Unsupported as error:
            reason = error.reason
        except Exception as error:  # code of the model may do what cannot be recorded
            while error.__context__ is not None:  # the end of a capture raises another one
                error = error.__context__
            message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            reason = Reason("graphs-error", error=message)
            if isinstance(error, torch.OutOfMemoryError):
                reason = Reason("graphs-memory", tokens=size)
        self._stop(reason)
        return None

    def _agrees(self, basis: _Basis, recording: Recording, inputs: Inputs, pace: Pace) -> bool:
        """Compares replays 1, 2, 4, 8, ... with the layers, which may have come to read other values. If one differs,
        the layers run from now on.
        """
        gradients = bool(recording.segments)
        replay = due(basis.replays, gradients)
        if not replay:
            return True
        try:
            with (
                without_trace(basis.backbone),
                restored(basis.backbone),
                torch.inference_mode(False),
                torch.set_grad_enabled(gradients),
            ):
                distance = recording.distance_of(inputs)
        except torch.OutOfMemoryError:
            return True
        finally:
            pace.interrupt()
        if distance <= run_bound(recording.distance, training_unit(basis.backbone)):
            return True
        reason = Reason("graphs-changed", replay=replay, distance=f"{distance:.1e}")
        self._stop(reason)
        report(f"{self._name}: {reason.named}")
        return False

    def _stop(self, reason: Reason) -> None:
        """Has the layers run from now on."""
        self._reason = reason
        self.forget()
        self._say(reason)

    def _say(self, reason: Reason) -> None:
        """Logs why calls do not run graphs, which are not asked for by themselves."""
        if reason not in self._said:
            self._said.add(reason)
            logger.info("fastdpo: %s: no CUDA graphs, %s", self._name, reason.named)


def is_device_busy(backbone: nn.Module, inputs: Inputs) -> bool:
    """Whether the device is, in a forward of the layers, so that a replay would save nothing. So if it has no room for
    one, since no training ends by what is only measured.
    """
    device = inputs["input_ids"].device
    try:
        with torch.inference_mode(False), torch.no_grad(), forked_random_state():
            return pace.is_busy(lambda: run_layers(backbone, inputs), device)
    except Exception:
        return True


def trial_of(recording: Recording, inputs: Inputs) -> Trial:
    """What the layers and a replay take for the same batch, each the faster one of two times."""

    def by_layers() -> None:
        hidden = run_layers(recording.backbone, inputs)
        if recording.used:
            torch.autograd.grad(hidden, recording.used, hidden.detach())

    def by_replay() -> None:
        recording.fill(inputs)
        states = recording.states(inputs, index)
        if recording.used:
            torch.autograd.grad(states, recording.used, states.detach())

    device = inputs["input_ids"].device
    index = torch.arange(inputs["input_ids"].shape[1], device=device)
    times = [(pace.seconds(by_layers, device), pace.seconds(by_replay, device)) for _ in range(2)]
    return Trial(inputs["input_ids"].shape[1], *map(min, zip(*times, strict=True)))


def rounded_up(tokens: int) -> int:
    """The next one of eight numbers of tokens for each power of 2, in steps of 16 or more."""
    step = max(16, 2 ** ((tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step
