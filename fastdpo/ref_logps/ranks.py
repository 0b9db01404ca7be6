"""Agreement between the ranks that compute reference log-probabilities together.

Every rank must call each of these functions, or all others wait for it.
"""

from __future__ import annotations

from ..distributed import gather_objects, rank_and_world_size
from ..logs import report, strict
from ..reasons import Reason


def require_equal_work(*work: object) -> None:
    """Raises ValueError on every rank if any rank was given other
    work, since they could not share it.
    """
    of_ranks = gather_objects(repr(work))
    if len(set(of_ranks)) > 1:
        rank, world = rank_and_world_size()
        raise ValueError(
            "precompute: model, dataset and options must be the same on every rank; "
            f"rank {rank} of {world} got {of_ranks[rank]}, others {sorted(set(of_ranks) - {of_ranks[rank]})}"
        )


def cache_disabled(reason: Reason | None) -> bool:
    """Whether any rank has a reason to continue without the cache. Logs
    it once, or raises in strict mode.
    """
    reasons = sorted({each.named for each in gather_objects(reason) if each is not None})
    if reasons and (strict() or rank_and_world_size()[0] == 0):
        report(f"reference log-probabilities: not cached, {'; '.join(reasons)}")
    return bool(reasons)
