"""`fastdpo.prepare(model, sequence_group=...)`: the ranks of a group compute what one process does.

In float64, since float32 hides a wrong factor of a small tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fastdpo
from fastdpo.packing import IGNORE_INDEX
from tests.support.comparison import double
from tests.support.models.families import tiny_family
from tests.support.models.sharded import sharded
from tests.support.ref_logps import ranks as run_ranks
from tests.support.trl.dpo import tiny_model

STATISTICS = ("entropy", "is_top1")
ROUNDING = 4e-15
"""Of the largest entry of a gradient, in float64."""

NON_REENTRANT, REENTRANT = dict(use_reentrant=False), dict(use_reentrant=True)


class Case(NamedTuple):
    """A step of a model.

    Attributes:
        model: its name in `MODELS`.
        engine: "ddp", "fsdp2", or "mean" for gradients that the loop averages itself.
        checkpointing: arguments of gradient checkpointing, if there is any.
        size: of a sequence group; None for all ranks. Each group has its own rows.
        dtype: of the model.
        autocast: whether layers run in bfloat16.
    """

    model: str = "llama"
    engine: str = "mean"
    checkpointing: dict | None = None
    size: int | None = None
    dtype: torch.dtype = torch.float64
    autocast: bool = False


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama": lambda seed: tiny_model(seed=seed),
    "one key head": lambda seed: tiny_model(seed=seed, num_key_value_heads=1),
    "four key heads, tied": lambda seed: tiny_model(seed=seed, num_key_value_heads=4, tie_word_embeddings=True),
    "twelve heads of three": lambda seed: tiny_model(
        seed=seed, hidden_size=48, num_attention_heads=12, num_key_value_heads=3
    ),
    "six heads of two": lambda seed: tiny_model(seed=seed, hidden_size=48, num_attention_heads=6),
    **{name: lambda seed, name=name: tiny_family(name, seed) for name in ("mistral", "gemma2", "qwen3", "gpt_oss")},
}

SINGLE = dict(dtype=torch.float32)
"""Eager attention of transformers returns NaN for padding in float64."""

TWO = {
    **{name: Case(name, **SINGLE if name == "gemma2" else {}) for name in MODELS},
    "llama in float32": Case(**SINGLE),
    **{
        f"{engine}, {name}": Case("qwen3", engine, checkpointing)
        for engine in ("ddp", "fsdp2")
        for name, checkpointing in (("", None), ("checkpointed", NON_REENTRANT), ("reentrant", REENTRANT))
    },
    "autocast": Case(**SINGLE, autocast=True),
}
FOUR = {
    **{name: Case(name) for name in ("llama", "one key head", "six heads of two", "gpt_oss")},
    "gemma2": Case("gemma2", **SINGLE),
    "ddp, two groups": Case(engine="ddp", checkpointing=NON_REENTRANT, size=2),
    "fsdp2, two groups": Case(engine="fsdp2", checkpointing=NON_REENTRANT, size=2),
}


def rows(seed: int) -> dict[str, Tensor]:
    """Three pairs, chosen rows first, of different lengths; they share a system prompt."""
    generator = torch.Generator().manual_seed(seed)

    def words(n: int) -> Tensor:
        return torch.randint(3, 97, (n,), generator=generator)

    system, prompts = words(5), [words(23 - 2 * i) for i in range(3)]
    ids, labels = [], []
    for side in range(2):
        for i, prompt in enumerate(prompts):
            prompt, completion = torch.cat([system, prompt]), words(9 - i + 3 * side)
            ids.append(torch.cat([prompt, completion]))
            labels.append(torch.cat([torch.full_like(prompt, IGNORE_INDEX), completion]))
    pad = nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(x) for x in ids], batch_first=True)
    labels = pad(labels, batch_first=True, padding_value=IGNORE_INDEX)
    return dict(input_ids=pad(ids, batch_first=True), attention_mask=mask, labels=labels)


class Step(NamedTuple):
    """The results of a step.

    Attributes:
        loss: the mean over groups.
        scored: the log-probabilities and statistics of the rank's rows.
        gradients: of the parameters, the mean over ranks.
        paths: that the calls took.
    """

    loss: Tensor
    scored: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    paths: set[str]


def wrapped(model: nn.Module, engine: str) -> nn.Module:
    if engine == "fsdp2":
        return sharded(model)
    return DistributedDataParallel(model) if engine == "ddp" else model


def made(case: Case, seed: int) -> nn.Module:
    model = MODELS[case.model](seed)
    model = (double(model) if case.dtype == torch.float64 else model).train()
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable(case.checkpointing)
    return model


def step(case: Case, batches: list[dict[str, Tensor]], group: dist.ProcessGroup | None = None) -> Step:
    """A step on one batch of this rank's group, or on several of one process."""
    policy, reference = made(case, 0), made(case, 1)
    before = fastdpo.calls.copy()
    if group is not None:
        policy = wrapped(policy, case.engine)
    fastdpo.prepare(policy, outputs=STATISTICS, sequence_group=group)
    fastdpo.prepare(reference, sequence_group=group)
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16) if case.autocast else contextlib.nullcontext():
        for batch in batches:
            with torch.no_grad():
                expected = fastdpo.score(reference, **batch).sums()
            scored = fastdpo.score(policy, **batch)
            chosen, rejected = (scored.sums() - expected).chunk(2)
            losses.append(-F.logsigmoid(0.1 * (chosen - rejected)).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    paths = {path for _, _, path in fastdpo.calls - before}
    results = tuple(x.detach() for x in (scored.logps, scored.entropy, scored.is_top1))
    named = ((name.removeprefix("module."), x.grad) for name, x in policy.named_parameters())
    gradients = {name: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for name, x in named}
    return Step(loss.detach(), results, gradients, paths)


def steps_of_rank(cases: dict[str, Case], rank: int) -> dict[str, Step]:
    torch.set_num_threads(1)
    world, done = dist.get_world_size(), {}
    meshes: dict[int, DeviceMesh] = {}
    for name, case in cases.items():
        size = case.size or world
        if size not in meshes:
            meshes[size] = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("data", "sequence"))
        mesh = meshes[size]
        done[name] = result = step(case, [rows(mesh["data"].get_local_rank())], mesh["sequence"].get_group())
        for x in (result.loss, *(result.gradients.values() if case.engine == "mean" else ())):
            dist.all_reduce(x)
            x /= world
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[int], list[dict[str, Step]]]:
    """The results of 2 or 4 ranks, which run all cases in one launch."""

    def of(world: int) -> list[dict[str, Step]]:
        cases = TWO if world == 2 else FOUR
        return run_ranks(world, tmp_path_factory.mktemp("ranks"), lambda rank: steps_of_rank(cases, rank))

    return functools.cache(of)


