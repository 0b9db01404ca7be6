"""Keeps the results of fused calls from being rounded by FSDP2.

With mixed precision, FSDP2 casts what a module returns to `MixedPrecisionPolicy.output_dtype`, which
accelerate sets to bfloat16. Log-probabilities of tokens would be off by up to 0.4 % each, and their
gradients be rounded as well.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_policies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The policies that were replaced, by the states of FSDP2 that had them."""


def keep(model: nn.Module, head: nn.Module) -> None:
    """Lets a head, and the modules that contain it, return what they compute without a cast.

    To be called inside a forward of the model, when FSDP2 knows all of its modules.
    """
    for state in _states(model, head):
        policy = state._mp_policy
        if policy.output_dtype is not None:
            _policies[state] = policy
            state._mp_policy = dataclasses.replace(policy, output_dtype=None)


def restore(model: nn.Module, head: nn.Module) -> None:
    """Undoes `keep`."""
    for state in _states(model, head):
        if state in _policies:
            state._mp_policy = _policies.pop(state)


def _states(model: nn.Module, head: nn.Module) -> list[Any]:
    """The states of FSDP2 for the head and the modules around it, wrappers of the model included."""
    unit = next((m for m in model.modules() if isinstance(m, FSDPModule)), None)
    if unit is None:
        return []
    states = unit._get_fsdp_state()._state_ctx.all_states
    return [state for state in states if any(head is x for m in state._modules for x in m.modules())]
