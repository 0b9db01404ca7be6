"""Models that ranks hold parts of and run together: FSDP, tensor parallelism and DeepSpeed's ZeRO-3.

With mixed precision, FSDP2 casts what a module returns to `MixedPrecisionPolicy.output_dtype`, which
accelerate sets to bfloat16. Log-probabilities of tokens would be off by up to 0.4 % each, and their
gradients be rounded as well. `keep_output_dtypes` keeps the results of fused calls from it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...distributed import gather_objects
from ...reasons import Reason
from ..examine.comparable import with_values

_policies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The policies that were replaced, by the states of FSDP2 that had them."""


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of a model and so run it together:
    FSDP, tensor parallelism or ZeRO-3.
    """
    in_units = any(type(module).__module__.startswith("torch.distributed.fsdp.") for module in model.modules())
    return in_units or any(isinstance(x, DTensor) or hasattr(x, "ds_id") for x in model.parameters())


def shared_reason(model: nn.Module, reason: Reason | None) -> Reason | None:
    """The reason of the first rank that has one, where ranks run a model together: they must take
    the same path.

    Every rank must call this if the model is sharded. Otherwise each rank keeps its own reason.
    """
    if not is_sharded(model):
        return reason
    return next((each for each in gather_objects(reason) if each is not None), None)


def local_shard(x: Any) -> Tensor:
    """The elements of a parameter or buffer that this process holds, as a plain tensor.

    Raises:
        NotImplementedError: DeepSpeed has moved them to a disk.
    """
    if isinstance(x, DTensor):
        return x.to_local()
    if not hasattr(x, "ds_id"):
        return x
    if x.ds_tensor.numel() < x.ds_tensor.ds_numel:
        raise NotImplementedError("DeepSpeed has moved parameters to a disk (offload_param)")
    return x.ds_tensor


def reshard(model: nn.Module) -> None:
    """Gives each FSDP2 module of a model its shards back, without communication.

    A forward pass without a backward pass leaves some modules with whole parameters, in the dtype
    of mixed precision. Pass the outermost module, such as the `PeftModel`: it holds the shards of
    all parameters that no module inside it does.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def parameters_of_run(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Yields the parameters of a model by their names, in which FSDP2 then puts those that a forward pass in the
    block has used in the place of its shards.

    The block may run a backward pass inside a forward pass of the model: what the latter has gathered stays, and
    accumulated gradients are not reduced.
    """
    found = dict(model.named_parameters())
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, cast(type, FSDPModule))}

    def collect(prefix: str, unit: nn.Module, args: tuple) -> None:
        found.update(unit.named_parameters(prefix=prefix))

    states = _all_states(model)
    values = [(state._state_ctx, "iter_forward_root", state._state_ctx.iter_forward_root) for state in states]
    for state in states:
        groups = _groups(state)
        values += [(x, "_training_state", x._training_state) for x in (state, *groups)]
        values += [(group, "reduce_grads", False) for group in groups]
        values += [(group, "reshard_after_backward", False) for group in groups if group.is_unsharded]
    with ExitStack() as handles, with_values(values):
        for name, unit in units.items():
            handles.enter_context(unit.register_forward_pre_hook(functools.partial(collect, name)))
        yield found


def keep_output_dtypes(model: nn.Module, head: nn.Module) -> None:
    """Lets a head, and the modules that contain it, return what they compute without a cast.

    To be called inside a forward of the model, when FSDP2 knows all of its modules.
    """
    for state in _states(model, head):
        policy = state._mp_policy
        if policy.output_dtype is not None:
            _policies[state] = policy
            state._mp_policy = dataclasses.replace(policy, output_dtype=None)


def restore_output_dtypes(model: nn.Module, head: nn.Module) -> None:
    """Undoes `keep_output_dtypes`."""
    for state in _states(model, head):
        if state in _policies:
            state._mp_policy = _policies.pop(state)


def _states(model: nn.Module, head: nn.Module) -> list[Any]:
    """The states of FSDP2 for the head and the modules around it, wrappers of the model included."""
    return [state for state in _all_states(model) if any(head is x for m in state._modules for x in m.modules())]


def _all_states(model: nn.Module) -> list[Any]:
    """The states of FSDP2, those of wrappers of the model included."""
    unit = next((m for m in model.modules() if isinstance(m, FSDPModule)), None)
    return [] if unit is None else unit._get_fsdp_state()._state_ctx.all_states


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a state of FSDP2: one at most before torch 2.13."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
