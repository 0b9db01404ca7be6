"""`fastdpo.score` of models that two ranks wrap by DDP or FSDP2: the gradients are those of one process."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastdpo
from tests.integrations.test_custom_loops import own_logps, rows
from tests.support.comparison import assert_close, assert_same_gradients
from tests.support.models.families import tiny_family
from tests.support.ref_logps import ranks

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
COMPILED = pytest.param("ddp compiled", marks=pytest.mark.thorough)
FSDP1 = pytest.param("fsdp1", marks=pytest.mark.thorough)
WRAPPED = ["ddp", "ddp of lora", COMPILED, "ddp fallback", FSDP1, "fsdp2", "fsdp2 of lora", "fsdp2 of gemma2"]


def build(case: str):
    torch.manual_seed(0)
    model = tiny_family("gemma2" if "gemma2" in case else "llama")
    if "fallback" in case:
        model.config.alibi = True
    return get_peft_model(model, LORA) if "lora" in case else model


def wrap(case: str, model):
    """As a loop would, after `prepare` under DDP and before it under FSDP2."""
    if case.startswith("ddp"):
        wrapped = DistributedDataParallel(fastdpo.prepare(model))
        return torch.compile(wrapped, backend="eager") if "compiled" in case else wrapped
    if case == "fsdp1":
        return FullyShardedDataParallel(fastdpo.prepare(model), use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    base = model.base_model.model if "lora" in case else model
    for unit in (*base.model.layers, model):
        fully_shard(unit, mesh=mesh)
    return fastdpo.prepare(model)


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Other rows on each rank, and rows with a hole that one rank cannot pack."""
    made = rows()
    made["input_ids"] = (made["input_ids"] * (1 + 2 * rank + step)) % 97
    made["labels"] = torch.where(made["labels"] < 0, made["labels"], made["input_ids"])
    if rank == 1 and step == 1:
        made["attention_mask"][:, 1] = 0
    return made


def train(case: str, rank: int) -> tuple[list, dict[str, torch.Tensor], list[str]]:
    model = build(case)
    wrapped, before, sums = wrap(case, model), fastdpo.calls.copy(), []
    for step in range(3):
        scored = fastdpo.score(wrapped, **batch(rank, step))
        scored.sums().mean().backward()
        sums.append(scored.sums().detach())
    is_fsdp1 = isinstance(wrapped, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True) if is_fsdp1 else nullcontext():
        found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        found = {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in found.items()}
    return sums, found, [path for _, _, path in (fastdpo.calls - before).elements()]


def score_the_module(rank: int) -> str:
    """Scores the model inside of a DDP, without gradients and with them, and with them before it is wrapped."""
    model = fastdpo.prepare(build("ddp"))
    fastdpo.score(model, **batch(rank, 0)).sums().sum().backward()
    wrapped = DistributedDataParallel(model)
    with torch.no_grad():
        fastdpo.score(wrapped.module, **batch(rank, 0))
    fastdpo.score(wrapped, **batch(rank, 0)).sums().sum().backward()
    with pytest.raises(ValueError, match=r"^score: model must be the DistributedDataParallel around it.* LlamaFor"):
        fastdpo.score(wrapped.module, **batch(rank, 0))
    return "raised"


def test_the_model_inside_of_ddp_is_refused(tmp_path):
    assert ranks(2, tmp_path, score_the_module) == ["raised"] * 2


def alone(case: str, rank: int) -> tuple[list, dict[str, torch.Tensor]]:
    model, sums = build(case), []
    for step in range(3):
        logps = own_logps(model, **batch(rank, step)).sum(1)
        logps.mean().backward()
        sums.append(logps.detach())
    return sums, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("case", WRAPPED)
def test_two_ranks_have_the_gradients_of_one_process(case, tmp_path):
    expected = [alone(case, rank) for rank in range(2)]
    mean = {name: (x + expected[1][1][name]) / 2 for name, x in expected[0][1].items()}
    paths = ["stock"] * 3 if "fallback" in case else ["fused"] * 3
    own = paths if "fallback" in case else ["fused", "fused", "padded" if case.startswith("fsdp2") else "stock"]
    for rank, (sums, gradients, taken) in enumerate(ranks(2, tmp_path, lambda rank: train(case, rank))):
        assert sorted(taken) == (sorted(own) if rank else paths)
        for x, y in zip(sums, expected[rank][0], strict=True):
            assert_close(x, y, absolute=1e-4)
        assert_same_gradients([mean], [gradients])
