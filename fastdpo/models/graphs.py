"""CUDA graphs of the backbone for packed calls.

A recording has a fixed number of tokens, one of few. Once batches that one number is the least for have been seen so
often that a recording is expected to pay (`pace`), the passes of the backbone over one are recorded. Later such batches
replay them: the host writes ids, positions and rows into the tensors of the recording, whose last tokens are padding,
and launches it as a whole. Forward and backward are two graphs behind one node of autograd. The head, the loss, the
trainer and the optimizer run as without.

A recording holds for one verdict about the model, and so for as long as its identity stays the same, and for the state
that identities leave out: addresses of tensors, which of them are trained, autocast. It is used only if a batch with
other rows has given what the layers give, and in less time.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..logs import logger
from ..ops.attention import routes
from ..ops.attention.device_layout import Rows, rows_of
from ..reasons import Reason
from . import pace
from .calls import calls
from .captures import has_room, memory_of, record
from .pace import Pace, Trial
from .recordable import CHECKPOINTING, have_hooks, offloading_reason, unsupported_reason

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

TOKENS = "input_ids", "position_ids"
"""The arguments of the backbone that hold a value for each token."""

Inputs = dict[str, Any]
"""The arguments of the backbone (see `attention.inputs_of`)."""


class Unsupported(Exception):
    """A batch cannot be recorded, for a reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def aliases_of(backbone: nn.Module, trained: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters with the same memory take the place of trained ones in the block.

    Autograd keeps the stream of a parameter's first use for as long as anything refers to its node for accumulation,
    as another live graph of autograd does, and DDP. A recording must not wait for another stream.
    """
    of_own = {id(x): nn.Parameter(x.detach()) for x in trained}
    replaced = [
        (module._parameters, name, x)
        for module in backbone.modules()
        for name, x in module._parameters.items()
        if id(x) in of_own
    ]
    try:
        for parameters, name, x in replaced:
            parameters[name] = of_own[id(x)]
        yield [*of_own.values()]
    finally:
        for parameters, name, x in replaced:
            parameters[name] = x


class Recording:
    """The passes of a backbone over batches of up to one number of tokens, T.

    Args:
        backbone: of the model.
        inputs: of a batch of T tokens (see `padded`), which is run by the layers first.
        room: that its layouts have for other batches (see `Rows`).
        trained: the parameters that may get gradients. If there are none, there is no backward.
        state: of the model, as `_Basis.state` returns it.

    Attributes:
        backbone, state: as given.
        used: the trained parameters that get gradients.
        memory: for what the passes compute.
        hidden: [1, T, D], the states of the tokens of the latest replay.
        upstream: [1, T, D], their gradient, which the backward reads.
        gradients: of the used parameters, which the backward writes.

    Raises:
        Unsupported: attention runs without a backend.
    """

    def __init__(self, backbone: nn.Module, inputs: Inputs, room: int, trained: list[Tensor], state: object) -> None:
        self.backbone, self.state = backbone, state
        self.memory = memory_of(inputs["input_ids"].device, bool(trained))
        self._inputs, self._rows = inputs, rows_in(inputs)
        self._rows.room = room
        run = functools.partial(run_layers, backbone, self._inputs)
        self.used, self.upstream = _used(run, trained)
        if any(x.route.backend is None for x in self._rows.prepared.values()):
            raise Unsupported(Reason("graphs-attention"))
        with aliases_of(backbone, self.used) as used:
            self._record(run, used)

    def _record(self, forward: Callable[[], Tensor], used: list[Tensor]) -> None:
        recorded: list[Tensor] = []
        self._forward = record(lambda: recorded.append(forward()), self.memory)
        hidden = recorded.pop()
        if used:
            self._backward = record(
                lambda: recorded.extend(torch.autograd.grad(hidden, used, self.upstream)), self.memory
            )
        self.hidden, self.gradients = hidden.detach(), recorded  # a node of autograd would keep the activations

    def fill(self, inputs: Inputs) -> bool:
        """Takes another batch. Returns False, and changes nothing, if its layouts do not fit."""
        if not routes.refill(self._rows, rows_in(inputs).padded(self._rows.tokens)):
            return False
        for name in TOKENS:  # behind them, those of earlier batches are as good as any
            self._inputs[name][:, : inputs[name].shape[1]].copy_(inputs[name])
        return True

    def run_forward(self, owner: object) -> Tensor:
        """[T, D], the states of the batch. Activations stay those of this replay for as long as it is the owner."""
        self.memory.owner = owner
        self._forward()
        return self.hidden[0]

    def run_backward(self) -> list[Tensor]:
        """New tensors with the gradients of the used parameters."""
        self._backward()
        self.memory.owner = None  # the backward has written where activations were
        return [*torch._foreach_mul(self.gradients, 1.0)]  # pyright: ignore[reportPrivateImportUsage]

    def distance_of(self, hidden: Tensor) -> float:
        """The largest relative distance of a replay from the states of the layers [1, n, D] for the same batch, over
        tokens, and from the gradients of all parameters, if there is a backward.
        """
        with torch.no_grad():
            states = self.run_forward(None)[: hidden.shape[1]]
            apart, whole = _norms(states - hidden[0]), _norms(hidden[0])  # [n]
            if self.used:
                upstream = hidden.roll(1, -1)  # the gradient of lengths would vanish behind a norm
                self.upstream.zero_()[:, : hidden.shape[1]].copy_(upstream)
                expected = torch.autograd.grad(hidden, self.used, upstream)
                pairs = zip(self.run_backward(), expected, strict=True)
                norms = [(_norms((x - y).flatten()), _norms(y.flatten())) for x, y in pairs]
                of_gradients = (_norms(torch.stack(x)) for x in zip(*norms, strict=True))
                apart, whole = (torch.cat([x, y[None]]) for x, y in zip((apart, whole), of_gradients, strict=True))
            return float((apart / whole.clamp(min=torch.finfo(whole.dtype).tiny)).max())


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def _used(run: Callable[[], Tensor], trained: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The parameters that get gradients from the states that a function returns, and zeros of the shape of these."""
    hidden = run()
    upstream = torch.zeros_like(hidden)
    gradients = torch.autograd.grad(hidden, trained, upstream, allow_unused=True) if trained else ()
    return [x for x, gradient in zip(trained, gradients, strict=True) if gradient is not None], upstream


class _Replay(torch.autograd.Function):
    """The backbone, replayed: the states [N, D] of some tokens, as a function of the parameters."""

    @staticmethod
    def forward(ctx, recording, inputs, index, *used):
        device = recording.hidden.device.type
        ctx.recording, ctx.inputs = recording, inputs
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(index, *used)  # whose versions are compared before the backward
        return recording.run_forward(ctx).index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        recording, (index, *used) = ctx.recording, ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            with torch.autocast(*ctx.autocast):
                hidden = run_layers(recording.backbone, ctx.inputs)[0].index_select(0, index)
            return None, None, None, *torch.autograd.grad(hidden, used, grad, create_graph=True)
        if recording.memory.owner is not ctx:  # another replay, or an earlier backward
            recording.fill(ctx.inputs)
            recording.run_forward(ctx)
        recording.upstream.zero_()[0].index_add_(0, index, grad)
        return None, None, None, *recording.run_backward()


class _Basis:
    """What recordings of a model are based on, for one verdict about it."""

    def __init__(self, model: PreTrainedModel, backbone: nn.Module, verdict: object) -> None:
        self.verdict, self.backbone, modules = verdict, backbone, [*backbone.modules()]
        self.tensors: list[Tensor] = [*backbone.parameters(), *backbone.buffers()]
        self.reason = unsupported_reason(model, modules, self.tensors)

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
        self, model: PreTrainedModel, backbone: nn.Module, verdict: object, kind: str, obstacle: str | None
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
        recording = self._recording(basis, inputs, basis.trained(), pace)
        if recording is None:
            return None
        self._replays += 1
        calls[self._integration, self._kind, "replayed"] += 1
        if not recording.used:
            return recording.run_forward(None).index_select(0, index)
        return cast(Tensor, _Replay.apply(recording, inputs, index, *recording.used))

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
        key = id(basis.verdict), bool(trained), size
        self._seen[key[1:]] += 1
        recording = self._recordings.pop(key, None)
        if recording is not None and (recording.state != basis.state(trained) or not recording.fill(inputs)):
            self._rooms[key] += 1
            self._latest[key], recording = inputs, None
        elif recording is None:
            latest, self._latest[key] = self._latest.get(key), inputs
            if latest is None or self._is_full or not pace.is_recorded(size, self._seen[key[1:]]):
                return None
            if not has_room(inputs["input_ids"].device):
                self._is_full = True
                self._say(Reason("graphs-memory", tokens=size))
                return None
            recording = self._new(basis, latest, inputs, size, 2 + self._rooms[key], trained, pace)
            self._replaced += key in self._made
            self._made.add(key)
            if self._replaced >= MAX_RECORDINGS and 2 * self._replaced > self._replays:
                self._stop(Reason("graphs-replaced", replaced=self._replaced, replays=self._replays))
                return None
        if recording is not None:
            self._recordings[key] = recording
            for oldest in [*self._recordings][:-MAX_RECORDINGS]:
                del self._recordings[oldest]
        return recording

    def _new(
        self,
        basis: _Basis,
        first: Inputs,
        inputs: Inputs,
        size: int,
        room: int,
        trained: list[Tensor],
        pace: Pace,
    ) -> Recording | None:
        """A new recording of so many tokens, by one batch, which has taken another one. None if it does not pay, if the
        batch needs more room, or, with a logged reason, if the model cannot be recorded.
        """
        backbone = basis.backbone
        try:
            if have_hooks(basis.tensors):  # since the verdict
                raise Unsupported(Reason("graphs-hooks", module=type(backbone).__name__))
            with pace.making() as make, torch.inference_mode(False), torch.set_grad_enabled(bool(trained)):
                recording = Recording(backbone, padded(first, size), room, trained, basis.state(trained))
                if not recording.fill(inputs):
                    return None
                distance = recording.distance_of(run_layers(backbone, inputs))
                if distance <= BOUND:
                    trial = _trial(recording, inputs)
                    is_kept = make(trial)
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


def _trial(recording: Recording, inputs: Inputs) -> Trial:
    """What the layers and a replay take for the same batch, each the faster one of two times."""

    def by_layers() -> None:
        hidden = run_layers(recording.backbone, inputs)
        if recording.used:
            torch.autograd.grad(hidden, recording.used, hidden.detach())

    def by_replay() -> None:
        recording.fill(inputs)
        recording.run_forward(None)
        if recording.used:
            recording.run_backward()

    device = inputs["input_ids"].device
    times = [(pace.seconds(by_layers, device), pace.seconds(by_replay, device)) for _ in range(2)]
    return Trial(inputs["input_ids"].shape[1], *map(min, zip(*times, strict=True)))


def run_layers(backbone: nn.Module, inputs: Inputs) -> Tensor:
    """The hidden states [1, T, D] of a batch, by what can be recorded: autocast keeps no casts of weights, and
    checkpointing saves no states of generators.
    """
    device = inputs["input_ids"].device.type
    autocast = torch.autocast(
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache_enabled=False
    )
    checkpointed = _checkpointed(backbone)
    own = [vars(module)[CHECKPOINTING] for module in checkpointed]
    for module in checkpointed:
        options = dict(use_reentrant=False, preserve_rng_state=False)
        vars(module)[CHECKPOINTING] = functools.partial(vars(module)[CHECKPOINTING], **options)
    try:
        with autocast:
            return cast(Tensor, backbone(**inputs).last_hidden_state)
    finally:
        for module, function in zip(checkpointed, own, strict=True):
            vars(module)[CHECKPOINTING] = function


def padded(inputs: Inputs, tokens: int) -> Inputs:
    """A copy of a batch with so many tokens. The further ones are in rows of their own, and are its first ones."""
    rows = rows_in(inputs)
    mask = torch.frombuffer(bytearray(rows.padded(tokens).given), dtype=torch.int32).view(1, 1, -1, 4)
    index = torch.arange(tokens, device=inputs["input_ids"].device) % rows.tokens
    return {**inputs, **{name: inputs[name].index_select(1, index) for name in TOKENS}, "attention_mask": mask}


def rounded_up(tokens: int) -> int:
    """The next one of eight numbers of tokens for each power of 2, in steps of 16 or more."""
    step = max(16, 2 ** ((tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def rows_in(inputs: Inputs) -> Rows:
    return rows_of(inputs["attention_mask"], inputs["input_ids"].shape[1])


def _checkpointed(backbone: nn.Module) -> list[nn.Module]:
    return [x for x in backbone.modules() if getattr(x, "gradient_checkpointing", False) and CHECKPOINTING in vars(x)]
