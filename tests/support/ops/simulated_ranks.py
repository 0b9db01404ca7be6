"""A head that is cut over the vocabulary, with all ranks one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist

from fastdpo.ops import VocabularyGroup, linear_logps
from fastdpo.ops.head import vocabulary_parallel
from fastdpo.ops.head.results import TokenLogps
from tests.support.ops.heads import LEAVES, results_and_gradients


def results_and_gradients_of_ranks(
    inputs: dict, sizes: Sequence[int], upstream=None, needs=LEAVES, **options
) -> tuple[list[TokenLogps], dict[str, torch.Tensor]]:
    """The results of each rank, and the gradients of the inputs named in `needs`, over all ranks."""
    sent: list[torch.Tensor] = []

    def record(out, x, group):
        sent.append(x.clone())

    def fill(out, x, group):
        for place, value in zip(out, sent, strict=True):
            place.copy_(value)

    def call(rank, gather, needs):
        group = VocabularyGroup("simulated", tuple(sizes), rank)
        start, stop, _ = group.part
        own = {name: None if inputs[name] is None else inputs[name][start:stop] for name in ("weight", "bias")}
        with (
            mock.patch.object(vocabulary_parallel, "process_group"),
            mock.patch.object(dist, "all_gather", gather),
            mock.patch.object(dist, "all_reduce"),
        ):
            return results_and_gradients(linear_logps, {**inputs, **own}, upstream, needs, group=group, **options)

    for rank in range(len(sizes)):
        call(rank, record, ())
    ranks = [call(rank, fill, needs) for rank in range(len(sizes))]
    parts = {name: [gradients[name] for _, gradients in ranks] for name in needs if inputs[name] is not None}
    gradients = {name: sum(x) if name == "hidden" else torch.cat(x) for name, x in parts.items()}
    return [results for results, _ in ranks], gradients
