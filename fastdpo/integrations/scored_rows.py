"""What a custom training loop or a trainer line gets of a batch: per-token results instead of logits.

The function of a line gives the model a padded batch with labels, and computes from `ScoredRows` what
the trainer computes from logits. The rows of several batches may be scored in one call, in which they
share their prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..models import forward, parts
from ..models.examine import support
from ..models.parts import base_of
from ..models.ranks import sharding
from ..models.scoring import router_loss
from ..models.state import ScoredBatch
from ..ops import TokenLogps, token_logps
from ..packing import IGNORE_INDEX
from ..reasons import Reason

if TYPE_CHECKING:
    from .trl.fused_logits import FusedLogits

Inputs = dict[str, Any]
"""Arguments of a model call: `input_ids`, `attention_mask` and `labels`, [R, L] each, and options such
as `output_router_logits`. In a batch of pairs, the chosen rows come first.
"""

T = TypeVar("T")

RowOrder = Literal["halves", "interleaved"]
"""How the rows of P pairs follow each other: P chosen rows and then P rejected ones, or chosen and rejected in turn."""


class ScoredRows(NamedTuple):
    """Rows whose tokens were scored. A tuple, so that DDP, FSDP2 and autocast find its tensors.

    Attributes:
        logps: log-probability of the token after each position, in nats, float [R, W], zero where nothing is
            scored, like the statistics. W is L - 1 for rows of L tokens, and L for shifted labels. Differentiable.
        mask: bool [R, W], where a token is scored.
        entropy: float [R, W]; None, like the other statistics, if it was not requested.
        mean_logits: float [R, W].
        is_top1: bool [R, W].
        log_sum_sq_probs: float [R, W].
        aux_loss: of a router, a scalar; None if the call did not ask for it.
    """

    logps: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    aux_loss: Tensor | None = None

    @classmethod
    def of(cls, config: Any, scored: ScoredBatch, kwargs: dict | None = None) -> ScoredRows:
        """The rows of a fused call of a model with this configuration (see `forward.MakeOutput`)."""
        return cls.of_tokens(scored.logps, scored.label_mask, router_loss(config, scored))

    @classmethod
    def of_tokens(cls, tokens: TokenLogps, mask: Tensor, aux_loss: Tensor | None = None) -> ScoredRows:
        results = tokens._asdict()
        return cls(results.pop("logps"), mask, **results, aux_loss=aux_loss)

    @classmethod
    def of_output(cls, output: Any, targets: Tensor, outputs: Sequence[str] = ()) -> ScoredRows:
        """The rows of a call that fell back, from the logits that the model returned.

        Args:
            output: of the model, with `logits` [R, L, V].
            targets: of each position, [R, W].
            outputs: the statistics (see `ops.token_logps`).
        """
        logits = output.logits[:, : targets.shape[1]]
        targets = targets.to(logits.device)
        tokens = token_logps(logits, targets, outputs=("logps", *outputs))
        return cls.of_tokens(tokens, targets != IGNORE_INDEX, getattr(output, "aux_loss", None))

    @property
    def tokens(self) -> TokenLogps:
        """The log-probabilities and statistics alone, as `PreferenceMeans.update_tokens` takes them."""
        return TokenLogps(**{name: getattr(self, name) for name in TokenLogps._fields})

    @property
    def logits(self) -> FusedLogits:
        """What stands for the logits in a trainer's own code."""
        from .trl.fused_logits import FusedLogits

        return FusedLogits(self._replace(aux_loss=None))

    def counts(self) -> Tensor:
        """The number of scored tokens of each row, int64 [R]."""
        return self.mask.sum(1)

    def sums(self, weights: Tensor | None = None) -> Tensor:
        """The log-probability of each row [R]. `weights` are those of its tokens [R, W]."""
        return (self.logps if weights is None else self.logps * weights).sum(1)

    def means(self) -> Tensor:
        """The mean log-probability of each row [R], zero for a row without scored tokens."""
        return self.sums() / self.counts().clamp(min=1)

    def nll(self) -> Tensor:
        """The mean negative log-likelihood of all tokens."""
        return -self.sums().sum() / self.counts().sum()

    def mean_logit(self) -> Tensor:
        """The mean of the logits of all tokens."""
        return masked_mean(self._mean_logits(), self.mask)

    def mean_logits_of_rows(self) -> Tensor:
        """The mean of the logits of each row [R]."""
        return masked_mean(self._mean_logits(), self.mask, 1)

    def halves(self, order: RowOrder = "halves") -> tuple[ScoredRows, ScoredRows]:
        """The chosen rows and the rejected ones.

        Args:
            order: "halves" if all chosen rows come first, "interleaved" if each is followed by its rejected row.

        Raises:
            ValueError: the order is another one, or the number of rows is odd.
        """
        orders, pairs = get_args(RowOrder), len(self.mask) // 2
        checks.require(order in orders, "halves", "order", f"be one of {orders}", repr(order))
        checks.require(len(self.mask) == 2 * pairs, "halves", "rows", "be pairs", len(self.mask))
        first, step = (slice(pairs), 1) if order == "halves" else (slice(0, None, 2), 2)
        return self.rows(first), self.rows(slice(pairs if step == 1 else 1, None, step))

    def rows(self, rows: slice, width: int | None = None) -> ScoredRows:
        """Some of the rows, cut to this width."""
        *tensors, aux_loss = self
        return ScoredRows(*(None if x is None else x[rows, :width] for x in tensors), aux_loss)  # pyright: ignore

    def within(self, mask: Tensor) -> ScoredRows:
        """The rows with the tokens in a mask [R, W] only."""
        mask = mask.to(self.mask.device) & self.mask
        *tensors, aux_loss = self
        return ScoredRows(*(None if x is None else x * mask for x in tensors), aux_loss)  # pyright: ignore

    def ld_weights(self, alpha: float, index: Tensor | None = None) -> Tensor:
        """The weights of LD-DPO (arXiv 2409.06411) [R, W]: `alpha` for tokens after the length of the
        shorter row of a pair, and 1 for those before.

        `index` numbers the tokens of each row from 0, [R, W]. By default, the scored ones are numbered.
        """
        counts = self.counts()
        shorter = torch.minimum(*counts.chunk(2)).repeat(2)
        index = self.mask.cumsum(1) - 1 if index is None else index
        return torch.where(index < shorter[:, None], 1.0, alpha)

    def _mean_logits(self) -> Tensor:
        if self.mean_logits is None:
            rule = "be requested, as by fastdpo.prepare(model, outputs=['mean_logits'])"
            raise ValueError(f"ScoredRows: mean_logits must {rule}; got None")
        return self.mean_logits


