"""Keeps the activations of checkpointed layers, in packed calls with gradients, where the memory of the device allows.

A layer that is kept has no second forward. Until its backward it holds what autograd saves of it, where a checkpointed
one holds its input alone. A call keeps as many of the last layers, whose backward comes first, as fit into

    the limit of the device - what is in use when the call begins - the most that a call has taken with all recomputed

A batch with more tokens than any before recomputes all layers, and shows what it takes. That is learned from the second
step on, since in the first one the optimizer has no states. Kept layers compute what recomputed ones do.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from ...logs import logger, warn
from ...ops import memory
from ...ops.memory import VARIABLE, Demand, MemoryReport, Size
from ...packing import is_layout
from ..examine.comparable import forked_random_state, with_values
from ..mixers import finding, known
from ..mixers.segments import segments_of
from ..parts import language_model
from ..ranks.sharding import is_sharded
from . import pace
from .recordable import CHECKPOINTING, offloading_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLAG = "gradient_checkpointing"
"""The attribute of a layer that transformers reads in each of its forwards."""

OPTIONS = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop"}
"""The options of torch's `checkpoint` with which a layer is recomputed as a whole."""

CHUNK = 64
"""The tokens that scans of transformers compute at once."""

ENGINES = "vllm", "sglang"
"""Packages of engines that generate, which count on memory of the device."""

TEXT = {"input_ids", "position_ids", "attention_mask", "use_cache"}
"""The arguments of a backbone that runs text alone (see `attention.inputs_of`)."""


class Room:
    """The bytes that a call may spend on activations: what is left of them by what calls take with all recomputed.

    Attributes:
        closed: the tokens from which calls spend nothing, since one has run out of memory.
        demand: what calls take, by the tokens of their batches, and by those of them that are scored, for which the
            head takes memory.
    """

    def __init__(self) -> None:
        self.closed, self.demand = torch.inf, Demand()
        self._begun: tuple[Size, MemoryReport] | None = None  # the latest call
        self._largest = (1, 1)  # the most tokens, and scored ones, of a call
        self._gradients = 0  # what was used when the latest call had ended, next to gradients

    def begin(self, size: Size, now: MemoryReport, step: int) -> float:
        """The bytes that a call may spend, given the report of its device and the number of optimizer steps before."""
        self._begun = (size, now) if step else None
        self._largest = max(size[0], self._largest[0]), max(size[1], self._largest[1])
        is_closed = not step or size[0] >= self.closed
        return 0.0 if is_closed else now.limit - max(now.used, self._gradients) - self.demand.of(size)

    def end(self, now: MemoryReport, kept: float) -> float:
        """Learns from the latest call, whose backward has ended, given the bytes that it has kept. Its peak is at most
        that of the device, which something else may have caused.

        Returns the bytes by which the call has raised the peak above what the largest one takes with all recomputed.
        """
        if self._begun is None:
            return 0.0
        size, before = self._begun
        taken, is_peak = now.peak - before.used, now.peak > before.peak
        self.demand.note(size, taken, taken - kept if is_peak else 0.0)
        self._gradients = now.used
        return max(taken - self.demand.of(self._largest), 0.0) if is_peak else 0.0


class Sizes:
    """The bytes that a kept layer of one kind holds, by the tokens of a batch and the chunks of its scans.

    Args:
        chunk: the tokens to whole multiples of which its scans pad rows, or 0.

    Attributes:
        known: of the smallest and of the largest batch.
    """

    def __init__(self, chunk: int = 0) -> None:
        self.chunk = chunk
        self.known: list[tuple[Size, float]] = []

    def expected(self, size: Size) -> float:
        """At most: they grow as a + b T, or as T^2 where attention saves its scores, and with the chunks."""
        if not self.known:
            return torch.inf
        ((least, few), low), ((most, many), high) = self.known
        tokens, chunks = size
        if tokens > most:
            return high * max((tokens / most) ** 2, chunks / many)
        part = (tokens - least) / (most - least) if tokens > least else 0.0
        return (low + (high - low) * part) * max(chunks / (few + (many - few) * part), 1.0)

    def is_known(self, tokens: int) -> bool:
        """Whether the batch lies between those."""
        return bool(self.known) and self.known[0][0][0] <= tokens <= self.known[-1][0][0]

    def note(self, size: Size, most: float) -> None:
        """Takes note of what was measured."""
        self.known = [min([*self.known, (size, most)]), max([*self.known, (size, most)])]


