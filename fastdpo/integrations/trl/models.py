"""The models of TRL's trainers: the reference, which may be the policy with its adapters disabled, and what TRL
asks about a model in every step, answered without a long walk over its modules.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ...models.adapters import with_adapter
from ...models.harmless import module_of
from ...models.parts import base_of, find_base, is_transformers_model, without_engines
from ...models.sharding import reshard
from ...models.state import state_of
from ..replacements import replacing, temporarily

if TYPE_CHECKING:
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer


def reference_of(trainer: DPOTrainer | KTOTrainer) -> nn.Module:
    """The trainer's reference model, or its policy, which then is the
    reference inside `as_reference`.
    """
    # A compiled model has no truth value.
    return cast(nn.Module, trainer.model if trainer.ref_model is None else trainer.ref_model)


def reference_logps(trainer: Any, inputs: dict[str, Any], model: nn.Module | None = None) -> tuple[Tensor, Tensor]:
    """The reference's log-probabilities of chosen and rejected completions, [B] each, by TRL's own
    function.

    `model` is the engine that runs the reference if it is not the trainer's own model.
    """
    takes_model = "model" in inspect.signature(trainer.compute_ref_log_probs).parameters  # since TRL 1.9
    return trainer.compute_ref_log_probs(
        *((reference_of(trainer) if model is None else model,) if takes_model else ()), inputs
    )


def as_reference(trainer: Any) -> AbstractContextManager[None]:
    """A context in which a policy that is its own reference acts as such: with its adapters disabled, or with
    the copy named "ref".
    """
    if trainer.ref_model is not None:
        return nullcontext()
    if hasattr(trainer, "null_ref_context"):  # TRL before 0.29, which knows the adapter by its options
        return trainer.null_ref_context()
    adapters = getattr(without_engines(trainer.model), "peft_config", None)
    if adapters is None:
        return nullcontext()
    return with_adapter(trainer.model, "ref" if "ref" in adapters else None, "as_reference")


def reference_digest(trainer: Any) -> str:
    """The digest of a trainer's reference (`ref_logps.keys.model_digest`)."""
    from ...ref_logps import keys

    reshard(reference_of(trainer))
    with as_reference(trainer):
        return keys.model_digest(base_of(reference_of(trainer), "reference_digest"))


def precision_of(trainer: Any) -> str:
    """The precision that accelerate runs the reference in."""
    return f"accelerate {trainer.accelerator.mixed_precision}"


def is_peft_model(stock: Callable, model: Any) -> bool:
    """What accelerate returns, by the class of a model that no engine has wrapped.

    accelerate parses the metadata of PEFT and walks all modules.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return True
    return not is_transformers_model(model) and stock(model)


@contextmanager
def unwrapping(accelerator: Any) -> Iterator[None]:
    """In the block, accelerate's `unwrap_model` returns a PeftModel at once.

    By itself, it looks for compiled parts in all modules, and then returns the same model.
    """
    stock, peft = accelerator.unwrap_model, sys.modules.get("peft")
    if peft is None or "unwrap_model" in vars(accelerator) or not module_of(stock).startswith("accelerate."):
        yield
        return

    def unwrap_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_bare = isinstance(model, peft.PeftModel) and "_orig_mod" not in vars(model) and not (args or kwargs)
        return model if is_bare else stock(model, *args, **kwargs)

    with replacing(accelerator, unwrap_model=unwrap_model):
        yield


@contextmanager
def disable_gradient_checkpointing(stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """TRL's context. To enable checkpointing again, transformers would visit all modules and add one more hook to the
    embeddings in every step, for which a compiled model is compiled again.
    """
    base = find_base(model)
    fused = None if base is None else state_of(base)
    with ExitStack() as stack:
        if base is None or fused is None or fused.unsupported_reason() is not None:
            stack.enter_context(stock(model, *args, **kwargs))
        else:
            for layer in fused.structure.modules_of(base, "gradient_checkpointing"):
                stack.enter_context(temporarily(layer, gradient_checkpointing=False))
        yield


@contextmanager
def use_adapter(stock: Callable, model: Any, adapter_name: str | None, *args: Any, **kwargs: Any) -> Iterator[None]:
    """TRL's context. To disable adapters, PEFT asks for the status of the model, and reads only whether they are
    enabled. The other fields describe each layer in words, which takes longer than a forward of small layers.
    """
    with ExitStack() as stack:
        with _enabled_status(model) if adapter_name is None and _are_enabled(model) else nullcontext():
            stack.enter_context(stock(model, adapter_name, *args, **kwargs))
        yield


def _are_enabled(model: Any) -> bool:
    """Whether all of a model's adapters are, and it has some."""
    # PEFT's layers have a property of this name, models of transformers a method.
    layers = (x for x in model.modules() if isinstance(getattr(type(x), "disable_adapters", None), property))
    return {layer.disable_adapters for layer in layers} == {False}


class _EnabledStatus:
    """The status of a model whose adapters are enabled. Other fields are computed when they are read."""

    enabled = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self._model).get_model_status(self._model), name)


@contextmanager
def _enabled_status(model: Any) -> Iterator[None]:
    """In the block, a model's `get_model_status` returns an `_EnabledStatus`.

    A compiled model would pass an attribute that is set on to the model inside, and keep it there.
    """
    vars(model)["get_model_status"] = lambda: _EnabledStatus(model)
    try:
        yield
    finally:
        del vars(model)["get_model_status"]
