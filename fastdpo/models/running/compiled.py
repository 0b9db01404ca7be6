"""Compiled decoder layers for packed calls.

A packed batch is one row, of which only the number of tokens and the number of rows in its layout vary. Both are
dynamic in the graphs, so batches of all lengths run the same ones. A layer is compiled in place: calls with a layout
run its graph, which holds the whole layer, and all others (generation, fallbacks, padded calls) run the layer as it is.
Where torch cannot compile a layer, those of the model run as they are from then on, with one logged reason.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...logs import logger, report
from ...packing import is_layout
from ...reasons import Reason
from ..examine.comparable import with_values
from ..identity.structure import MAX_IDENTITIES, has_additions
from ..mixers import finding
from ..parts import language_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..identity.structure import Structure

BACKEND = "inductor"
"""The backend of `torch.compile`."""

MAX_GRAPHS = 64
"""Number of graphs in a process, where torch takes one. Its default suits layers of one kind in one model."""

CONFIG = {
    # torch 2.11 leaves out the checks of modules whose dictionaries have not changed, and so those of what is trained.
    "use_recursive_dict_tags_for_guards": False,
    # What a graph records for profilers of torch takes the host a fiftieth of a small layer's time.
    "record_runtime_overhead": False,
}
"""Settings of torch's compiler while it makes a graph."""


class CompiledLayers:
    """The decoder layers of one model, whose packed calls are compiled.

    Args:
        name: of the model in log lines.
        is_asked: whether the user has asked for it, so that a reason why it cannot be done is a warning.

    Attributes:
        reason: why the layers run as they are; None if they are compiled.
        found: the layers of the model and of its towers, as each of its latest identities lists them.
        layers: those that are compiled.
        is_paused: whether calls run the layers as they are.
        seconds: time that the compiler took for them since it was last logged.
    """

    def __init__(self, name: str, is_asked: bool = True) -> None:
        self.name, self.is_asked, self.is_paused = name, is_asked, False
        self.reason: Reason | None = None
        self.found: list[list[nn.Module]] = []
        self.layers: list[nn.Module] = []
        self.seconds = 0.0

    def begin(self, model: PreTrainedModel, structure: Structure) -> None:
        """Compiles the layers of a model that is about to run a packed batch, when they are first called.

        Args:
            model: the model.
            structure: as it is now.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        found = structure.modules_of(model, GradientCheckpointingLayer)
        if self.reason is not None:
            self.restore()
        elif not any(found is x for x in self.found):  # made anew for each identity
            inside = set(language_model(model).modules())
            layers = [layer for layer in found if layer in inside]
            self.reason = _unsupported_reason(model, layers, self.layers)
            if self.reason is not None:
                self.restore()
                self.report(self.reason)
                return
            if layers != self.layers:
                self.restore()
                for layer in layers:
                    layer._compiled_call_impl = functools.partial(self.call, layer)
                logger.info("fastdpo: %s: compiling its layers; the first step waits for them", self.name)
            self.found, self.layers = [found, *self.found][:MAX_IDENTITIES], layers
        if self.seconds:
            logger.info("fastdpo: %s: compiling its layers took %.1f s", self.name, self.seconds)
            self.seconds = 0.0
        _listen()

    def restore(self) -> None:
        """Makes all calls run the layers as they are."""
        for layer in self.layers:
            vars(layer).pop("_compiled_call_impl", None)
        self.found, self.layers = [], []

    def fail(self, module: nn.Module, error: Exception) -> None:
        """Notes that the layers run as they are since a module has raised an error, and logs the first one."""
        if self.reason is None:
            message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.reason = Reason("compiled-error", layer=type(module).__name__, error=message)
            self.report(self.reason)

    def report(self, reason: Reason) -> None:
        """Logs why the layers run as they are. In strict mode, raises `NotFused` if the user has asked for it."""
        message = f"{self.name}: layers not compiled, {reason.named}"
        if self.is_asked:
            report(message)
        else:
            logger.info("fastdpo: %s", message)

    def as_they_are(self) -> AbstractContextManager[None]:
        """In the block, calls run the layers as they are."""
        return with_values([(self, "is_paused", True)])

    def call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls a layer: compiled, if it is given a layout, and otherwise as it is."""
        if (
            self.is_paused
            or torch.compiler.is_compiling()
            or not any(map(is_layout, (kwargs.get("attention_mask"), *args)))
        ):
            return layer._call_impl(*args, **kwargs)
        if args and args[0].requires_grad and not torch.is_grad_enabled():  # in the first layer, by a hook of PEFT
            args = args[0].detach(), *args[1:]
        token = _called.set((self, [*args, *kwargs.values()]))
        try:
            return compiled_run(BACKEND)(layer, args, kwargs)
        except _errors() as error:
            vars(layer).pop("_compiled_call_impl")  # the other layers until the next batch: they may be computed again
            self.fail(layer, error)
            return layer._call_impl(*args, **kwargs)
        finally:
            _called.reset(token)


