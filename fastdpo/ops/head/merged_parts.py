"""Results over a whole vocabulary from those over its parts, for heads that are cut over ranks.

R parts have the distributions `p_{v|r}` over their entries v, with the results of `logit_rows` for
each of N tokens. With y the target, t its logit, `m_r` a part's shift, M the largest of the shifts and
`others_r` a part's sum of `exp(z_v - m_r)` over its entries v != y:

    others = sum_r others_r exp(m_r - M)           logp = logsigmoid(t - M - log(others))
    P_r    = sum_{v in r} p_v                      entropy = sum_r P_r (entropy_r - log P_r)
                                                   log_sum_sq_probs = log sum_r P_r^2 exp(log_sum_sq_probs_r)

`P_r` and `1 - P_r` are sums of positive terms, so neither loses digits to cancellation. The gradients
follow from those of a part's own results, which the part computes as if it were the whole vocabulary:

    d logp / d z_v    = P_r d logp_r / d z_v + (v == y) (1 - P_r)
    d entropy / d z_v = -P_r p_{v|r} (log p_{v|r} + log P_r + entropy)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .results import statistic_names

EXCHANGED = ("own_logits", "top_logits")
"""The results of a part that merging needs next to the requested statistics (see `logit_rows.finish_sums`)."""


def merge_parts(
    results: dict[str, Tensor], targets: Tensor, sizes: Sequence[int], rank: int, statistics: str
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor, list[Tensor]]:
    """Merges the results of all parts.

    Args:
        results: target_logits, shift, others, `EXCHANGED` and the statistics of the parts,
            [R, N] each, in one floating-point dtype.
        targets: [N] ids in the whole vocabulary.
        sizes: the number of entries of each part, in the order of the vocabulary.
        rank: the part whose gradients are asked for.
        statistics: names from `results.STATISTICS`, comma-separated.

    Returns:
        Over the whole vocabulary, the log-probabilities of the targets, the statistics in the order of `STATISTICS`,
        and the targets' logits t. For the gradients, the probability of the part's entries, and that of all others.
        With the entropy, the former by the tiles' logits, and the `mean_offset` of `logit_rows.GradientInputs`.
        [N] each.
    """
    is_owner = _owners(targets, sizes)
    shifts, others = results["shift"], results["others"]
    target = results["target_logits"].amax(0)
    target = torch.where(target == torch.inf, torch.nan, target)  # as in `logit_rows.finish_sums`
    highest = torch.where(others == 0, -torch.inf, shifts).amax(0)  # M
    shift = torch.where(highest == -torch.inf, target, highest)
    log_others = _masses(others, shifts, shift).sum(0).log()
    logps = F.logsigmoid(target - shift - log_others)

    mass, rest = _with_targets(others, shifts, torch.maximum(shift, target), target, is_owner)
    total = mass.sum(0)
    probability, other_probability = (x[rank] / total for x in (mass, rest))
    names, values, of_entropy = statistic_names(statistics), dict[str, Tensor](), list[Tensor]()
    if "entropy" in names or "log_sum_sq_probs" in names:  # of the tiles' logits, those of the targets included
        own = results["own_logits"].amax(0)
        mass, rest = _with_targets(others, shifts, torch.maximum(shift, own), own, is_owner)
        is_empty, log_share = mass == 0, -(rest / mass).log1p()  # -inf where the share is 0
        if "entropy" in names:
            share, entropies = mass / mass.sum(0), results["entropy"]
            entropy = values["entropy"] = torch.where(is_empty, 0.0, share * (entropies - log_share)).sum(0)
            offset = entropy - entropies[rank] + log_share[rank]
            of_entropy = [share[rank], torch.where(is_empty[rank], 0.0, offset)]
        if "log_sum_sq_probs" in names:
            terms = 2 * log_share + results["log_sum_sq_probs"]
            values["log_sum_sq_probs"] = torch.where(is_empty, -torch.inf, terms).logsumexp(0)
    if "mean_logits" in names:
        weighted = (mean * (size / sum(sizes)) for mean, size in zip(results["mean_logits"], sizes, strict=True))
        values["mean_logits"] = torch.stack([*weighted]).sum(0)
    if "is_top1" in names:
        # The shift of a part without other possible entries is not one of its logits.
        tops = torch.where(others == 0, results["own_logits"], results["top_logits"])
        values["is_top1"] = _are_top1(results["is_top1"] != 0, tops, is_owner)
    return logps, [values[name] for name in names], target, probability, other_probability, of_entropy


def _owners(targets: Tensor, sizes: Sequence[int]) -> Tensor:
    """bool [R, N], which part has each target."""
    ends = [sum(sizes[: part + 1]) for part in range(len(sizes))]
    return torch.stack([(targets >= end - size) & (targets < end) for end, size in zip(ends, sizes, strict=True)])


def _masses(others: Tensor, shifts: Tensor, shift: Tensor) -> Tensor:
    """The sums `others` [R, N] relative to another shift [N]."""
    return torch.where(others == 0, 0.0, others * (shifts - shift).exp())


def _with_targets(
    others: Tensor, shifts: Tensor, top: Tensor, target: Tensor, is_owner: Tensor
) -> tuple[Tensor, Tensor]:
    """[R, N] the sums of all entries of each part, and of those of the other parts, relative to the logit `top` [N]."""
    mass = _masses(others, shifts, top) + torch.where(is_owner, (target - top).exp(), 0.0)
    parts = len(mass)
    rest = [sum((mass[q] for q in range(parts) if q != r), torch.zeros_like(top)) for r in range(parts)]
    return mass, torch.stack(rest)


def _are_top1(is_top1: Tensor, tops: Tensor, is_owner: Tensor) -> Tensor:
    """bool [N], whether the target is the first of the largest logits, from the same of each part
    and its largest logits `tops`, [R, N] each.
    """
    top = torch.where(is_owner, tops, -torch.inf).amax(0)
    comes_before = is_owner.cumsum(0) == 0
    is_lower = torch.where(comes_before, tops < top, tops <= top)
    return is_lower.all(0) & (is_top1 & is_owner).any(0)
