"""What trainers ask about a model in every step, answered without a long walk over its modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models.functions import module_of
from ..models.parts import find_base, is_transformers_model
from ..models.state import state_of
from ..models.structure import is_training
from .bypass import STATE
from .replacements import temporarily

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_peft_model(stock: Callable, model: Any) -> bool:
    """What accelerate returns, by the class of a model that no engine has wrapped.

    accelerate parses the metadata of PEFT and walks all modules.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return True
    is_fused = isinstance(model, nn.Module) and state_of(model) is not None
    return not (is_fused or is_transformers_model(model)) and stock(model)


def install(trainer: Any, undo: ExitStack) -> None:
    """Until the stack is closed, has accelerate's `unwrap_model` return a PeftModel at once, unless user code has
    replaced the function.

    By itself, it looks for compiled parts in all modules, and then returns the same model.
    """
    accelerator: Any = getattr(trainer, "accelerator", None)  # ms-swift makes it later
    peft, stock = sys.modules.get("peft"), getattr(accelerator, "unwrap_model", None)
    if peft is None or stock is None or not module_of(stock).startswith("accelerate."):
        return

    def unwrap_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_bare = isinstance(model, peft.PeftModel) and "_orig_mod" not in vars(model) and not (args or kwargs)
        return model if is_bare else stock(model, *args, **kwargs)

    def restore() -> None:
        if vars(accelerator).get("unwrap_model") is unwrap_model:
            del accelerator.unwrap_model

    accelerator.unwrap_model = unwrap_model
    undo.callback(restore)


def training_step(stock: Callable, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The trainer's function. It sets the mode of each module of the model, which usually is set already."""
    modules = model.modules() if STATE in vars(trainer) else ()
    base = next((x for x in modules if state_of(x) is not None and "train" not in vars(x)), None)
    with nullcontext() if base is None else temporarily(base, train=MethodType(_train, base)):
        return stock(trainer, model, *args, **kwargs)


def _train(model: PreTrainedModel, mode: bool = True) -> Any:
    return model if mode and is_training(model) else type(model).train(model, mode)


@contextmanager
def disable_gradient_checkpointing(stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """TRL's context. To enable checkpointing again, transformers would visit all modules and add one more hook to the
    embeddings in every step, for which a compiled model is compiled again.
    """
    base = model if state_of(model) else find_base(model)
    fused = None if base is None else state_of(base)
    with ExitStack() as stack:
        if base is None or fused is None or fused.unsupported_reason() is not None:
            stack.enter_context(stock(model, *args, **kwargs))
        else:
            for layer in fused.structure.modules_of(base, "gradient_checkpointing"):
                if layer.gradient_checkpointing:
                    stack.enter_context(temporarily(layer, gradient_checkpointing=False))
        yield
