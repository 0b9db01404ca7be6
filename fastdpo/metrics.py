"""Means over all ranks that are exact, at one collective a log and no synchronisation a step.

A mean of means is biased where batches are uneven, and gathering every value every step costs as many collectives as
there are metrics. Here each metric is a sum and a count on the device. They are reduced over the ranks, and read, when
a log is due.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .ops import checks
from .ops.preference_loss import PreferenceLoss
from .ops.results import TokenLogps


class Means:
    """Means of named values over tokens, pairs or steps, and over all ranks.

    Every rank names the same metrics in the same order, whether it has data or not.

    Args:
        names: of the metrics.
        device: where values come from, and where sums are kept: float64 [2, K], float32 where a device has no float64.
        group: of processes; the default group if None. Without `torch.distributed` there is one process.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
    ):
        if len(set(names)) != len(names):
            raise ValueError(f"Means: names must be distinct; got {list(names)}")
        self.names, self.group = tuple(names), group
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        self._sums_and_counts = torch.zeros(2, len(self.names), dtype=dtype, device=device)
        self._columns: dict[tuple[str, ...], Tensor] = {}

    def update(self, **values: Tensor) -> None:
        """Adds values, each of which counts once. Any shape and dtype; nothing is read on the host.

        Raises:
            ValueError: a name is not one of the metrics.
        """
        self.update_weighted({name: (value, None) for name, value in values.items()})

    def update_weighted(self, values: dict[str, tuple[Tensor, Tensor | None]]) -> None:
        """Adds values that count as often as their weights say, such as a mask; None: once each.

        Values whose weight is zero are left out, whatever they are.

        Raises:
            ValueError: a name is not one of the metrics, or a weight has another shape than its values.
        """
        unknown = values.keys() - set(self.names)
        if unknown:
            raise ValueError(f"Means: metrics must be among {', '.join(self.names)}; got {', '.join(sorted(unknown))}")
        for name, (value, weight) in values.items():
            fits = weight is None or weight.shape == value.shape
            rule = "have shape {}, that of its values"
            checks.require(fits, "Means", f"weight of {name}", rule, _shape(weight), _shape(value))
        if not values:
            return
        total = self._sums_and_counts
        added: list[Tensor] = []
        for value, weight in values.values():
            x = value.detach().to(total.dtype)
            if weight is None:
                added.append(torch.stack([x.sum(), x.new_full((), x.numel())]))
            else:
                w = weight.detach().to(total.dtype)
                added.append(torch.stack([torch.where(w != 0, x * w, 0.0).sum(), w.sum()]))
        total.index_add_(1, self._columns_of(tuple(values)), torch.stack(added, 1).to(total.device))

    def _columns_of(self, names: tuple[str, ...]) -> Tensor:
        """Made once: a copy to the device every step would be a synchronisation."""
        if names not in self._columns:
            columns = [self.names.index(name) for name in names]
            self._columns[names] = torch.tensor(columns, device=self._sums_and_counts.device)
        return self._columns[names]

    def compute(self) -> dict[str, float]:
        """The means over all ranks since the last call, and starts again. One collective, one synchronisation.

        All ranks of the group must call it. A metric that nothing was added to, on any rank, is NaN.
        """
        reduced = self._sums_and_counts.clone()
        self._sums_and_counts.zero_()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(reduced, group=self.group)
        sums, counts = reduced.tolist()
        return {name: s / n if n else float("nan") for name, s, n in zip(self.names, sums, counts, strict=True)}


def _shape(x: Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)


class PreferenceMeans(Means):
    """What preference training logs, under TRL's names.

    loss; rewards/chosen, rewards/rejected, rewards/margins and rewards/accuracies over pairs; logps/chosen and
    logps/rejected over pairs, in nats; entropy (nats) over all completion tokens, logits/chosen and logits/rejected
    over the tokens of each; mean_token_accuracy over the chosen tokens.
    """

    OF_PAIRS = (
        *("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )
    OF_TOKENS = ("entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy")

    def __init__(self, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None):
        super().__init__((*self.OF_PAIRS, *self.OF_TOKENS), device, group)

    def update_pairs(self, loss: PreferenceLoss, chosen_logps: Tensor, rejected_logps: Tensor) -> None:
        """Adds P pairs.

        Args:
            loss: of `ops.preference_loss`.
            chosen_logps, rejected_logps: [P] what it was given.
        """
        margins = loss.chosen_rewards - loss.rejected_rewards
        values = (loss.losses, loss.chosen_rewards, loss.rejected_rewards, margins, margins > 0)
        self.update(**dict(zip(self.OF_PAIRS, (*values, chosen_logps, rejected_logps), strict=True)))

    def update_tokens(self, tokens: TokenLogps, mask: Tensor) -> None:
        """Adds the tokens of P pairs.

        Args:
            tokens: with fields [2P, L], of which entropy, mean_logits and is_top1 are used where they are not None.
                Rows i and P + i are the chosen and the rejected of pair i.
            mask: [2P, L] bool or 0 and 1, where completion tokens are scored.

        Raises:
            ValueError: an argument breaks a rule above; the message names it.
        """
        op, shape = "PreferenceMeans", _shape(tokens.logps)
        for name, field in tokens._asdict().items():
            fits = field is None or _shape(field) == shape
            checks.require(fits, op, "tokens", "have fields {}", f"{name} {_shape(field)}", shape)
        checks.require(_shape(mask) == shape, op, "mask", "have shape {}, that of tokens", _shape(mask), shape)
        checks.require(len(mask) % 2 == 0, op, "mask", "have an even number of rows", len(mask))
        chosen, rejected = mask.chunk(2)
        values: dict[str, tuple[Tensor, Tensor | None]] = {}
        if tokens.entropy is not None:
            values["entropy"] = (tokens.entropy, mask)
        if tokens.mean_logits is not None:
            of_chosen, of_rejected = tokens.mean_logits.chunk(2)
            values["logits/chosen"], values["logits/rejected"] = (of_chosen, chosen), (of_rejected, rejected)
        if tokens.is_top1 is not None:
            values["mean_token_accuracy"] = (tokens.is_top1.chunk(2)[0], chosen)
        self.update_weighted(values)
