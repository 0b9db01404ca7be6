"""Trainers whose steps cannot be cut, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType
from torch import nn

from ....logs import logger
from ....models.examine.support import rope_reason
from ....models.identity.functions import (
    hooks_of,
    hooks_of_every_module,
    is_hook_of_engine,
    module_of,
    name_of,
    of_users,
    wrapped_in,
)
from ....models.identity.harmless import is_of
from ....models.parts import find_base
from ...bypass import is_overridden

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOSS_FUNCTIONS = ("compute_loss", "_compute_loss", "compute_ref_log_probs", "_compute_kl_logps")
"""The functions in which TRL's trainers compute the loss of a batch. Each of them has some."""

KNOWN = ("transformers", "accelerate", "trl", "peft", "fastdpo", "axolotl", "torch")
"""Packages whose functions within a step read nothing of a batch."""


class NotCut(NotImplementedError):
    """Why steps cannot be cut.

    Attributes:
        reason: the last part of the message.
    """

    def __init__(self, reason: str):
        super().__init__(f"patch: max_tokens does not support {reason}")
        self.reason = reason


def require_supported(reason: str | None) -> None:
    """Raises `NotCut` if there is a reason why steps cannot be cut."""
    if reason is not None:
        raise NotCut(reason)


def say_kept(name: str, reason: str) -> None:
    """Logs why a trainer keeps the batches of TRL by default."""
    logger.info("fastdpo: %s: keeps the batches of TRL because of %s", name, reason)


def unsupported_reason(trainer: Any, stock: type) -> str | None:
    """Why the steps of a trainer, of this class or of a subclass, cannot be cut, or None."""
    if trainer.args.n_gpu > 1:
        return "torch.nn.DataParallel; start one process for each GPU"
    if getattr(trainer.accelerator, "parallelism_config", None) is not None:
        return "parallelism_config"
    if trainer.accelerator.num_processes > 1 and not trainer.args.accelerator_config.even_batches:
        return "even_batches=False on several ranks"
    if trainer.accelerator.num_processes > 1 and getattr(trainer.args, "ddp_static_graph", False):
        return "ddp_static_graph=True, with which gradients are not accumulated"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "models that transformers shards while it loads them"
    if is_overridden(trainer, stock, (name for name in LOSS_FUNCTIONS if hasattr(stock, name))):
        return f"{type(trainer).__name__}, which overrides the loss of {stock.__name__}"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the auxiliary loss of routers, which is not a mean over rows"
    return None


def engine_reason(trainer: Any, on_ranks: str | None) -> str | None:
    """Why a rank cannot decide by itself about each of its steps, or run one again that has run out of memory, or None.

    Args:
        trainer: the trainer.
        on_ranks: what of the trainer is a reason where there are several ranks.
    """
    accelerator = trainer.accelerator
    engine = accelerator.distributed_type
    if engine in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return f"{engine.value}, whose ranks would have to agree on each step"
    return on_ranks if accelerator.num_processes > 1 else None


def user_code_reason(trainer: Any, models: Iterable[nn.Module], stock: type) -> str | None:
    """Why a step of a trainer cannot be cut as it is now, or None: code of users that runs for each of its batches, and
    would see other ones.

    Args:
        trainer: the trainer, of the class `stock` or of a subclass.
        models: those that score its batches, in the wrappers of engines.
        stock: the class that is patched.
    """
    for name in ("training_step", "_prepare_inputs", "_get_per_token_logps_and_entropies", *LOSS_FUNCTIONS):
        function = getattr(trainer, name, None)
        if function is not None and not _is_known(function):
            if name in vars(trainer):
                return f"{name_of(function)}, set as {name} of the trainer"
            return f"{type(trainer).__name__}, which overrides {name} of {stock.__name__}"
    for name in ("backward", "gather", "gather_for_metrics", "reduce"):
        function = getattr(trainer.accelerator, name)
        if not _is_known(function):
            return f"{name_of(function)}, set as {name} of the accelerator"
    for callback in trainer.callback_handler.callbacks:
        if not _is_known(callback.on_substep_end):
            return f"callbacks that act within a step, as {type(callback).__name__}.on_substep_end may do"
    return next(filter(None, map(_hook_reason, models)), None)


def _is_known(function: Callable) -> bool:
    """Whether a function and those that it wraps are of packages that read nothing of a batch within a step."""
    return all(is_of(module_of(x), KNOWN) for x in wrapped_in(function))


def _hook_reason(model: nn.Module) -> str | None:
    """The hook of a parameter, of a model or of its wrappers that would run for each micro-batch, if there is one.
    Engines have some that do not look at batches.
    """
    of_parameters, stepping = [], []
    for x in model.parameters():
        of_parameters += (x._backward_hooks or {}).values()
        stepping += (x._post_accumulate_grad_hooks or {}).values()
    stepping += [hook for hook in of_parameters if is_of(module_of(hook), ("lomo_optim",))]
    base = find_base(model)
    modules = [*itertools.takewhile(lambda x: x is not base, model.modules()), *([] if base is None else [base])]
    of_modules = [*hooks_of_every_module(), *itertools.chain.from_iterable(map(hooks_of, modules))]
    hooks = {
        "optimizers that step in the backward pass, as {} may do": stepping,
        "hooks of parameters, as {} is one": of_parameters,
        "hooks of the model, as {} is one": of_users(of_modules),
    }
    found = ((what, hook) for what, some in hooks.items() for hook in some if not is_hook_of_engine(hook))
    return next((f"{what.format(name_of(hook))}: it would run for each micro-batch" for what, hook in found), None)


def width_reason(model: PreTrainedModel, width: int) -> str | None:
    """Why micro-batches, which may be narrower than the batches of the trainer, have other results if one of these is
    that wide, or None.
    """
    reason = rope_reason(model, width)
    return None if reason is None else f"batches of up to {width} tokens, since {reason}; truncate by max_length"
