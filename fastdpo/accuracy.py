"""The yardstick of "equal up to rounding": errors, units and bounds, for ops, kernels and whole models.

A bound follows from what is measured: the error of plain PyTorch in the same dtype, or how far
rounding alone moves the results of the same model. Two runs that are equal except for their rounding
cannot be had by chance: the same kernels often round alike for another order of rows, and not at all
alike for other shapes. A run whose rounding is perturbed takes their place, as in Monte Carlo
arithmetic (Parker 1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FLOAT32 = torch.finfo(torch.float32).eps
TF32 = 2.0**-10

LEAST_UNIT_OF_KERNELS = 2.0**-16
"""Float32 results of kernels are sums of many products, which devices add in different orders."""

PROBE_FACTOR = 8
"""Allowed error of a probe, in units of the error that one rounding makes. Over 32 families and depths
of 2 to 32 layers, in float32, bfloat16 and float16, packing alone moved hidden states by 0.2 to 1.0
times as much as one rounding of the input embeddings (torch 2.13 on a CPU).
"""

LARGEST_PROBE_ERROR = 0.1
"""A wrong mask, window or position changes hidden states by tenths of their norm. No model is
allowed as much, however strongly it amplifies rounding.
"""

PARAMETER_BOUND = 2.0**-5
"""Allowed error of the gradient of one parameter. Where it is a small difference of large sums, as that of a
decay in a recurrence of newly initialized weights, rounding in float32 moved it by 1.7 %.
"""

MIXER_BOUND = 1e-3
"""Results and gradients of correct functions of mixers differed by up to 5e-7 of their norm (float32
on a CPU), and a lost state or halo changes them by 0.1 or more. Products in TF32 differ by less than
this.
"""

MIXER_KERNEL_BOUND = 2e-2
"""As `MIXER_BOUND`, for kernels: they multiply in TF32 or bfloat16, in several steps one after the
other.
"""


def error(x: Tensor, exact: Tensor, *, equal_nan: bool = False, scale: Tensor | None = None) -> float:
    """Relative error `||x - exact|| / ||exact||` in float64, or `||x - exact|| / ||scale||`.

    Equal elements, including infinities, have no error. With `equal_nan`, NaN equals NaN.
    """
    x, exact = x.detach().to(exact.device).double(), exact.detach().double()
    equal = (x == exact) | (x.isnan() & exact.isnan()) if equal_nan else x == exact
    difference = torch.where(equal, 0.0, x - exact).norm()
    size = (torch.where(exact.isfinite(), exact, 0.0) if scale is None else scale).norm()
    return float(difference / size if size > 0 else difference)


def row_errors(x: Tensor, expected: Tensor) -> Tensor:
    """Relative errors [...] of vectors [..., D], in float32 where the vectors are. NaN and infinities
    have the error NaN.
    """
    expected = expected.float()
    return (x.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)


def floor(dtype: torch.dtype) -> float:
    """The error allowed for any op of this dtype: one rounding, or a few of its float32 sums."""
    return 1e-12 if dtype == torch.float64 else max(torch.finfo(dtype).eps, 8 * FLOAT32)


def kernel_bound(dtype: torch.dtype) -> float:
    """The largest error of a kernel's results on a small case: 8 units of rounding of their dtype."""
    return 8 * max(torch.finfo(dtype).eps, LEAST_UNIT_OF_KERNELS)


def run_bound(rounding: float, unit: float) -> float:
    """The largest relative difference between two runs of a model where rounding alone makes the
    difference `rounding`.

    In the first step of a training, the difference of a packed run from float64 is up to 1.7 times
    that of a padded run, over families and seeds. A wrong mask, scale or position makes a difference
    that is larger by orders of magnitude. Next to it, a few roundings are allowed, those of float32
    sums at least.

    Args:
        rounding: the difference that `perturbed` makes with `random_rounding`.
        unit: of rounding (see `training_unit`).
    """
    return 4 * rounding + max(unit, 64 * FLOAT32)


