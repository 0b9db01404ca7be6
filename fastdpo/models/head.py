"""Adds scoring to the head of a causal LM, so that calling the module returns log-probabilities.

Calling the module lets the hooks of engines (FSDP2, ZeRO-3, accelerate's `device_map`) gather its
weight and reduce its gradient. Only a plain `nn.Linear` whose weight is whole when it is called is
supported: any other hook or replaced forward would be bypassed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..ops.head.linear_logps import linear_logps
from ..reasons import Reason
from .identity.functions import HOOKS, hooks_of, inner_function, is_hook_of_engine, module_of, name_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAST = "._cast_lm_head_to_fp32.<locals>.cast_forward_to_fp32"
"""The forward that TRL's `cast_lm_head_to_fp32` gives a head. It computes logits for generation; log-probabilities are
computed from the weight.
"""

OWN_FORWARD = "_fastdpo_own_forward"
"""The attribute of a head that keeps its `CAST` forward while ours is installed."""


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The head. Look it up for each call: FSDP and PEFT replace it
    after a trainer has been created.
    """
    return cast(nn.Linear, model.get_output_embeddings())


def unsupported_reason(head: nn.Module | None, *, float32: bool = False) -> Reason | None:
    """Returns why a head cannot score targets itself, or None if it can. Changes nothing.

    Args:
        head: the head.
        float32: whether it scores in float32. A head that TRL has cast to float32 can do so, too.
    """
    if head is None:
        return Reason("no-head")
    if not _is_linear(type(head)):
        package = type(head).__module__.partition(".")[0]  # PEFT, too, has a class of this name
        return Reason("head-type", kind=f"{package}.{type(head).__name__}")
    if not _is_gathered(head):  # by tensor parallelism, which replaces the forward as well
        return Reason("split-head")
    replaced = _replaced_forward(head)
    if replaced is not None and not (float32 and replaced.endswith(CAST)):
        return Reason("head-forward", function=replaced)
    hooks = sorted({name_of(hook) for hook in hooks_of(head) if not is_hook_of_engine(hook)})
    if hooks:
        return Reason("head-hooks", hooks=", ".join(hooks))
    weight = _weight(head)
    if weight is None:
        return Reason("no-head-weight")
    if weight.device.type == "meta":
        return Reason("offloaded-head")
    return None


def identity(head: nn.Module | None) -> tuple[object, ...]:
    """What `unsupported_reason` depends on, next to the attributes of the head."""
    if head is None:
        return ()
    weight = _weight(head)
    kind = None if weight is None else (type(weight), weight.device)
    return id(head), kind, [hook for hook in hooks_of(head) if not is_hook_of_engine(hook)]


def device_of(head: nn.Linear) -> torch.device:
    """The device of the head's weight. The head must be supported (see `unsupported_reason`)."""
    return cast(Tensor, _weight(head)).device


def install(head: nn.Linear) -> None:
    """Replaces the head's forward, once. The head must be supported (see `unsupported_reason`)."""
    own = vars(head).get(_forward_attribute(head))
    if is_installed(own):
        return
    if own is not None and inner_function(own) is not nn.Linear.forward:
        vars(head)[OWN_FORWARD] = own
    setattr(head, _forward_attribute(head), MethodType(forward, head))


def restore(head: nn.Module | None) -> None:
    """Undoes `install`. Keeps a forward that other code has set since."""
    if head is not None and is_installed(vars(head).get(_forward_attribute(head))):
        stock = stock_attributes(head, vars(head))
        vars(head).update(stock)
        for name in vars(head).keys() - stock.keys():
            del vars(head)[name]


def stock_attributes(head: nn.Module, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a head would have without `install`, given those that it has."""
    name = _forward_attribute(head)
    if not is_installed(attributes.get(name)):
        return {**attributes}
    stock = {key: x for key, x in attributes.items() if key not in (name, OWN_FORWARD)}
    own = attributes.get(OWN_FORWARD)
    if own is not None or "_hf_hook" in attributes:
        stock[name] = own or MethodType(nn.Linear.forward, head)
    return stock


@contextmanager
def bare(head: nn.Linear) -> Iterator[None]:
    """Calls of the head score in the block, and run no hooks but those of engines, whatever the head's
    forward and its other hooks are.
    """
    names = (*HOOKS, _forward_attribute(head))
    kept = {name: x for name, x in vars(head).items() if name in names}
    hooks = {name: {key: hook for key, hook in kept[name].items() if is_hook_of_engine(hook)} for name in HOOKS}
    vars(head).update(hooks, **{_forward_attribute(head): MethodType(forward, head)})
    try:
        yield
    finally:
        vars(head).pop(_forward_attribute(head))
        vars(head).update(kept)


def is_installed(own: object) -> bool:
    """Whether a forward is the one that `install` sets."""
    return getattr(own, "__func__", None) is forward


def forward(self: nn.Linear, input: Tensor, fastdpo_targets: Tensor | None = None, **options: Any) -> Any:
    """The head's own forward. Given targets [N] for hidden states [N, D], returns `TokenLogps` instead.

    A pickled method refers to its function by this name, which is that of `nn.Linear`'s when it is loaded.
    """
    if fastdpo_targets is None:
        own = vars(self).get(OWN_FORWARD)
        return nn.Linear.forward(self, input) if own is None else own(input)
    return linear_logps(input, self.weight, fastdpo_targets, bias=self.bias, **options)


def _is_linear(kind: type) -> bool:
    """Whether a class is nn.Linear, or the subclass of it that FSDP2 creates."""
    return kind is nn.Linear or (len(kind.__bases__) == 2 and kind.__bases__[1] is nn.Linear and _is_fsdp(kind))


def _is_fsdp(kind: type) -> bool:
    return kind.__module__.startswith("torch.distributed.fsdp.")


def _forward_attribute(head: nn.Module) -> str:
    """The attribute that holds the head's own forward. accelerate's hooks (`device_map`) move it."""
    return "_old_forward" if "_hf_hook" in vars(head) else "forward"


def _replaced_forward(head: nn.Module) -> str | None:
    """The name of a forward other than the class's, the installed one,
    and accelerate's around either.
    """
    inner = vars(head).get(_forward_attribute(head))
    if inner is not None and not is_installed(inner) and getattr(inner, "__func__", None) is not nn.Linear.forward:
        return name_of(inner)
    outer = vars(head).get("forward")
    if "_hf_hook" in vars(head) and outer is not None and not module_of(outer).startswith("accelerate."):
        return name_of(outer)
    return None


def _is_gathered(head: nn.Module) -> bool:
    """Whether the weight is whole when the head is called, as FSDP2 makes it."""
    weight = _weight(head)
    if not isinstance(weight, DTensor):
        return True
    return _is_fsdp(type(head)) and sum(not isinstance(x, Replicate) for x in weight.placements) <= 1


def _weight(head: nn.Module) -> Tensor | None:
    """The weight, or ZeRO-3's placeholder for it. Reading the attribute would gather it."""
    return head._parameters.get("weight")
