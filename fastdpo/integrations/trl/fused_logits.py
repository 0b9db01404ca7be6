"""A model's output whose logits were never computed, for trainers that read a few numbers per token.

TRL's `DPOTrainer` before 1.15 computes everything from `outputs.logits`, but reads only what
`ops.linear_logps` returns for each token: its log-probability, the entropy, the mean logit, whether
the label is the most likely token, and the sum of the squared probabilities. `FusedLogits` stands
for the logits in that code and knows these numbers. An operation that it does not know raises an
error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import ModelOutput

from ..replacements import Replacements

FUNCTIONS = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")
"""Functions of logits that TRL's trainer modules import."""


@dataclass
class FusedOutput(ModelOutput):
    """The output of a fused call, a `ModelOutput` so that DDP, FSDP2 and autocast find its tensors.

    Attributes:
        log_probs: of the token after each position, float [R, L-1], zero where nothing is scored,
            like the statistics.
        entropy: float [R, L-1].
        mean_logits: float [R, L-1].
        is_top1: bool [R, L-1].
        log_sum_sq_probs: float [R, L-1].
        aux_loss: of a router, a scalar.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    aux_loss: Tensor | None = None

    @property
    def logits(self) -> FusedLogits:
        return FusedLogits({name: self[name] for name in _PER_TOKEN if self.get(name) is not None})


_PER_TOKEN = [field.name for field in fields(FusedOutput) if field.name != "aux_loss"]


class FusedLogits:
    """Stands for logits [R, L, V], of which only results per token are known, [R, L-1] each.

    Args:
        results: by the names of `FusedOutput`.
        factor: by which the logits were multiplied.
    """

    def __init__(self, results: dict[str, Tensor], factor: float = 1.0):
        self._results, self._factor = results, factor

    def __getitem__(self, index: Any) -> FusedLogits:
        """`logits[..., :-1, :]`, for which the results are, or those of the tokens in a mask."""
        if isinstance(index, Tensor):
            return self._each(lambda x: x[index])
        if index != (..., slice(None, -1), slice(None)):
            raise NotImplementedError(f"fused logits: index must be [..., :-1, :] or a mask; got {index}")
        return self

    def __getattr__(self, name: str) -> Tensor:
        try:
            return vars(self)["_results"][name]
        except KeyError:
            raise AttributeError(f"fused logits have no {name!r}") from None

    def __rmul__(self, factor: float) -> FusedLogits:
        return FusedLogits(self._results, factor * self._factor)

    def contiguous(self) -> FusedLogits:
        return self

    def detach(self) -> FusedLogits:
        return self._each(Tensor.detach)

    def size(self, dim: int) -> int:
        return self.log_probs.size(dim)

    def chunk(self, chunks: int, dim: int) -> list[FusedLogits]:
        parts = {name: x.chunk(chunks, dim) for name, x in self._results.items()}
        return [FusedLogits(dict(zip(parts, part, strict=True))) for part in zip(*parts.values(), strict=True)]

    def mean(self, dim: int) -> Tensor:
        return self.mean_logits

    def argmax(self, dim: int) -> _Predictions:
        return _Predictions(self.is_top1)

    @classmethod
    def __torch_function__(cls, function: Callable, types: object, args: tuple, kwargs: dict | None = None) -> Tensor:
        logits = args[0]
        if function is torch.logsumexp:  # TRL subtracts that of the logits, and so its value does not matter
            return torch.zeros_like(logits.log_probs) if logits._factor == 1 else logits._log_sum_of_squares()
        if function is F.cross_entropy:  # of tokens with their labels
            return -logits.log_probs.mean()
        raise NotImplementedError(f"fused logits: {function.__name__} is not supported")

    def _log_sum_of_squares(self) -> Tensor:
        if self._factor != 2:
            raise NotImplementedError(f"fused logits: the factor must be 2; got {self._factor}")
        return self.log_sum_sq_probs

    def _each(self, function: Callable[[Tensor], Tensor]) -> FusedLogits:
        return FusedLogits({name: function(x) for name, x in self._results.items()})


class _Predictions:
    """Stands for the most likely tokens, which can be compared with the labels."""

    def __init__(self, is_label: Tensor):
        self._is_label = is_label

    def __eq__(self, labels: object) -> Any:
        return self._is_label

    def __hash__(self) -> NoReturn:
        raise TypeError("fused logits: predictions are not hashable")


def replace_functions(replacements: Replacements, module: ModuleType) -> None:
    """Makes the functions of logits in a trainer's module take fused logits, too."""
    results = dict(zip(FUNCTIONS, (_log_probs, _entropy, _log_probs_and_entropy), strict=True))
    for name in FUNCTIONS:
        if hasattr(module, name):
            replacements.put(module, name, _taking_fused_logits(getattr(module, name), results[name]))


def _taking_fused_logits(stock: Callable, result: Callable[[FusedLogits], Any]) -> Callable:
    @functools.wraps(stock)
    def function(logits, *args, **kwargs):
        return result(logits) if isinstance(logits, FusedLogits) else stock(logits, *args, **kwargs)

    return function


def _log_probs(logits: FusedLogits) -> Tensor:
    return logits.log_probs


def _entropy(logits: FusedLogits) -> Tensor:
    return logits.entropy


def _log_probs_and_entropy(logits: FusedLogits) -> tuple[Tensor, Tensor]:
    return logits.log_probs, logits.entropy.detach()
