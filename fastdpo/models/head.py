"""Adds scoring to the head of a causal LM, so that calling the module returns log-probabilities.

Calling the module lets the hooks of engines (FSDP2, ZeRO-3, accelerate's `device_map`) gather its
weight and reduce its gradient. Only a plain `nn.Linear` is supported, whole or cut over the vocabulary
by transformers' tensor parallelism: any other hook or replaced forward would be bypassed.

A plan of `colwise_gather_output` or `colwise_rep` makes the weight and the bias DTensors with
consecutive rows on each rank, and replaces the head's forward by one that gathers the logits. FSDP2
may shard these rows again over other ranks. It gathers them before the head is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

from ..ops import VocabularyGroup
from ..ops.head.linear_logps import linear_logps
from ..reasons import Reason
from .functions import closure_contents, inner_function, module_of, name_of
from .harmless import ENGINES, is_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAST = "._cast_lm_head_to_fp32.<locals>.cast_forward_to_fp32"
"""The forward that TRL's `cast_lm_head_to_fp32` gives a head. It computes logits for generation; log-probabilities are
computed from the weight.
"""

GATHERING = "TensorParallelLayer.install_forward.<locals>.tp_forward"
"""The forward that tensor parallelism gives a head that is cut over the vocabulary."""

OWN_FORWARD = "_fastdpo_own_forward"
"""The attribute of a head that keeps its `CAST` or `GATHERING` forward while ours is installed."""

_StridedShard = getattr(placement_types, "_StridedShard", Replicate)
"""The placement by FSDP2 of a tensor that is a shard already. It has no public name."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
        return Reason("head-type", kind=type(head).__name__)
    is_cut = _gathers_logits(_own_forward(head))
    replaced = None if is_cut else _replaced_forward(head)
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
    return None if (_has_rows_on_all_ranks(head) if is_cut else _is_gathered(head)) else Reason("split-head")


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
    if head is None or not is_installed(vars(head).get(_forward_attribute(head))):
        return
    own = vars(head).pop(OWN_FORWARD, None)
    if "_hf_hook" in vars(head) or own is not None:
        vars(head)[_forward_attribute(head)] = own or MethodType(nn.Linear.forward, head)
    else:
        del vars(head)["forward"]


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


def hooks_of(module: nn.Module) -> Iterator[Callable]:
    for name in HOOKS:
        yield from vars(module)[name].values()


def forward(self: nn.Linear, input: Tensor, fastdpo_targets: Tensor | None = None, **options: Any) -> Any:
    """The head's own forward. Given targets [N] for hidden states [N, D], returns `TokenLogps` instead.

    A pickled method refers to its function by this name, which is that of `nn.Linear`'s when it is loaded.
    """
    if fastdpo_targets is None:
        own = vars(self).get(OWN_FORWARD)
        return nn.Linear.forward(self, input) if own is None else own(input)
    weight, bias, group = _local_parameters(self)
    return linear_logps(input, weight, fastdpo_targets, bias=bias, group=group, **options)


def is_hook_of_engine(hook: Callable) -> bool:
    """Whether a hook is one of those that gather and release the weights of a module (see `harmless.ENGINES`)."""
    return is_of(module_of(inspect.unwrap(inner_function(hook))), ENGINES)


def _is_linear(kind: type) -> bool:
    """Whether a class is nn.Linear, or the subclass of it that FSDP2 creates."""
    return kind is nn.Linear or (len(kind.__bases__) == 2 and kind.__bases__[1] is nn.Linear and _is_fsdp(kind))


def _is_fsdp(kind: type) -> bool:
    return kind.__module__.startswith("torch.distributed.fsdp.")


def _forward_attribute(head: nn.Module) -> str:
    """The attribute that holds the head's own forward. accelerate's hooks (`device_map`) move it."""
    return "_old_forward" if "_hf_hook" in vars(head) else "forward"


def _own_forward(head: nn.Module) -> object:
    """The head's forward before `install`. None if it is that of its class."""
    forward = vars(head).get(_forward_attribute(head))
    return vars(head).get(OWN_FORWARD) if is_installed(forward) else forward


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
    return _is_fsdp(type(head)) and sum(isinstance(placement, Shard) for placement in weight.placements) <= 1


def _weight(head: nn.Module) -> Tensor | None:
    """The weight, or ZeRO-3's placeholder for it. Reading the attribute would gather it."""
    return head._parameters.get("weight")


def _gathers_logits(forward: object) -> bool:
    """Whether a head's forward is `nn.Linear`'s on a part of the vocabulary, after which the logits
    of all ranks are gathered.
    """
    if not callable(forward) or name_of(forward) != GATHERING or not module_of(forward).startswith("transformers."):
        return False
    function: Any = inner_function(forward)
    variables = dict(zip(function.__code__.co_freevars, closure_contents(function), strict=True))
    style, inner = variables.get("self"), inner_function(variables.get("original_forward"))
    layouts = [getattr(style, name, None) for name in ("input_layouts", "output_layouts")]
    return inner is nn.Linear.forward and type(style).__name__ == "ColwiseParallel" and layouts == [Replicate()] * 2


def _has_rows_on_all_ranks(head: nn.Module) -> bool:
    """Whether every rank has some rows of the weight and, if there is one, the same of the bias.

    The result is the same on all ranks.
    """
    weight, bias = head._parameters["weight"], head._parameters.get("bias")
    return all(x is None or _is_cut_by_rows(x) for x in (weight, bias)) and min(_sizes(cast(DTensor, weight))) > 0


def _local_parameters(head: nn.Linear) -> tuple[Tensor, Tensor | None, VocabularyGroup | None]:
    """The weight and the bias of this rank, and the ranks that the vocabulary is cut over, if it is.

    Gradients reach the head's own parameters.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, None
    group = VocabularyGroup.of_sizes(_sizes(weight), weight.device_mesh.get_group())
    return weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else None, group


def _is_cut_by_rows(x: Tensor) -> bool:
    if not isinstance(x, DTensor):
        return False
    *of_fsdp, placement = x.placements
    is_by_rows = type(placement) is Shard and placement.dim == 0
    return is_by_rows and all(isinstance(other, _StridedShard | Replicate) for other in of_fsdp)


def _sizes(weight: DTensor) -> list[int]:
    mesh = weight.device_mesh
    return chunk_sizes(len(weight), mesh.size(mesh.ndim - 1))


def chunk_sizes(rows: int, ranks: int) -> list[int]:
    """The rows of each rank, as `Shard(0)` cuts them."""
    chunk = -(-rows // ranks)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]
