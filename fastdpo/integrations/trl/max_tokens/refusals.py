"""Trainers whose steps cannot be cut, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ....models.attachments import is_hook_of_engine
from ....models.functions import module_of, name_of
from ....models.harmless import is_of
from ....models.support import rope_reason
from ...bypass import is_overridden

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOSS_FUNCTIONS = ("compute_loss", "_compute_loss", "compute_ref_log_probs", "_compute_kl_logps")
"""The functions in which TRL's trainers compute the loss of a batch. Each of them has some."""


def require_supported(reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason why steps cannot be cut."""
    if reason is not None:
        raise NotImplementedError(f"patch: max_tokens does not support {reason}")


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


def stepping_reason(model: nn.Module) -> str | None:
    """The hook in which an optimizer may step when a gradient is complete, if there is one. Engines have some that do
    not.
    """
    hooks: list[Callable] = []
    for x in model.parameters():
        hooks += (x._post_accumulate_grad_hooks or {}).values()
        hooks += (hook for hook in (x._backward_hooks or {}).values() if is_of(module_of(hook), ("lomo_optim",)))
    found = next((name_of(hook) for hook in hooks if not is_hook_of_engine(hook)), None)
    return found and f"optimizers that step in the backward pass, as {found} may do: it would run for each micro-batch"


def width_reason(model: PreTrainedModel, width: int) -> str | None:
    """Why micro-batches, which may be narrower than the batches of the trainer, have other results if one of these is
    that wide, or None.
    """
    reason = rope_reason(model, width)
    return None if reason is None else f"batches of up to {width} tokens, since {reason}; truncate by max_length"