Layers = list[tuple[nn.Module, Sizes]]
"""Layers in the order of the forward, each with what is known of its kind."""


class KeptActivations:
    """Decides in the calls of one model which layers are kept.

    Args:
        name: of the model in log lines.

    Attributes:
        kept: the layers that the latest call has kept.
        bytes: that they were expected to hold.
    """

    def __init__(self, name: str) -> None:
        self._name, self._kinds, self._has_said = name, dict[tuple, Sizes](), False
        self._found: tuple[object, Layers, bool] = None, [], False
        self._forget(None)

    def _forget(self, training: pace.Training | None) -> None:
        """Begins a training."""
        self._training, self._room, self._step = training, Room(), -1
        self._pending = set[object]()  # calls whose backward has not ended
        self._call: object = None  # that runs, if layers may be kept in it
        self._latest: object = None  # of these
        self.kept, self.bytes = list[nn.Module](), 0.0

    @contextmanager
    def keeping(self, model: PreTrainedModel, fused: Any, batch: Any) -> Iterator[None]:
        """In the block, which runs the backbone of a model on a batch, as many layers as fit are kept. If none of them
        runs (see `run`), the call has spent nothing.

        Args:
            model: the model.
            fused: the state of its fused forward.
            batch: how the call runs (see `state.RunnableBatch`).
        """
        self._call = None
        if applies(model, batch):
            self._begin(model, fused, batch)
        call = self._call
        with with_values([(layer, FLAG, False) for layer in self.kept] if call is not None else []):
            yield
        if call is not None and call not in self._pending:
            self._take_back()

    def run(self, backbone: Callable[[], Any]) -> Any:
        """The output of a backbone whose layers run."""
        with ExitStack() as stack:
            for layer, note in self._measured if self._call is not None else ():
                stack.enter_context(measured(layer, note))
            output = backbone()
        if self._call is not None and output.last_hidden_state.requires_grad:
            self._pending.add(self._call)
            end = partial(Variable._execution_engine.queue_callback, partial(self._end, self._call))
            output.last_hidden_state.register_hook(lambda _: end())  # with the backward that reaches them
        return output

    def release(self) -> bool:
        """Has calls of as many tokens keep nothing, after the latest call has run out of memory. Returns whether it has
        kept anything.
        """
        if self._call is None or not self.kept:
            return False
        if self._room.closed == torch.inf:
            text = f"out of memory with the activations of {len(self.kept)} layers kept"
            warn(f"{self._name}: {text}: batches of {self._tokens:,} tokens or more recompute all from now on")
        self._room.closed = min(self._room.closed, self._tokens)
        self._pending.discard(self._call)
        self._take_back()
        if self._random:
            torch.set_rng_state(self._random[0])
            set_device_states(*self._random[1:], device_type=self._device.type)
        return True

    def _begin(self, model: PreTrainedModel, fused: Any, batch: Any) -> None:
        """Decides about a call."""
        ids, scored = batch.inputs["input_ids"], len(batch.layout.score_index)
        layers, is_random = self.layers_of(model, fused)
        now, training = memory.report(ids.device) if layers else None, pace.training()
        if now is None:
            return
        if training is not self._training:
            self._forget(training)
        if self._step != training.done:
            self._step, _ = training.done, self._pending.clear()
        if self._pending:  # nobody knows how many calls will follow before a backward
            self._room.closed = 0
        self._take_back()
        self._call = self._latest = object()
        self._device, self._tokens = ids.device, ids.shape[1]
        chunks = {x: _chunks(batch.layout.rows, ids.device, x) for x in {sizes.chunk for _, sizes in layers}}
        room = self._room.begin((self._tokens, max(scored, 1)), now, training.done)
        last_of_kinds = {id(sizes): (layer, sizes) for layer, sizes in layers}.values()
        new = [(layer, sizes) for layer, sizes in last_of_kinds if not sizes.is_known(self._tokens)]
        self._measured = [(layer, partial(sizes.note, (self._tokens, chunks[sizes.chunk]))) for layer, sizes in new]
        expected = [(layer, sizes.expected((self._tokens, chunks[sizes.chunk]))) for layer, sizes in layers]
        for layer, size in expected[::-1] if room > 0 else ():
            if all(layer is not x for x, _ in self._measured):  # they are recomputed
                if not self.bytes + size <= room:
                    break
                self.kept.append(layer)
                self.bytes += size
        self._random: Any = (torch.get_rng_state(), *get_device_states(ids)) if self.kept and is_random else ()
        if self.kept:
            text = f"{len(self.kept)} of {len(layers)} layers in batches of up to {self._tokens:,} tokens"
            memory.hold(ids.device, "activations", self.bytes, text)
            if not self._has_said and not self._measured:
                logger.info(f"fastdpo: {self._name}: keeps the activations of {text}; {VARIABLE}=0 recomputes them")
                self._has_said = True

    def _take_back(self) -> None:
        self.kept, self.bytes = [], 0.0

    def _end(self, call: object) -> None:
        """Ends a call, whose backward has ended."""
        if call in self._pending and call is self._latest:
            now = cast(MemoryReport, memory.report(self._device))
            if spared := self._room.end(now, self.bytes):
                memory.spared[self._device] = now.peak, spared
            self._take_back()
        self._pending.discard(call)

    def layers_of(self, model: PreTrainedModel, fused: Any) -> tuple[Layers, bool]:
        """The layers that may be kept, and whether the model draws random numbers, found once for each verdict."""
        if self._found[0] is not fused.verdict:
            is_random, mixers = fused.is_random(model), finding.mixers_of(model)
            layers = checkpointed_layers(model, is_random=is_random)
            of_kinds = [
                (layer, self._kinds.setdefault(_kind_of(layer), Sizes(_chunk_of(layer, mixers)))) for layer in layers
            ]
            self._found = fused.verdict, of_kinds, is_random
        return self._found[1:]


