"""Compares known functions on packed tokens with the same functions on whole rows.

A model's probe cannot replace this: with the weights that models start from, a lost state may
change hidden states by as little as rounding does. Here the inputs are random and decay slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...accuracy import MIXER_BOUND, MIXER_KERNEL_BOUND, row_errors
from ...logs import warn
from ...reasons import Reason
from . import current
from .current import RunningMixer
from .finding import called_by, functions_of, mixers_of
from .known import KNOWN, REFUSED, calls_kernel, wrapper
from .segments import Segments, gather, gather_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPS = ((150, (20, 33, 2)), (2, (5, 64)))
"""Tokens of the prefix and of the branches of two groups of rows.

Sharing takes 11 chunks of 64 tokens, and whole rows take 15, so that states are shared. One prefix
is shorter than the reach of a convolution.
"""


def unsupported_reason(
    model: PreTrainedModel, device: torch.device, switch: Callable[[PreTrainedModel], None]
) -> Reason | None:
    """How a known function of a model's mixers differs on packed tokens; None if none does.

    Kernels that differ are refused before, with a warning: once the model has been switched again, the mixers that call
    them run on whole rows.
    """
    wrong = {x: reason for name, x in _functions(model) if calls_kernel(x) and (reason := difference(name, x, device))}
    REFUSED.update(wrong)
    for reason in wrong.values():
        warn(f"mixers of {type(model).__name__} run on whole rows, since the kernel of {reason.named}")
    if wrong:
        switch(model)
    return next(filter(None, (difference(name, x, device) for name, x in _functions(model))), None)


def _functions(model: PreTrainedModel) -> list[tuple[str, Callable]]:
    """The known functions that a model's mixers call on packed tokens, by name."""
    found = {(name, functions_of(mixer)[name]) for mixer in mixers_of(model) for name in called_by(mixer)}
    return sorted(found, key=lambda each: each[0])


@functools.cache
def difference(name: str, original: Callable, device: torch.device) -> Reason | None:
    """How a known function differs on packed tokens and on whole rows; None if it does not."""
    segments = Segments(_rows(), device)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            packed, whole = (_results(name, original, segments, run) for run in (_packed, _whole))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # kernels raise anything for arguments that they do not expect
        return Reason("mixer-cannot-run", function=name, error=f"{type(error).__name__}: {error}")
    errors = [row_errors(x.flatten(), y.flatten()) for x, y in zip(packed, whole, strict=True)]
    error = torch.stack(errors).max().item()
    if error <= (MIXER_KERNEL_BOUND if calls_kernel(original) else MIXER_BOUND):
        return None
    return Reason("different-mixer", function=name, error=error)


def _results(name: str, original: Callable, segments: Segments, run: Callable[..., Tensor]) -> list[Tensor]:
    """A function's results for the tokens of all rows, and the gradients of a weighted sum of them."""
    args, kwargs = KNOWN[name].example(segments.tokens, _randoms(segments.device))
    inputs = [x.requires_grad_() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    rows = run(name, original, segments, args, kwargs)
    weighted = rows * _randoms(segments.device)(*rows.shape)
    return [rows.detach(), *torch.autograd.grad(weighted.sum(), inputs)]


def _packed(name: str, original: Callable, segments: Segments, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """What a mixer gets from its function, for the tokens of all rows [R, ...]."""
    current.begin(RunningMixer(segments, frozenset({name})))
    try:
        result = wrapper(name, original)(*args, **kwargs)
    finally:
        current.end()
    (index,), time = segments.whole_rows.batches, KNOWN[name].time
    return _rows_of(gather(_output(result), time, index), time, index < segments.tokens)


def _whole(name: str, original: Callable, segments: Segments, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    (index,), time = segments.whole_rows.batches, KNOWN[name].time
    args, kwargs = gather_all((args, kwargs), time, segments.tokens, index)
    return _rows_of(_output(original(*args, **kwargs)), time, index < segments.tokens)


def _rows_of(output: Tensor, time: int, real: Tensor) -> Tensor:
    return output.movedim(time, 1)[real]


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _rows() -> list[list[int]]:
    """Rows of a layout, as in `Layout.rows`."""
    rows, end = [], 0
    for prefix, branches in GROUPS:
        start = end
        for i, branch in enumerate(branches):
            rows.append([start, prefix if i else 0, end, branch if i else prefix + branch])
            end += rows[-1][3]
    return rows


def _randoms(device: torch.device) -> Callable[..., Tensor]:
    """Draws tensors of given sizes, the same ones each time."""
    generator = torch.Generator("cpu").manual_seed(0)
    return lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float32, device="cpu").to(device)