class Difference(NamedTuple):
    """How far a quantity of a fused run is from that of a stock one.

    Attributes:
        name: of the quantity.
        size: the relative difference `||fused - stock|| / ||stock||`; None if the two are not compared as numbers.
        rounding: the difference that rounding alone makes, as far as it was measured.
        allowed: the largest difference that rounding explains.
        detail: where the difference is largest, or why there is no size, or "".
    """

    name: str
    size: float | None = None
    rounding: float | None = None
    allowed: float | None = None
    detail: str = ""

    @property
    def is_explained(self) -> bool:
        if self.size is None or self.allowed is None:
            return not self.detail
        return self.size <= self.allowed  # not for NaN

    def __str__(self) -> str:
        if self.size is None:
            return f"{self.name}: {self.detail}"
        return f"{self.name} by {self.size:.1e} (at most {self.allowed:.1e}{self.detail})"


def run_difference(
    name: str,
    fused: Tensor | None,
    stock: Tensor | None,
    rounded: Tensor | None,
    unit: float,
    *,
    scale: Tensor | None = None,
    count: float | None = None,
) -> Difference:
    """The difference of a quantity of any shape, None on a side that has not computed it.

    Args:
        name: of the quantity.
        fused, stock: the two sides.
        rounded: stock, rounded otherwise (see `perturbed`), or `stock` itself, so that a few units are allowed alone.
        unit: of rounding (see `training_unit`).
        scale: what differences are relative to; by default, what stock has computed.
        count: the difference that one flipped comparison makes, if the quantity counts comparisons.
    """
    if stock is None or any(x is None or x.shape != stock.shape for x in (fused, rounded)):
        shapes = [None if x is None else list(x.shape) for x in (fused, stock)]
        return Difference(name, detail=f"fastdpo has computed {shapes[0]}, stock {shapes[1]}")
    size, rounding = (error(x, stock, scale=scale) for x in (fused, rounded) if x is not None)
    allowed = run_bound(rounding, unit) if count is None else 2 * rounding + count
    return Difference(name, size, rounding, allowed)


def probe_bound(rounding: float) -> float:
    """The largest relative difference of packed hidden states where `rounding` is how far they move
    when the input embeddings change by one rounding error.
    """
    return min(PROBE_FACTOR * rounding, LARGEST_PROBE_ERROR)


def gradient_bound(rounding: float, *, of_parameter: bool) -> float:
    """As `probe_bound`, for the gradients of packed rows: of one parameter, or of all and of the embeddings' output."""
    return max(PROBE_FACTOR * rounding, PARAMETER_BOUND if of_parameter else 0.0)


def training_unit(model: nn.Module) -> float:
    """The unit of rounding of a model's matrix products as it trains now: that of its parameters, of
    autocast, or of TF32 if torch may use it.
    """
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    device, dtype = parameter.device.type, parameter.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    reduced = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return TF32 if reduced else torch.finfo(dtype).eps


def product_unit(device: torch.device) -> float:
    """The relative error of float32 products on a device: of float32, or of TF32, which is measured, since a bound
    of a probe may not be too wide.
    """
    x = torch.randn(64, 64, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    exact = x.double() @ x.double()
    product = (x.to(device) @ x.to(device)).cpu()
    return max(FLOAT32, ((product - exact).norm() / exact.norm()).item())


def random_rounding(x: Tensor, unit: float) -> Tensor:
    """`x * (1 + u)`, with u uniform in half a unit of rounding to either side. Uses torch's random
    numbers.
    """
    noise = torch.empty_like(x, dtype=torch.float32).uniform_(-unit / 2, unit / 2)
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * (1 + noise)).to(x.dtype)


def fixed_rounding(x: Tensor, unit: float) -> Tensor:
    """Multiplies entries by 1 + unit or 1 - unit, without drawing random numbers, with at least the
    unit of their dtype: FSDP computes in another one than that of the parameters.
    """
    unit = max(unit, torch.finfo(x.dtype).eps)
    return (x * (1 + unit * torch.sin(1e4 * x.float()).sign())).to(x.dtype)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that have parameters and no other modules."""
    return [module for module in model.modules() if module._parameters and not module._modules]


@contextmanager
def perturbed(modules: Iterable[nn.Module], rounding: Callable[[Tensor, float], Tensor], unit: float) -> Iterator[None]:
    """In the block, the outputs of these modules are rounded once more, by `random_rounding` or
    `fixed_rounding`. Outputs other than floating-point tensors stay as they are.
    """

    def perturb(module: nn.Module, args: tuple, output: Any) -> Any:
        return rounding(output, unit) if isinstance(output, Tensor) and output.is_floating_point() else output

    with ExitStack() as handles:
        for module in modules:
            handles.enter_context(module.register_forward_hook(perturb))
        yield
