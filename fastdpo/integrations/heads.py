"""Lets the head of a causal LM compute log-probabilities when it is called as a module.

The hooks of engines on the module (FSDP2, ZeRO-3, accelerate's `device_map`) then gather its weight and reduce its
gradient. Only a plain `nn.Linear` qualifies: other hooks or a replaced forward would be bypassed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..ops.linear_logps import linear_logps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENGINES = ("torch.distributed.", "deepspeed.", "accelerate.")
"""Packages whose hooks on a head gather and release its weight, and change nothing else."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def head_of(model: PreTrainedModel) -> nn.Linear:
    """Looked up on each call: FSDP and PEFT replace it after a trainer has been built."""
    return cast(nn.Linear, model.get_output_embeddings())


def unsupported_reason(head: nn.Module | None) -> str | None:
    """Why a head can't score targets itself; None if it can. Changes nothing."""
    if head is None:
        return "the model has no head"
    if not _is_linear(type(head)):
        return f"the head must be a plain nn.Linear; it is {type(head).__name__}"
    replaced = _replaced_forward(head)
    if replaced is not None:
        return f"the head's forward was replaced by {replaced}"
    hooks = sorted({name_of(hook) for hook in hooks_of(head) if not _is_of_an_engine(hook)})
    if hooks:
        return f"the head has hooks: {', '.join(hooks)}"
    return _missing_weight(cast(nn.Linear, head))


def device_of(head: nn.Linear) -> torch.device:
    """The device of the head's weight. The head must have no `unsupported_reason`."""
    return cast(Tensor, _weight(head)).device


def install(head: nn.Linear) -> None:
    """Replaces the head's forward, once. The head must have no `unsupported_reason`."""
    if not is_ours(vars(head).get(_place_of_forward(head))):
        setattr(head, _place_of_forward(head), MethodType(_forward, head))


def restore(head: nn.Module | None) -> None:
    """Undoes `install`. A forward that somebody else has set stays."""
    if head is None or not is_ours(vars(head).get(_place_of_forward(head))):
        return
    if "_hf_hook" in vars(head):
        vars(head)["_old_forward"] = MethodType(nn.Linear.forward, head)
    else:
        del vars(head)["forward"]


def hooks_of(module: nn.Module) -> Iterator[Callable]:
    for name in HOOKS:
        yield from vars(module)[name].values()


def name_of(function: Callable) -> str:
    function = function_of(function)
    return getattr(function, "__qualname__", type(function).__qualname__)


def _forward(self: nn.Linear, input: Tensor, fastdpo_targets: Tensor | None = None, **options: Any) -> Any:
    """`nn.Linear.forward`; with targets [N] of hidden states [N, D], `TokenLogps`."""
    if fastdpo_targets is None:
        return nn.Linear.forward(self, input)
    return linear_logps(input, self.weight, fastdpo_targets, bias=self.bias, **options)


def _is_of_an_engine(hook: Callable) -> bool:
    return module_of(inspect.unwrap(function_of(hook))).startswith(ENGINES)


def is_ours(forward: object) -> bool:
    return getattr(forward, "__func__", None) is _forward


def _is_linear(kind: type) -> bool:
    """nn.Linear, or what FSDP2 makes of its class."""
    if kind is nn.Linear:
        return True
    return len(kind.__bases__) == 2 and kind.__bases__[1] is nn.Linear and _is_fsdp(kind)


def _is_fsdp(kind: type) -> bool:
    return kind.__module__.startswith("torch.distributed.fsdp.")


def _place_of_forward(head: nn.Module) -> str:
    """Where the head keeps what it computes: accelerate's hooks (`device_map`) move it there and call it."""
    return "_old_forward" if "_hf_hook" in vars(head) else "forward"


def _replaced_forward(head: nn.Module) -> str | None:
    """The name of a forward that is neither the class's, ours, nor accelerate's around one of them."""
    inner = vars(head).get(_place_of_forward(head))
    if inner is not None and not is_ours(inner) and getattr(inner, "__func__", None) is not nn.Linear.forward:
        return name_of(inner)
    outer = vars(head).get("forward")
    if "_hf_hook" in vars(head) and outer is not None and not module_of(outer).startswith("accelerate."):
        return name_of(outer)
    return None


def _missing_weight(head: nn.Linear) -> str | None:
    weight = _weight(head)
    if weight is None:
        return "the head has no weight among its parameters"
    if weight.device.type == "meta":
        return "the head's weight is offloaded"
    if isinstance(weight, DTensor):
        shards = sum(isinstance(placement, Shard) for placement in weight.placements)
        if shards > 1 or not _is_fsdp(type(head)):  # FSDP2 brings the whole weight when the head is called
            return "the head is cut between ranks (tensor parallelism)"
    return None


def _weight(head: nn.Linear) -> Tensor | None:
    """The weight, or ZeRO-3's placeholder for it. Reading the attribute would gather it."""
    return head._parameters.get("weight")


def function_of(function: Any) -> Any:
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def module_of(function: Callable) -> str:
    """Where a function was written; decorators like functools.wraps change its `__module__`."""
    function = function_of(function)
    return getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
