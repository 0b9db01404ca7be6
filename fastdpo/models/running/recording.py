"""A recording: the passes of a backbone over packed batches of up to one number of tokens, as CUDA graphs.

Forward and backward are two graphs behind one node of autograd. Under DDP, the backward is several (`cuts`), each
behind a node of its own. Before a replay, the host writes ids, positions and
rows of a batch into the tensors of the recording, whose last tokens are padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...ops.attention import routes
from ...ops.attention.device_layout import Rows, rows_of
from ...reasons import Reason
from ..examine.comparable import with_values
from .captures import memory_of, record
from .cuts import Cut, first_layers, segmented
from .recordable import CHECKPOINTING

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
    of_modules = ((module, *x) for module in backbone.modules() for x in module._parameters.items())
    with with_values([(module, name, of_own[id(x)]) for module, name, x in of_modules if id(x) in of_own]):
        yield [*of_own.values()]


class Segment(NamedTuple):
    """Layers whose backward is one graph.

    Attributes:
        used: the parameters that get gradients.
        upstream: [1, T, D], the gradient of the states at its end, which the backward reads.
        run: replays the backward.
        gradients: which it writes: of the states at its start, unless it is the first segment, and of the parameters.
    """

    used: list[Tensor]
    upstream: Tensor
    run: Callable[[], None]
    gradients: tuple[Tensor, ...]


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
        memory: for what the passes compute.
        hidden: [1, T, D], the states of the tokens of the latest replay.
        segments: of the backward, in the order of the forward. There is one, or several under DDP.
        used: the trained parameters that get gradients.
        distance: from the layers, when it was made (see `distance_of`).

    Raises:
        Unsupported: attention runs without a backend.
    """

    distance = 0.0

    def __init__(self, backbone: nn.Module, inputs: Inputs, room: int, trained: list[Tensor], state: object) -> None:
        self.backbone, self.state = backbone, state
        self.memory = memory_of(inputs["input_ids"].device, bool(trained))
        self._inputs, self._rows = inputs, rows_in(inputs)
        self._rows.room = room
        forward = functools.partial(run_layers, backbone, self._inputs)
        run, places = segmented(forward, first_layers(backbone), trained)
        if any(x.backend is None for x in self._rows.prepared.values()):
            raise Unsupported(Reason("graphs-attention"))
        self.segments: list[Segment] = []
        self._record(run, places, trained)
        used = {id(x) for segment in self.segments for x in segment.used}
        self.used = [x for x in trained if id(x) in used]

    def _record(self, run: Callable[[], Cut], places: list[list[int]], trained: list[Tensor]) -> None:
        with aliases_of(self.backbone, trained) as aliases:
            self._forward, (ends, starts) = record(run, self.memory)
            self.hidden = ends[-1].detach()  # a node of autograd would keep the activations
            leaves, upstream = [*starts, *aliases], torch.zeros_like(self.hidden)
            for own in filter(None, reversed(places)):
                backward = functools.partial(torch.autograd.grad, ends.pop(), [leaves[i] for i in own], upstream)
                replay, gradients = record(backward, self.memory)
                used = [trained[i - len(starts)] for i in own if i >= len(starts)]
                self.segments.insert(0, Segment(used, upstream, replay, gradients))
                upstream = gradients[0]

    def fill(self, inputs: Inputs) -> bool:
        """Takes another batch. Returns False, and changes nothing, if its layouts do not fit."""
        if not routes.refill(self._rows, rows_in(inputs).padded(self._rows.tokens)):
            return False
        for name in TOKENS:  # behind them, those of earlier batches are as good as any
            self._inputs[name][:, : inputs[name].shape[1]].copy_(inputs[name])
        return True

    def states(self, inputs: Inputs, index: Tensor) -> Tensor:
        """The states [N, D] of some tokens of a batch that it has taken, as a function of the used parameters.

        Args:
            inputs: of the batch.
            index: int64 [N], the tokens.
        """
        if not self.segments:
            return self.run_forward(None).index_select(0, index)
        replay, start = Replay(self, inputs), None
        for place, segment in enumerate(self.segments[:-1]):
            start = _StatesBetween.apply(replay, place, start, *segment.used)
        return cast(Tensor, _States.apply(replay, index, start, *self.used))

    def run_forward(self, owner: object) -> Tensor:
        """[T, D], the states of the batch. Activations stay those of this replay for as long as it is the owner."""
        self.memory.owner = owner
        self._forward()
        return self.hidden[0]

    def distance_of(self, inputs: Inputs) -> float:
        """The largest relative distance of a replay from the layers for a batch that it has taken: of the states of
        each token, and, if there is a backward, of the gradients of all parameters.

        Raises:
            Unsupported: the layers differentiate by tensors that are not among the parameters.
        """
        hidden = run_layers(self.backbone, inputs)[0]  # [n, D]
        if not {*map(id, leaves_of(hidden))} <= {*map(id, self.backbone.parameters())}:
            raise Unsupported(Reason("graphs-tensors"))
        states = self.states(inputs, torch.arange(len(hidden), device=hidden.device))
        with torch.no_grad():
            apart, whole = _norms(states - hidden), _norms(hidden)  # [n]
            if self.used:
                upstream = hidden.roll(1, -1)  # the gradient of lengths would vanish behind a norm
                pairs = zip(*(torch.autograd.grad(x, self.used, upstream) for x in (states, hidden)), strict=True)
                norms = [(_norms((x - y).flatten()), _norms(y.flatten())) for x, y in pairs]
                of_gradients = (_norms(torch.stack(x)) for x in zip(*norms, strict=True))
                apart, whole = (torch.cat([x, y[None]]) for x, y in zip((apart, whole), of_gradients, strict=True))
            return float((apart / whole.clamp(min=torch.finfo(whole.dtype).tiny)).max())


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


