"""A recording: the passes of a backbone over packed batches of up to one number of tokens, as CUDA graphs.

Forward and backward are two graphs behind one node of autograd. Before a replay, the host writes ids, positions and
rows of a batch into the tensors of the recording, whose last tokens are padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..ops.attention import routes
from ..ops.attention.device_layout import Rows, rows_of
from ..reasons import Reason
from .captures import memory_of, record
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

    def states(self, inputs: Inputs, index: Tensor) -> Tensor:
        """The states [N, D] of some tokens of a batch that it has taken, as a function of the used parameters.

        Args:
            inputs: of the batch.
            index: int64 [N], the tokens.
        """
        if not self.used:
            return self.run_forward(None).index_select(0, index)
        return cast(Tensor, _Replay.apply(self, inputs, index, *self.used))

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
        ctx.mark = object()  # the memory would keep `ctx`, and so the model, of a forward without a backward
        return recording.run_forward(ctx.mark).index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        recording, (index, *used) = ctx.recording, ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            with torch.autocast(*ctx.autocast):
                hidden = run_layers(recording.backbone, ctx.inputs)[0].index_select(0, index)
            return None, None, None, *torch.autograd.grad(hidden, used, grad, create_graph=True)
        if recording.memory.owner is not ctx.mark:  # another replay, or an earlier backward
            recording.fill(ctx.inputs)
            recording.run_forward(ctx.mark)
        recording.upstream.zero_()[0].index_add_(0, index, grad)
        return None, None, None, *recording.run_backward()


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


def rows_in(inputs: Inputs) -> Rows:
    return rows_of(inputs["attention_mask"], inputs["input_ids"].shape[1])


def _checkpointed(backbone: nn.Module) -> list[nn.Module]:
    return [x for x in backbone.modules() if getattr(x, "gradient_checkpointing", False) and CHECKPOINTING in vars(x)]
