"""`fastdpo.score` of an engine of DeepSpeed's ZeRO: log-probabilities and gradients are those of one process."""

import os

import pytest
import torch
from rank_cases import zero

import fastdpo
from tests.integrations.test_custom_loops import own_logps
from tests.integrations.test_custom_loops_on_ranks import batch
from tests.support.comparison import assert_close, assert_same_gradients
from tests.support.ref_logps import ranks
from tests.support.trl.dpo import tiny_model


def train(stage: int, rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[str]]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = zero(stage)["deepspeed"] | dict(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    config["gradient_clipping"] = 0.0
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    fastdpo.prepare(engine)
    before = fastdpo.calls.copy()
    sums = fastdpo.score(engine, **batch(rank, step=0)).sums()
    engine.backward(sums.mean())
    gradients = {name: safe_get_full_grad(x).clone() for name, x in engine.module.named_parameters()}
    return sums.detach(), gradients, [path for _, _, path in (fastdpo.calls - before).elements()]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_is_scored(stage, tmp_path):
    expected = []
    for rank in range(2):
        model = tiny_model()
        sums = own_logps(model, **batch(rank, step=0)).sum(1)
        sums.mean().backward()
        expected.append((sums.detach(), {name: x.grad for name, x in model.named_parameters()}))
    mean = {name: (x + expected[1][1][name]) / 2 for name, x in expected[0][1].items()}
    for rank, (sums, gradients, paths) in enumerate(ranks(2, tmp_path, lambda rank: train(stage, rank))):
        assert paths == ["fused"]
        assert_close(sums, expected[rank][0], absolute=1e-4)
        assert_same_gradients([mean], [gradients])
