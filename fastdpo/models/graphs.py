"""CUDA graphs of the backbone for packed calls.

A recording has a fixed number of tokens, one of few. When a batch that one number is the least for is seen for the
second time, the passes of the backbone over it are recorded. Later such batches replay them: the host writes ids,
positions and rows into the tensors of the recording, whose last tokens are padding, and launches it as a whole.
Forward and backward are two graphs behind one node of autograd. The head, the loss, the trainer and the optimizer run
as without.

A recording holds for one verdict about the model, and so for as long as its identity stays the same, and for the state
that identities leave out: addresses of tensors, which of them are trained, autocast. It is used only if a batch with
other rows has given what the layers give.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..logs import logger, report, warn
from ..ops.attention import routes
from ..ops.attention.device_layout import Rows, rows_of
from ..reasons import Reason
from . import facts
from .calls import calls
from .captures import memory_of, record
from .compiled import trainer_compiles
from .mixers import finding
from .sharding import is_sharded
from .structure import additions_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_RECORDINGS = 24
"""Number of recordings of a model. The one that was not replayed for the longest time goes first."""

SETTLED = 20
"""Number of calls of a model after which it is reported that none of them was a replay."""

BOUND = 1 / 32
"""The largest distance of a replay from the layers, relative to the norm of each token's state, and of the gradient of
all parameters. Other algorithms for matrix products differ by less, and a token that sees other tokens by more.
"""

DEVICE = "cuda"
"""The type of devices that have graphs."""

CHECKPOINTING = "_gradient_checkpointing_func"
"""The attribute by which transformers gives a layer the function that checkpoints it."""

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
        self.reason = _unsupported_reason(model, modules, self.tensors)

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
        self._integration, self._role, self._kind = integration, role, ""
        self._name = f"{integration} ({role})"
        self._reason: Reason | None = None
        self._said: set[Reason] = set()
        self._bases: dict[int, _Basis] = {}
        self._recordings: dict[tuple, Recording] = {}  # the one that was used last at the end
        self._first: dict[tuple, Inputs] = {}  # batches of numbers of tokens that were seen once
        self._rooms: Counter[tuple] = Counter()
        self._calls = self._replays = 0

    def __reduce__(self) -> tuple:
        """A copy of a model has no recordings."""
        return Graphs, (self._integration, self._role)

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
        reason = self._reason or basis.reason or _offloading_reason()
        if reason is None and obstacle is not None:
            reason = Reason("graphs-model", model=type(model).__name__, kind=obstacle)
        if reason is not None:
            self._say(reason)
        self._kind = kind
        return reason is None

    def states(self, verdict: object, inputs: Inputs, index: Tensor) -> Tensor | None:
        """The states [N, D] of some tokens of a batch. None if the layers are to run.

        Args:
            verdict: as `begin` was given it.
            inputs: of the backbone.
            index: int64 [N], the tokens.
        """
        basis = self._bases[id(verdict)]
        trained, self._calls = basis.trained(), self._calls + 1
        recording = self._recording(basis, inputs, trained)
        if recording is None:
            if self._calls == SETTLED and not self._replays and self._reason is None:
                warn(f"{self._name}: no CUDA graph was replayed in {SETTLED} batches of {len(self._rooms)} kinds")
            return None
        self._replays += 1
        calls[self._integration, self._kind, "replayed"] += 1
        if not recording.used:
            return recording.run_forward(None).index_select(0, index)
        return cast(Tensor, _Replay.apply(recording, inputs, index, *recording.used))

    def forget(self) -> None:
        """Drops all recordings."""
        for known in (self._bases, self._recordings, self._first):
            known.clear()

    def _recording(self, basis: _Basis, inputs: Inputs, trained: list[Tensor]) -> Recording | None:
        """A recording that has taken a batch, if a batch with its number of tokens was seen before."""
        size = rounded_up(inputs["input_ids"].shape[1])
        key, state = (id(basis.verdict), bool(trained), size), basis.state(trained)
        recording = self._recordings.pop(key, None)
        if recording is None or recording.state != state or not recording.fill(inputs):
            first = self._first.get(key) if recording is None else None
            self._first[key] = inputs
            self._rooms[key] += 1
            is_new = first is not None
            recording = self._made(basis, first, inputs, size, self._rooms[key], trained, state) if is_new else None
        if recording is not None:
            self._recordings[key] = recording
            for oldest in [*self._recordings][:-MAX_RECORDINGS]:
                del self._recordings[oldest]
        return recording

    def _made(
        self, basis: _Basis, first: Inputs, inputs: Inputs, size: int, room: int, trained: list[Tensor], state: object
    ) -> Recording | None:
        """A new recording of a batch, after another one was tried, which it has taken. None, with a logged reason, if
        the model cannot be recorded; or if the batch needs more room.
        """
        backbone = basis.backbone
        try:
            if _have_hooks(basis.tensors):  # since the verdict
                raise Unsupported(Reason("graphs-hooks", module=type(backbone).__name__))
            with torch.inference_mode(False), torch.set_grad_enabled(bool(trained)):
                recording = Recording(backbone, padded(first, size), room, trained, state)
                if not recording.fill(inputs):
                    return None
                distance = recording.distance_of(run_layers(backbone, inputs))
            if distance <= BOUND:
                logger.info("fastdpo: %s: recorded batches of up to %d tokens", self._name, size)
                return recording
            self._reason = Reason("graphs-differ", distance=f"{distance:.1e}")
        except Unsupported as error:
            self._reason = error.reason
        except Exception as error:  # code of the model may do what cannot be recorded
            while error.__context__ is not None:  # the end of a capture raises another one
                error = error.__context__
            message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self._reason = Reason("graphs-error", error=message)
            if isinstance(error, torch.OutOfMemoryError):
                self._reason = Reason("graphs-memory", tokens=size)
        self.forget()
        self._say(self._reason)
        return None

    def _say(self, reason: Reason) -> None:
        """Logs why calls do not run graphs. In strict mode, raises `NotFused`."""
        if reason not in self._said:
            self._said.add(reason)
            report(f"{self._name}: no CUDA graphs, {reason.named}")


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


def _unsupported_reason(model: PreTrainedModel, modules: list[nn.Module], tensors: list[Tensor]) -> Reason | None:
    """Why a model cannot be recorded, as far as is known before."""
    device = tensors[0].device
    if device.type != DEVICE:
        return Reason("graphs-device", device=device)
    if trainer_compiles():
        return Reason("graphs-compiled")
    kinds = {
        "lies on several ranks or devices": is_sharded(model) or any(x.device != device for x in tensors),
        "mixes tokens outside of its attention": bool(finding.mixers_of(model)),
        "has rotary embeddings that depend on the width of a batch": facts.rope_limit(model) is not None,
    }
    name = type(model).__name__
    for kind, holds in kinds.items():
        if holds:
            return Reason("graphs-model", model=name, kind=kind)
    changed = next((x for x in modules if any(additions_to(x)) or _is_checkpointed_otherwise(x)), None)
    if changed is None and _have_hooks(tensors):
        changed = model
    return None if changed is None else Reason("graphs-hooks", module=type(changed).__name__)


def _have_hooks(tensors: list[Tensor]) -> bool:
    return any(x._backward_hooks or x._post_accumulate_grad_hooks for x in tensors)


def _checkpointed(backbone: nn.Module) -> list[nn.Module]:
    return [x for x in backbone.modules() if getattr(x, "gradient_checkpointing", False) and CHECKPOINTING in vars(x)]


def _is_checkpointed_otherwise(module: nn.Module) -> bool:
    function = vars(module).get(CHECKPOINTING, checkpoint)
    return getattr(function, "func", function) is not checkpoint


def _offloading_reason() -> Reason | None:
    """That code around the call replaces what autograd saves, as to move activations to the host."""
    try:
        with disable_saved_tensors_hooks("recorded"):
            return None
    except RuntimeError:
        return Reason("graphs-activations")
