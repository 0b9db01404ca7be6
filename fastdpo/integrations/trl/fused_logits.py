"""Logits that were never computed, for trainers whose own code reads a few numbers per token from them.

TRL's `DPOTrainer` before 1.15 computes everything from `outputs.logits`, but reads only what
`ops.linear_logps` returns for each token: its log-probability, the entropy, the mean logit, whether
the label is the most likely token, and the sum of the squared probabilities. `FusedLogits` stands
for the logits in that code and knows these numbers. An operation that it does not know raises an
error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..replacements import Replacements


class FusedLogits:
    """Stands for logits [R, L, V], of which only results per token are known, [R, L-1] each.

    Args:
        rows: the `ScoredRows`, without an `aux_loss`.
        factor: by which the logits were multiplied.
    """

    def __init__(self, rows: Any, factor: float = 1.0):
        self.rows, self._factor = rows, factor

    def __getitem__(self, index: Any) -> FusedLogits:
        """`logits[..., :-1, :]`, for which the results are, or those of the tokens in a mask. All others then are zero:
        sums are the same, and no number is read from a device.
        """
        if isinstance(index, Tensor):
            return FusedLogits(self.rows.within(index))
        if index != (..., slice(None, -1), slice(None)):
            raise NotImplementedError(f"fused logits: index must be [..., :-1, :] or a mask; got {index}")
        return self

    def __getattr__(self, name: str) -> Tensor:
        results = vars(self)["rows"]._asdict() if "rows" in vars(self) else {}
        if results.get(name) is None:
            raise AttributeError(f"fused logits have no {name!r}")
        return results[name]

    def __rmul__(self, factor: float) -> FusedLogits:
        return FusedLogits(self.rows, factor * self._factor)

    def contiguous(self) -> FusedLogits:
        return self

    def detach(self) -> FusedLogits:
        return self._each(Tensor.detach)

    def size(self, dim: int) -> int:
        return self.logps.size(dim)

    def chunk(self, chunks: int, dim: int) -> list[FusedLogits]:
        return [self._each(lambda x, i=i: x.chunk(chunks, dim)[i]) for i in range(chunks)]

    def mean(self, dim: int) -> Tensor:
        return self.mean_logits

    def argmax(self, dim: int) -> _Predictions:
        return _Predictions(self.is_top1)

    @classmethod
    def __torch_function__(cls, function: Callable, types: object, args: tuple, kwargs: dict | None = None) -> Tensor:
        logits = args[0]
        if function is torch.logsumexp:  # TRL subtracts that of the logits, and so its value does not matter
            return torch.zeros_like(logits.logps) if logits._factor == 1 else logits._log_sum_of_squares()
        if function is F.cross_entropy:  # of tokens with their labels
            return logits.rows.nll()
        raise NotImplementedError(f"fused logits: {function.__name__} is not supported")

    def _log_sum_of_squares(self) -> Tensor:
        if self._factor != 2:
            raise NotImplementedError(f"fused logits: the factor must be 2; got {self._factor}")
        return self.log_sum_sq_probs

    def _each(self, function: Callable[[Tensor], Tensor]) -> FusedLogits:
        return FusedLogits(self.rows._make(None if x is None else function(x) for x in self.rows))


class _Predictions:
    """Stands for the most likely tokens, which can be compared with the labels."""

    def __init__(self, is_label: Tensor):
        self._is_label = is_label

    def __eq__(self, labels: object) -> Any:
        return self._is_label


RESULTS: dict[str, Callable[[FusedLogits], Any]] = {
    "selective_log_softmax": lambda logits: logits.logps,
    "entropy_from_logits": lambda logits: logits.entropy,
    "selective_log_softmax_and_entropy": lambda logits: (logits.logps, logits.entropy.detach()),
}
"""By the names of the functions of logits that TRL's trainer modules import, what they return for fused logits."""


def replace_functions(replacements: Replacements, module: ModuleType) -> None:
    """Makes the functions of logits in a trainer's module take fused logits, too."""
    for name, result in RESULTS.items():
        if hasattr(module, name):
            replacements.wrap(module, name, functools.partial(_function, result))


def _function(result: Callable[[FusedLogits], Any], stock: Callable, logits: Any, *args: Any, **kwargs: Any) -> Any:
    return result(logits) if isinstance(logits, FusedLogits) else stock(logits, *args, **kwargs)
