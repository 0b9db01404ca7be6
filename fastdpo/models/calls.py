"""Counters: which path the calls of models took, how many tokens they computed, and what options have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

calls: Counter[tuple[str, str, str]] = Counter()
"""Number of model calls by (integration, kind, path).

The kind is "policy", "reference" or "eval". Trainers that compute the policy's log-probabilities of
completions before they train on them count those calls as "old_policy", and those of the models that
score completions as "reward".

The path is one of

- "fused": the batch was packed and scored by the fused head;
- "padded": the batch was scored by the fused head, but not packed. This happens where several ranks
  run one sharded model together, so that a rank that cannot pack must run the same modules;
- "stock": the trainer's own path;
- "replayed": the batch was packed, as it was counted before, and its backbone was a CUDA graph.
"""

kind_of_calls: ContextVar[str | None] = ContextVar("fastdpo_kind_of_calls", default=None)
"""The kind that `counting_calls_as` has set, if any."""


tokens: Counter[tuple[str, str]] = Counter()
"""Number of tokens by (integration, "given", "unshared" or "computed"): those of the padded batches that models
were called with, those that the models would have run on if rows shared none, and those that they ran on.
"""


outcomes: Counter[tuple[str, str]] = Counter()
"""What options have brought about, by (integration, outcome): "verified" counts calls that agreed with
stock ones, "steps" optimizer steps that were cut, and "micro-batches" their parts.
"""


def due(counts: Counter[Any], kind: Hashable) -> int:
    """Counts a call of a kind, and returns its number if that is 1, 2, 4, 8, ...: these are compared with stock ones,
    or with the layers. Returns 0 for others.
    """
    counts[kind] += 1
    return 0 if counts[kind] & (counts[kind] - 1) else counts[kind]


def count_tokens(integration: str, given: int, unshared: int, computed: int) -> None:
    tokens[integration, "given"] += given
    tokens[integration, "unshared"] += unshared
    tokens[integration, "computed"] += computed


Counted = tuple[Counter[tuple[str, str, str]], Counter[tuple[str, str]]]
"""The values of `calls` and `tokens` at some time."""

NOTHING: Counted = Counter(), Counter()


def counted() -> Counted:
    """What has been counted so far in this process."""
    return calls.copy(), tokens.copy()


def calls_line(integration: str, before: Counted = NOTHING) -> str | None:
    """What was counted of a trainer since a time, in one line, or None if none of its models was called."""
    calls_since, tokens_since = calls - before[0], tokens - before[1]
    counts = {(kind, path): n for (name, kind, path), n in calls_since.items() if name == integration}
    if not counts:
        return None
    paths: Counter[str] = Counter()
    for (_, path), n in counts.items():
        paths[path] += n
    replayed = paths.pop("replayed", 0)
    savings = [f"{paths['fused'] / paths.total():.0%} of calls fused"]
    if replayed:
        savings.append(f"{replayed} replayed")
    given, unshared, computed = (tokens_since[integration, x] for x in ("given", "unshared", "computed"))
    if given:
        without = f" ({unshared / given:.0%} without sharing)" if unshared > computed else ""
        savings.append(f"{computed / given:.0%} of {given:,} padded tokens computed{without}")
    of_paths = ", ".join(f"{kind} {path} {n}" for (kind, path), n in counts.items())
    return f"fastdpo: {integration} calls: {of_paths}; {', '.join(savings)}"


@contextmanager
def counting_calls_as(kind: str) -> Iterator[None]:
    """Counts all model calls of the block as one kind (see `calls`)."""
    token = kind_of_calls.set(kind)
    try:
        yield
    finally:
        kind_of_calls.reset(token)