def checkpointed_layers(model: PreTrainedModel, *, is_random: bool) -> list[nn.Module]:
    """The layers of a model, in the order of the forward, that a trainer has checkpointed by torch's function, if the
    model lies whole on one device, or in shards of FSDP2.

    Without the state of generators, a recompute draws other numbers than its forward, and is not what a kept layer is.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    parameters = [*model.parameters()]
    if len({x.device for x in parameters}) > 1:
        return []
    if is_sharded(model):
        meshes = [x.device_mesh.ndim for x in parameters if isinstance(x, DTensor)]
        if not any(isinstance(x, FSDPModule) for x in model.modules()) or any(x > 1 for x in meshes):
            return []  # ranks that recompute different layers of ZeRO-3 or of tensor parallelism wait for each other
    found, inner = [], set[nn.Module]()
    places = Counter(x for _, x in language_model(model).named_modules(remove_duplicate=False))
    for layer in places:
        if isinstance(layer, GradientCheckpointingLayer) and layer not in inner and places[layer] == 1:
            inner |= {*layer.modules()}
            function = vars(layer).get(CHECKPOINTING)
            if vars(layer).get(FLAG) is True and layer.training and isinstance(function, partial):
                given = function.keywords
                is_whole = function.func is checkpoint and not function.args and given.keys() <= OPTIONS
                if is_whole and (given.get("preserve_rng_state", True) or not is_random):
                    found.append(layer)
    return found


def applies(model: PreTrainedModel, batch: Any) -> bool:
    """Whether a call packs text, with gradients, on a device whose memory may be spent."""
    return (
        torch.is_grad_enabled()
        and model.training
        and batch.part is None
        and batch.inputs.keys() == TEXT
        and is_layout(batch.inputs["attention_mask"])
        and memory.is_on(batch.inputs["input_ids"].device)
        and not any(x in sys.modules for x in ENGINES)
        and offloading_reason() is None
    )


def _kind_of(layer: nn.Module) -> tuple:
    """Layers of one kind save as many bytes."""
    plain = ((name, x) for name, x in vars(layer).items() if isinstance(x, str))
    return type(layer), *plain, *((name, x.shape, x.dtype, x.requires_grad) for name, x in layer.named_parameters())


def _chunk_of(layer: nn.Module, mixers: list[nn.Module]) -> int:
    """The tokens to whole multiples of which scans of a layer pad rows: 1 if it runs whole rows, 0 without scans."""
    called = [finding.called_by(x) for x in layer.modules() if x in mixers]
    scans = [x for names in called for x in map(known.KNOWN.get, names) if isinstance(x, known.Scan)]
    if not all(called) or any(x.initial_state is None for x in scans):
        return 1
    return CHUNK if scans else 0


def _chunks(rows: Tensor, device: torch.device, chunk: int) -> int:
    """Those that scans compute of packed rows; 1 without scans."""
    return segments_of(rows, device).sequences(chunk if chunk > 1 else None).chunks(chunk) if chunk else 1


def measured(layer: nn.Module, note: Callable[[float], None]) -> AbstractContextManager[None]:
    """In the block, a call of a checkpointed layer notes what autograd would save of it.

    Inside the checkpointed function, where FSDP2 has gathered parameters. A compiled layer is measured as it is.
    """
    name = CHECKPOINTING if layer._compiled_call_impl is None else "_compiled_call_impl"
    own = getattr(layer, name)

    def of_checkpointed(function: Callable, *args: Any, **kwargs: Any) -> Any:
        note(saved_bytes(layer, function, *args))
        return own(function, *args, **kwargs)

    def of_compiled(*args: Any, **kwargs: Any) -> Any:
        with with_values([(layer, FLAG, False)]):
            note(saved_bytes(layer, partial(layer._call_impl, **kwargs), *args))
        return own(*args, **kwargs)

    return with_values([(layer, name, of_checkpointed if name == CHECKPOINTING else of_compiled)])


def saved_bytes(layer: nn.Module, function: Callable, *args: Any) -> float:
    """The bytes that a kept layer holds above a checkpointed one: of the storages that autograd would save of it, but
    for those that are alive anyway, of parameters, buffers, arguments and results; less those of the positional
    arguments that it would not save, and that checkpointing keeps. Infinite if they are not known.

    The layer runs once more, as it does in a recompute, and nothing of it is kept.

    Args:
        layer: the layer.
        function: runs it, and may be a `partial` that holds further arguments.
        args: of the function.
    """
    saved = WeakKeyDictionary[_Saved, tuple[StorageWeakRef, float]]()

    def pack(x: Tensor) -> _Saved:
        stands = _Saved()
        if not isinstance(x if x._base is None else x._base, nn.Parameter):
            storage = x.untyped_storage()
            saved[stands] = StorageWeakRef(storage), storage.nbytes()
        return stands

    try:
        with forked_random_state(), torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
            output = function(*args)
        values = tree_leaves((args, getattr(function, "keywords", None), output, *layer.parameters(), *layer.buffers()))
        alive = {StorageWeakRef(x.untyped_storage()) for x in values if isinstance(x, Tensor)}
        given = {StorageWeakRef(x.untyped_storage()): x.nbytes for x in args if isinstance(x, Tensor)}
    except NotImplementedError:  # of a tensor that has no storage, as a quantized one
        return torch.inf
    kept = dict(saved.values())
    own = sum(size for storage, size in kept.items() if storage not in alive)
    return own - sum(size for storage, size in given.items() if storage not in kept)


class _Saved:
    """Stands for a tensor that autograd has saved, for as long as it has."""