CASES = [*((2, name) for name in TWO), *((4, name) for name in FOUR)]


@pytest.mark.parametrize("of", CASES, ids=[f"{name}, {world} ranks" for world, name in CASES])
def test_a_group_computes_what_one_process_does(of, trained):
    world, name = of
    case, found = (TWO if world == 2 else FOUR)[name], [of_rank[name] for of_rank in trained(world)]
    size = case.size or world
    expected = step(case._replace(checkpointing=None), [rows(i) for i in range(world // size)])
    allowed = ROUNDING if case.dtype == torch.float64 else 0.03 if case.autocast else 5e-6
    last = found[-1]
    for of_rank in found:
        assert of_rank.paths == {"fused"}
        assert abs(of_rank.loss / expected.loss - 1) < allowed
        assert worst(of_rank.gradients, expected.gradients) < allowed
    for a, b in zip(last.scored, expected.scored, strict=True):
        assert a.dtype == b.dtype
        assert_near(a.double(), b.double(), allowed)
    for first in range(0, world, size):
        for of_rank in found[first : first + size]:
            assert all(map(torch.equal, of_rank.scored, found[first].scored)), "ranks of a group agree to the last bit"


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of two gradients, in relation to the largest entry of each tensor."""
    assert found.keys() == expected.keys()
    scales = {name: x.abs().max().clamp(min=1e-8) for name, x in expected.items()}
    return max(float((found[name] - x).abs().max() / scales[name]) for name, x in expected.items())


def assert_near(x: Tensor, y: Tensor, allowed: float) -> None:
    assert float((x - y).abs().max()) <= allowed * float(y.abs().max())
