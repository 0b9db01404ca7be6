"""Contexts in which two runs of a model can be compared, and which leave the model as it was."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..parts import has_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DROPOUTS: dict[Callable, inspect.Signature] = {
    function: inspect.signature(function)
    for function in (
        *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
        *(functional.alpha_dropout, functional.feature_alpha_dropout),
    )
}


class WithoutDropout(TorchFunctionMode):
    """In the block, torch's dropout keeps all values, in modules and in functions: two layouts of a batch
    would not drop the same ones.

    Attributes:
        is_random: whether anything would have been dropped.
    """

    is_random = False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        given = _DROPOUTS[func].bind(*args, **kwargs)
        given.apply_defaults()
        self.is_random |= given.arguments["training"] and given.arguments["p"] > 0
        return given.arguments["input"]


@contextmanager
def with_values(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """In the block, attributes of objects have other values."""
    with ExitStack() as undo:
        for owner, name, value in values:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def unwatched(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """In the block, leaves of autograd have no hooks and no gradients. What runs in it is no step of a training, and an
    optimizer in the backward pass would take it for one.
    """
    return with_values(
        [
            (x, name, absent)
            for x in tensors
            for name, absent in (("_backward_hooks", None), ("_post_accumulate_grad_hooks", {}), ("grad", None))
            if name == "grad" or getattr(x, name) is not None  # a gradient may be new afterwards
        ]
    )


def in_evaluation_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Sets `training` to False on each module for the block, and to what it was afterwards.

    Does not call `eval()`, which may change a model for good: with `use_kernels=True`, transformers replaces its
    layers by the kernels of the mode, some of which have no gradient, and functions that models share.
    """
    return with_values([(module, "training", False) for module in model.modules()])


_checkpoint = checkpoint.checkpoint  # ms-swift replaces it while it trains, by one that is always reentrant


def _not_reentrant(function: Callable, preserve_rng_state: bool, *args: object) -> object:
    """Stands for the method `apply` of torch's reentrant function."""
    return _checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


NOT_REENTRANT = (checkpoint, "CheckpointFunction", SimpleNamespace(apply=_not_reentrant))
"""For `with_values`: torch checkpoints activations in the form that works with `torch.autograd.grad`,
whichever form is asked for, and through whatever functions.
"""


@contextmanager
def forked_random_state() -> Iterator[None]:
    """After the block, the random numbers of all devices that are used, of Python and of NumPy are drawn as before."""
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=list(cuda)):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def without_trace(model: PreTrainedModel, *, leaves_out_dropout: bool = True) -> Iterator[WithoutDropout]:
    """A block in which a model may be run and differentiated without a trace: what its quantized modules keep, random
    states, gradients and the hooks of its parameters are restored (see `snapshot.restored` for the rest).
    """
    # What leaves out dropout does not reach layers that are computed again.
    drops = has_dropout(model) or any(isinstance(x, nn.Dropout) and x.p > 0 for x in model.modules())
    checkpointing = [x for x in model.modules() if drops and getattr(x, "gradient_checkpointing", False)]
    values = [NOT_REENTRANT, *((x, "gradient_checkpointing", False) for x in checkpointing)]
    dropout = WithoutDropout()
    with (
        forked_random_state(),
        with_values(values),
        _preserved_attributes(model),
        unwatched(model.parameters()),
        dropout if leaves_out_dropout else nullcontext(),  # compiled layers would be compiled again for it
    ):
        yield dropout


@contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[WithoutDropout]:
    """As `without_trace`, for rows of a probe, which run without autocast and without NEFTune's noise. Compiled layers
    run as they are written: a graph would be compiled for these rows alone, and does not tell what reaches attention.
    """
    noisy = [x for x in model.modules() if getattr(x, "neftune_noise_alpha", None)]
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with (
        torch.autocast("cpu", enabled=False),
        torch.autocast(accelerator.type, enabled=False),
        torch.compiler.set_stance("force_eager"),
        with_values([(x, "neftune_noise_alpha", 0.0) for x in noisy]),
        without_trace(model) as dropout,
    ):
        yield dropout


def is_quantized(x: Tensor) -> bool:
    """Whether a parameter holds codes of numbers, as those of bitsandbytes and torchao do."""
    is_subclass = is_traceable_wrapper_subclass(x) and not isinstance(x, DTensor)
    return is_subclass or not x.is_floating_point() or torch.finfo(x.dtype).bits < 16


@contextmanager
def _preserved_attributes(model: nn.Module) -> Iterator[None]:
    """Restores what quantized modules and their parameters keep: the first call of a layer of bitsandbytes
    chooses the dtype of its products, for good.
    """
    modules = [m for m in model.modules() if any(is_quantized(x) for x in m.parameters(recurse=False))]
    owners = [owner for module in modules for owner in (module, *module.parameters(recurse=False))]
    states = [x for owner in owners for x in vars(owner).values() if _is_record(x)]
    kept = [(owner, dict(vars(owner))) for owner in (*owners, *states)]
    try:
        yield
    finally:
        for owner, attributes in kept:
            vars(owner).clear()
            vars(owner).update(attributes)


def _is_record(x: object) -> bool:
    """Whether an object keeps values in attributes, as a `MatmulLtState` and a `QuantState` do."""
    return hasattr(x, "__dict__") and not isinstance(x, Tensor | nn.Module | type) and not callable(x)