def label_mask(labels: Tensor) -> Tensor:
    """Where the next token of rows [R, L] has a label, bool [R, L-1]."""
    return labels[:, 1:] != IGNORE_INDEX


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean over a mask of the same shape, of all elements or along a dimension."""
    return (x * mask).sum(dim) / mask.sum(dim)


def score(
    model: Any,
    integration: str,
    inputs: Inputs | Reason,
    results: Callable[[ScoredRows], T],
    stock: Callable[[Callable], T],
) -> T:
    """Calls a model once and returns what the trainer computes from it.

    Args:
        model: with a fused forward whose output is made by `ScoredRows.of`, or with such a model inside.
        integration: name of the trainer.
        inputs: of the model, or the reason why the batch is not supported.
        results: computes the return value from the scored rows.
        stock: the trainer's own function of a model. If the call fell back, it is given a function
            that returns the output of that call, with logits.
    """
    if isinstance(inputs, Reason):
        forward.record_fallback(model, integration, inputs)
        return stock(model)
    output = model(**inputs, fused_lm_head=support.wrapping_reason(model) or True)
    return results(output) if isinstance(output, ScoredRows) else stock(lambda *args, **kwargs: output)


def equal_when_merged(model: nn.Module, a: Tensor, b: Tensor) -> bool:
    """Whether one fused call for the rows of two batches has the results of one for each batch.

    Args:
        model: the model, which may be wrapped.
        a: tokens [R, L] of one batch.
        b: those of the other, [R2, L2].
    """
    base = base_of(model, "equal_when_merged")
    if not forward.will_be_fused(base, in_doubt=False) or (base.training and parts.has_dropout(base)):
        return False
    if parts.rope_limit(base) is None:
        return True
    if sharding.is_sharded(base):  # ranks that run it together must agree, and see other widths
        return False
    widths = a.shape[1], b.shape[1]
    return widths[0] == widths[1] or support.rope_reason(base, max(widths)) is None


def merged(*batches: Mapping[str, Tensor], padding: int = 0) -> dict[str, Tensor]:
    """The rows of batches, one batch below the other, padded on the right to the widest.

    Args:
        batches: their rows by name, such as "input_ids" and "labels", [R, ..., L] each, or [R]. All have the names of
            the first one.
        padding: the id that "input_ids" are padded with, by which reward models find the end of a row.
    """
    fills = {"labels": IGNORE_INDEX, "input_ids": padding}

    def of(name: str) -> Tensor:
        tensors = [batch[name] for batch in batches]
        if tensors[0].ndim == 1:
            return torch.cat(tensors)
        width = max(x.shape[-1] for x in tensors)
        return torch.cat([F.pad(x, (0, width - x.shape[-1]), value=fills.get(name, 0)) for x in tensors])

    return {name: of(name) for name in batches[0]}


def parts_of(output: Any, a: Tensor, b: Tensor) -> list[Any]:
    """The output of a model for `merged` rows, as one for each of the two batches: `ScoredRows`, or one with
    `logits` if the call fell back.

    Args:
        output: of the model.
        a, b: tokens of the batches, [R, L] and [R2, L2].
    """
    parts, start = [], 0
    for rows, width in (a.shape, b.shape):
        part = slice(start, start := start + rows)
        if isinstance(output, ScoredRows):
            parts.append(output.rows(part, width - 1))
        else:
            parts.append(SimpleNamespace(logits=output.logits[part, :width]))
    return parts