@dataclass(eq=False)
class Replay:
    """One batch that a recording replays: its forward, and then the backward of each segment, the last one first.

    Attributes:
        recording, inputs: as given.
        mark: owns the memory. This object would keep the model alive after a forward without a backward.
    """

    recording: Recording
    inputs: Inputs
    mark: object = field(default_factory=object)

    def forward(self) -> Tensor:
        """[T, D], the states of the batch."""
        return self.recording.run_forward((self.mark, len(self.recording.segments) - 1))

    def backward(self, place: int, write: Callable[[Tensor], object]) -> list[Tensor | None]:
        """New tensors with the gradients that a segment computes: of the states at its start, which is None for the
        first segment, and of its parameters.

        Args:
            place: of the segment.
            write: writes the gradient of the states at its end into a tensor [1, T, D].
        """
        recording, segment = self.recording, self.recording.segments[place]
        if recording.memory.owner != (self.mark, place):  # another replay, or an earlier backward
            recording.fill(self.inputs)
            self.forward()
        write(segment.upstream)
        segment.run()
        recording.memory.owner = (self.mark, place - 1) if place else None  # there is nothing left of this segment
        start, own = segment.gradients[0].clone() if place else None, segment.gradients[bool(place) :]
        return [start, *(torch._foreach_mul(own, 1.0) if own else ())]  # pyright: ignore[reportPrivateImportUsage]


class _StatesBetween(torch.autograd.Function):
    """The states between two segments, as a function of those at the start of the first one and of its parameters.
    Nothing reads their values.
    """

    @staticmethod
    def forward(ctx, replay, place, start, *used):
        ctx.replay, ctx.place = replay, place
        ctx.set_materialize_grads(False)
        return replay.recording.segments[place].upstream.detach()  # of their shape

    @staticmethod
    def backward(ctx, grad):
        if grad is None:  # differentiated again, by `_States`
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *ctx.replay.backward(ctx.place, lambda upstream: upstream.copy_(grad))


class _States(torch.autograd.Function):
    """The backbone, replayed: the states [N, D] of some tokens, as a function of those where the last segment begins
    and of all parameters.
    """

    @staticmethod
    def forward(ctx, replay, index, start, *used):
        states = replay.forward()
        device = states.device.type
        ctx.replay = replay
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(index, *used)  # whose versions are compared before the backward
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        recording, (index, *used) = ctx.replay.recording, ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            with torch.autocast(*ctx.autocast):
                hidden = run_layers(recording.backbone, ctx.replay.inputs)[0].index_select(0, index)
            return None, None, None, *torch.autograd.grad(hidden, used, grad, create_graph=True)
        place = len(recording.segments) - 1
        start, *own = ctx.replay.backward(place, lambda upstream: upstream.zero_()[0].index_add_(0, index, grad))
        gradients = dict(zip(map(id, recording.segments[place].used), own, strict=True))
        return None, None, start, *(gradients.get(id(x)) for x in recording.used)


def run_layers(backbone: nn.Module, inputs: Inputs) -> Tensor:
    """The hidden states [1, T, D] of a batch, by what can be recorded: autocast keeps no casts of weights, and
    checkpointing saves no states of generators.
    """
    device = inputs["input_ids"].device.type
    autocast = torch.autocast(
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache_enabled=False
    )
    options = dict(use_reentrant=False, preserve_rng_state=False)
    own = ((x, vars(x)[CHECKPOINTING]) for x in backbone.modules() if _is_checkpointed(x))
    with with_values([(x, CHECKPOINTING, functools.partial(function, **options)) for x, function in own]), autocast:
        return cast(Tensor, backbone(**inputs).last_hidden_state)


def padded(inputs: Inputs, tokens: int) -> Inputs:
    """A copy of a batch with so many tokens. The further ones are in rows of their own, and are its first ones."""
    rows = rows_in(inputs)
    mask = torch.frombuffer(bytearray(rows.padded(tokens).given), dtype=torch.int32).view(1, 1, -1, 4)
    index = torch.arange(tokens, device=inputs["input_ids"].device) % rows.tokens
    return {**inputs, **{name: inputs[name].index_select(1, index) for name in TOKENS}, "attention_mask": mask}


def leaves_of(x: Tensor) -> Iterator[Tensor]:
    """The tensors that autograd accumulates gradients in, in a backward pass from this one."""
    seen: set[Any] = {x.grad_fn}
    nodes = seen - {None}
    while nodes:
        yield from (node.variable for node in nodes if hasattr(node, "variable"))
        nodes = {node for each in nodes for node, _ in each.next_functions} - seen - {None}
        seen |= nodes


def rows_in(inputs: Inputs) -> Rows:
    return rows_of(inputs["attention_mask"], inputs["input_ids"].shape[1])


def _is_checkpointed(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) and CHECKPOINTING in vars(module)
