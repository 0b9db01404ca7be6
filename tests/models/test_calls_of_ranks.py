"""Two ranks run a model together by FSDP2 for a trainer that computes from logits, and only one of them has a reason
to leave a call to the trainer.
"""

import functools

import pytest
import torch
from transformers import PreTrainedModel

import fastdpo
from fastdpo.integrations import scored_rows
from fastdpo.integrations.scored_rows import ScoredRows
from fastdpo.models import forward
from fastdpo.models.state import ForwardOptions
from fastdpo.packing import IGNORE_INDEX
from fastdpo.reasons import Reason
from tests.integrations.test_custom_loops import own_logps
from tests.support.comparison import assert_same_gradients
from tests.support.models.sharded import sharded
from tests.support.ref_logps import ranks
from tests.support.trl.dpo import tiny_model

TRAINER = "a trainer of logits"

FIRST_RANK = {
    "a reason before the call": ["stock", "fused"],
    "a reason of the call": ["stock", "fused"],
    "each reason later": ["fused", "stock", "stock", "padded", "stock", "stock"],
}
CHANGES = {
    "a reason before the call": ["leave", None],
    "a reason of the call": ["positions", None],
    "each reason later": [None, "leave", "positions", "hole", "hook", None],
}


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Two rows, the second one padded."""
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :3] = IGNORE_INDEX
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def doubled(module, args, output):
    return 2 * output


def score(model: PreTrainedModel, inputs: dict, change: str | None) -> torch.Tensor:
    return scored_rows.score(
        model,
        TRAINER,
        Reason("first-token") if change == "leave" else inputs,
        lambda rows: rows.logps,
        lambda model: own_logps(model, **inputs),
    )


def train(case: str, rank: int, shard: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """The log-probabilities of each call, gradients, and the path of each call."""
    model = tiny_model()
    if shard:
        sharded(model)
        request = ForwardOptions(TRAINER, "policy", outputs=("mean_logits",))
        output = functools.partial(ScoredRows.of, model.config)
        forward.install(model, request, output, prior_scores=False)
    results, paths = [], []
    for number, change in enumerate(CHANGES[case]):
        inputs, before = batch(10 * rank + number), fastdpo.calls.copy()
        change = None if rank else change
        if change == "positions":
            inputs["position_ids"] = torch.arange(1, 10)[None]  # which do not count from 0
        if change == "hole":
            inputs["attention_mask"][:, 1] = 0
        if change == "hook":
            model.lm_head.register_forward_hook(doubled)
        logps = score(model, inputs, change) if shard else own_logps(model, **inputs)
        logps.sum().backward()
        results.append(logps.detach())
        paths += [path for _, _, path in (fastdpo.calls - before).elements()]
    return results, {n: x.grad.full_tensor() if shard else x.grad for n, x in model.named_parameters()}, paths


@pytest.mark.parametrize("case", FIRST_RANK)
def test_a_reason_that_one_rank_has(case, tmp_path):
    expected = [train(case, rank, shard=False) for rank in range(2)]
    mean = {name: (x + expected[1][1][name]) / 2 for name, x in expected[0][1].items()}
    for rank, (results, gradients, paths) in enumerate(ranks(2, tmp_path, lambda rank: train(case, rank, shard=True))):
        assert paths == (["fused"] * len(paths) if rank else FIRST_RANK[case])
        for x, y in zip(results, expected[rank][0], strict=True):
            torch.testing.assert_close(x, y)
        assert_same_gradients([mean], [gradients])
