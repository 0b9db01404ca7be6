"""Exact means over all ranks, with one collective per log and no synchronization per step.

A mean of means is biased if batches differ in size, and gathering every value in every step takes
one collective per metric. Here, each metric is a sum and a count on the device, which are reduced
over the ranks and read once per log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .ops.head.results import TokenLogps
from .ops.losses.preference_loss import PreferenceLoss


class Means:
    """Means of named values over tokens, pairs or steps, and over all ranks.

    Every rank must name the same metrics in the same order, even if it has no data.

    Args:
        names: names of the K metrics.
        device: the device of the values and of the sums. Sums and counts are float64 [2, K], or
            float32 on devices without float64.
        group: the process group, or None for the default group. Without `torch.distributed`, the
            means are those of one process.

    Raises:
        ValueError: two names are equal.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
    ):
        is_sequence = isinstance(names, Sequence) and not isinstance(names, str)
        named = is_sequence and all(isinstance(name, str) for name in names)
        checks.require(named, "Means", "names", "be a sequence of strings", checks.shown(names), error=TypeError)
        checks.require(len(set(names)) == len(names), "Means", "names", "be distinct", list(names))
        try:
            device = torch.device(device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"Means: device must be a device or its name; got {checks.shown(device)}") from error
        self.names, self.group = tuple(names), group
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums_and_counts = torch.zeros(2, len(self.names), dtype=dtype, device=device)

    def update(self, **values: Tensor) -> None:
        """Adds values of any shape and dtype, with weight 1 each, without a synchronization.

        Raises:
            ValueError: a name is not one of the metrics.
        """
        self.update_weighted({name: (value, None) for name, value in values.items()})

    def update_weighted(self, values: dict[str, tuple[Tensor, Tensor | None]]) -> None:
        """Adds values with weights of the same shape, such as a mask.

        A weight of None stands for 1.

        Values with weight zero are ignored, even if they are NaN or infinite.

        Raises:
            ValueError: a name is not one of the metrics, or the shape of a weight is not that of
                its values.
            TypeError: a metric does not have a pair of tensors; the message names it.
        """
        unknown = values.keys() - set(self.names)
        if unknown:
            raise ValueError(f"Means: metrics must be among {', '.join(self.names)}; got {', '.join(sorted(unknown))}")
        for name, pair in values.items():
            is_pair = isinstance(pair, tuple | list) and len(pair) == 2
            rule = "be a pair of values and weights"
            checks.require(is_pair, "Means", name, rule, checks.shown(pair), error=TypeError)
            value, weight = pair
            tensors = {name: value} if weight is None else {name: value, f"weight of {name}": weight}
            checks.require_tensors("Means", **tensors)
            if not self._sums_and_counts.is_meta:
                checks.require_values("Means", **tensors)
            checks.require_real("Means", **tensors)
            checks.require_same_device("Means", **tensors)
            fits = weight is None or weight.shape == value.shape
            rule = "have shape {}, that of its values"
            checks.require(fits, "Means", f"weight of {name}", rule, _shape(weight), _shape(value))
        if not values:
            return
        total = self._sums_and_counts
        added = dict.fromkeys(self.names, total.new_zeros(2))
        for name, (value, weight) in values.items():
            x = value.detach().to(total.dtype)
            if weight is None:
                of_metric = torch.stack([x.sum(), x.new_full((), x.numel())])
            else:
                w = weight.detach().to(total.dtype)
                of_metric = torch.stack([torch.where(w != 0, x * w, 0.0).sum(), w.sum()])
            added[name] = of_metric.to(total.device)
        total += torch.stack([*added.values()], 1)

    def compute(self) -> dict[str, float]:
        """Returns the means over all ranks since the last call and resets them.

        Takes one collective and one synchronization. All ranks of the group must call it. A metric
        without values on any rank is NaN.
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
    """The metrics of preference training, under TRL's names.

    - Over pairs: loss, rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies, and
      logps/chosen and logps/rejected in nats.
    - Over all completion tokens: entropy in nats.
    - Over the tokens of the chosen or the rejected completions: logits/chosen, logits/rejected.
    - Over the tokens of the chosen completions: mean_token_accuracy.

    Arguments as in `Means`.
    """

    PAIR_METRICS = (
        *("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    )
    TOKEN_METRICS = ("entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy")

    def __init__(self, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None):
        super().__init__((*self.PAIR_METRICS, *self.TOKEN_METRICS), device, group)

    def update_pairs(
        self,
        loss: PreferenceLoss | Tensor,
        chosen_logps: Tensor,
        rejected_logps: Tensor,
        *,
        chosen_rewards: Tensor | None = None,
        rejected_rewards: Tensor | None = None,
    ) -> None:
        """Adds P pairs.

        Args:
            loss: the result of `ops.preference_loss`, or the losses [P] of a trainer's own loss.
            chosen_logps, rejected_logps: [P] the summed log-probabilities that it was computed
                from, in nats.
            chosen_rewards, rejected_rewards: [P] the rewards that belong to losses [P]. Must be None for
                the result of `ops.preference_loss`, which has them.

        Raises:
            TypeError, ValueError: an argument breaks a rule above; the message names it.
        """
        op = "PreferenceMeans"
        losses: Any = loss
        if isinstance(loss, PreferenceLoss):
            unneeded = chosen_rewards is None and rejected_rewards is None
            checks.require(unneeded, op, "chosen_rewards", "be None for a PreferenceLoss, which has them", "rewards")
            losses, chosen_rewards, rejected_rewards = loss.losses, loss.chosen_rewards, loss.rejected_rewards
        is_loss = isinstance(losses, Tensor) and losses.dim() == 1
        rule = "be a PreferenceLoss or the losses [P]"
        checks.require(is_loss, op, "loss", rule, checks.shown(loss), error=TypeError)
        given: dict[str, Any] = dict(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
        given |= dict(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
        checks.require_tensors(op, **given)
        checks.require_real(op, **given)
        checks.require_same_device(op, loss=losses, **given)
        shape = _shape(losses)
        for name, x in given.items():
            checks.require(_shape(x) == shape, op, name, "have shape {}, that of the losses", _shape(x), shape)
        chosen, rejected, *logps = given.values()
        margins = chosen - rejected
        metrics = (losses, chosen, rejected, margins, margins > 0, *logps)
        self.update(**dict(zip(self.PAIR_METRICS, metrics, strict=True)))

    def update_tokens(self, tokens: TokenLogps, mask: Tensor) -> None:
        """Adds the tokens of P pairs.

        Args:
            tokens: `TokenLogps` with fields [2P, L]. entropy, mean_logits and is_top1 are added
                unless they are None. Rows i and P + i are the chosen and the rejected completion of
                pair i.
            mask: [2P, L] bool or 0 and 1, nonzero where a completion token is scored.

        Raises:
            ValueError: a shape breaks a rule above; the message names the argument.
        """
        op = "PreferenceMeans"
        is_tokens = isinstance(tokens, TokenLogps)
        checks.require(is_tokens, op, "tokens", "be TokenLogps", checks.shown(tokens), error=TypeError)
        checks.require_tensors(op, mask=mask)
        checks.require_real(op, mask=mask)
        checks.require_same_device(op, tokens=tokens.logps, mask=mask)
        shape = _shape(tokens.logps)
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
            chosen_logits, rejected_logits = tokens.mean_logits.chunk(2)
            values["logits/chosen"], values["logits/rejected"] = (chosen_logits, chosen), (rejected_logits, rejected)
        if tokens.is_top1 is not None:
            values["mean_token_accuracy"] = (tokens.is_top1.chunk(2)[0], chosen)
        self.update_weighted(values)