def _unsupported_reason(model: PreTrainedModel, layers: list[nn.Module], compiled: list[nn.Module]) -> Reason | None:
    """Why the layers of a model are not compiled, as far as is known before, given those that are."""
    if not layers:
        return Reason("compiled-nothing", model=type(model).__name__)
    if trainer_compiles() or any(x._compiled_call_impl is not None for x in set(layers) - set(compiled)):
        return Reason("compiled-already")
    if finding.mixers_of(model):
        return Reason("compiled-mixers", model=type(model).__name__)
    # Layers share graphs, and torch does not look at the hooks of each.
    changed = next((x for layer in layers for x in layer.modules() if has_additions(x)), None)
    return None if changed is None else Reason("compiled-hooks", module=type(changed).__name__)


def _errors() -> tuple[type[Exception], ...]:
    """What torch raises if it cannot compile a layer. Imported late: it imports Triton."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def trainer_compiles() -> bool:
    """Whether accelerate was configured to compile models, by whichever trainer."""
    if "accelerate" not in sys.modules:
        return False
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend

    plugin = AcceleratorState._shared_state.get("dynamo_plugin")
    return plugin is not None and plugin.backend != DynamoBackend.NO


_called: ContextVar[tuple[CompiledLayers, list[Any]] | None] = ContextVar("fastdpo_called_layers", default=None)
"""The layers of which one is called, and the arguments."""

_compilation = ExitStack()
"""What the compiler runs in, if it compiles one of these layers."""


def _listen() -> None:
    """Has torch report where it finds no graph for a call, unless it does. It forgets who listens when it is reset.
    Calls that find a graph take no time for it.
    """
    from torch._dynamo.callback import callback_handler

    if _started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_started)
        callback_handler.register_end_callback(_ended)


def _started(_: object) -> None:
    called = _called.get()
    if called is not None:  # otherwise, another program compiles
        _compilation.enter_context(_compiling(*called))


def _ended(_: object) -> None:
    _compilation.close()


@contextmanager
def _compiling(layers: CompiledLayers, arguments: list[Any]) -> Iterator[None]:
    """A run of the compiler for one of the layers, by `CONFIG`, with marks on the sizes that vary.

    Without marks, sizes that are equal by chance in the first batch would stay so.
    """
    flat = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    tokens = next(x.shape[-2] for x in flat if not is_layout(x))
    for x in flat:
        varying = [2] if is_layout(x) else [i for i in range(1, x.dim()) if x.shape[i] == tokens][:1]
        torch._dynamo.maybe_mark_dynamic(x, varying)
    start = time.perf_counter()
    settings = {name: CONFIG[name] for name in CONFIG if hasattr(torch._dynamo.config, name)}
    with torch._dynamo.config.patch(settings), _keeping_activations():
        yield
    layers.seconds += time.perf_counter() - start


def _keeping_activations() -> AbstractContextManager[None]:
    """In the block, torch makes graphs whose backward can run again (`retain_graph=True`): otherwise it would write to
    activations. A setting for that (`donated_buffer`) would have to hold in each backward, and for all graphs.
    """
    module, name = sys.modules.get("torch._functorch._aot_autograd.graph_compile"), "collect_bw_donated_buffer_idxs"
    return with_values([(module, name, lambda *_: [])] if hasattr(module, name) else [])


def _run(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return layer._call_impl(*args, **kwargs)


@functools.cache
def compiled_run(backend: str) -> Callable[..., Any]:
    """The compiled call of all layers, since torch shares graphs between calls of one function."""
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    given: dict[str, Any] = {"recompile_limit": MAX_GRAPHS} if takes_limit else {}
    # Checks of torch's own sizes in generated code take the host a tenth of a small layer's time.
    if backend == "inductor":
        given["options"] = {"size_asserts": False, "alignment_asserts": False}
    return torch.compile(_run, backend=backend, fullgraph=True, **given)
