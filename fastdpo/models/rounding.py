"""How far rounding alone moves the results of a model: the yardstick of `verify` and `fastdpo check`.

Two runs that are equal except for their rounding cannot be had by chance: the same kernels often
round alike for another order of rows, and not at all alike for other shapes. `perturbed` makes the
second run, as in Monte Carlo arithmetic (Parker 1997): the output of every layer is multiplied by
`1 + u`, with u uniform in half a unit of rounding to either side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

FACTOR = 4
"""A difference is beyond rounding if it is larger than this times the difference that rounding alone
has made, plus a few units of rounding.

In the first step of a training, the difference of a packed run from float64 is up to 1.7 times that
of a padded run, over families and seeds. A wrong mask, scale or position makes a difference that is
larger by orders of magnitude.
"""

_TF32 = 2.0**-10


def unit_of(model: nn.Module) -> float:
    """The unit of rounding of a model's matrix products: that of its parameters, of autocast, or of TF32."""
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    device, dtype = parameter.device.type, parameter.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    reduced = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _TF32 if reduced else torch.finfo(dtype).eps


def floor(unit: float) -> float:
    """The relative difference that is allowed whatever was measured: a few roundings, those of float32
    sums at least.
    """
    return max(unit, 64 * torch.finfo(torch.float32).eps)


def allowed(measured: float, unit: float) -> float:
    """The largest relative difference that rounding explains, where rounding alone has made `measured`."""
    return FACTOR * measured + floor(unit)


@contextmanager
def perturbed(model: nn.Module, unit: float) -> Iterator[None]:
    """In the block, each layer with parameters rounds its output at random, by up to half a unit.
    Uses torch's random numbers.
    """

    def perturb(module: nn.Module, args: tuple, output: object) -> object:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        noise = torch.empty_like(output, dtype=torch.float32).uniform_(-unit / 2, unit / 2)
        return (output.to(torch.promote_types(output.dtype, torch.float32)) * (1 + noise)).to(output.dtype)

    layers = [m for m in model.modules() if m._parameters and not m._modules]
    handles = [layer.register_forward_hook(perturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
