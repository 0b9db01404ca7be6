"""Models, options and batches that the ranks of a sequence group cannot share: all of them raise the same reason before
anything is computed, whichever rank has it. And what a rank holds of a batch that they share.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastdpo
from fastdpo.models import attention
from tests.models.test_sequence_groups import rows
from tests.support.models.families import tiny_family
from tests.support.models.multimodal import IMAGE, tiny_multimodal
from tests.support.ref_logps import ranks as run_ranks
from tests.support.trl.dpo import tiny_model

Refused = Callable[[int], Any]
"""What a rank does, which raises an error."""


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


def scored(model: nn.Module, batch: dict[str, Tensor] | None = None, **options: Any) -> fastdpo.ScoredRows:
    return fastdpo.score(fastdpo.prepare(model, sequence_group=world(), **options), **(batch or rows(0)))


def with_dropout(model: nn.Module) -> nn.Module:
    adapter = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(model, adapter).train()


def with_holes() -> dict[str, Tensor]:
    batch = rows(0)
    batch["attention_mask"][:, 1] = 0
    return batch


def with_images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.tensor([[1] + 16 * [IMAGE]]), torch.randint(3, 90, (1, 5), generator=generator)], 1)
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, pixel_values=pixels)
    return {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in batch.items()}


def hooked(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model


def of_own_code(model: nn.Module) -> nn.Module:
    class Own(type(model.model.norm)):
        pass

    model.model.norm.__class__ = Own
    return model


def with_engine(wrap: Callable[[nn.Module, Any], nn.Module]) -> fastdpo.ScoredRows:
    """A model whose engine averages over a mesh that leaves out the ranks of the group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("sequence", "data"))["data"]
    return scored(wrap(tiny_model(), mesh))


REASONS: dict[str, tuple[str, Refused]] = {
    "a hybrid": ("sequence-model", lambda rank: scored(tiny_family("falcon_h1"))),
    "images": ("sequence-model", lambda rank: scored(tiny_multimodal("llava"), with_images())),
    "a loss of routers": (
        "sequence-model",
        lambda rank: scored(tiny_family("qwen3_moe"), rows(0) | dict(output_router_logits=True)),
    ),
    "rotary embeddings of the longest position": ("sequence-model", lambda rank: scored(tiny_family("llama-dynamic"))),
    "code of its own": ("sequence-model", lambda rank: scored(of_own_code(tiny_model()))),
    "dropout": ("sequence-model", lambda rank: scored(with_dropout(tiny_model()))),
    "compile": ("sequence-option", lambda rank: scored(tiny_model(), compile=True)),
    "a mask with holes on the last rank": (
        "mask-holes",
        lambda rank: scored(tiny_model(), with_holes() if rank else None),
    ),
    "a hook on the last rank": (
        "user-hooks",
        lambda rank: scored(hooked(tiny_model()) if rank else tiny_model()),
    ),
}
ERRORS: dict[str, tuple[str, Refused]] = {
    "other rows": ("be given the same batch", lambda rank: scored(tiny_model(), rows(rank))),
    "the same rows in another order": (
        "be given the same batch",
        lambda rank: scored(tiny_model(), {name: x.roll(rank, 0) for name, x in rows(0).items()}),
    ),
    "no gradients on one rank": ("be given the same batch", lambda rank: without_gradients(rank)),
    "other groups of rows": (
        "be given the same batch",
        lambda rank: scored(tiny_model(), groups="pairs" if rank else "content"),
    ),
    "DDP over other ranks": (
        "DistributedDataParallel that does not average",
        lambda rank: with_engine(lambda model, mesh: DistributedDataParallel(model, process_group=mesh.get_group())),
    ),
    "FSDP2 over other ranks": (
        "FSDPModule that does not average",
        lambda rank: with_engine(lambda model, mesh: fully_shard(model, mesh=mesh) or model),
    ),
    "no group": (
        "sequence_group must be a process group",
        lambda rank: fastdpo.prepare(tiny_model(), sequence_group=2),
    ),
}


def without_gradients(rank: int) -> None:
    with torch.set_grad_enabled(rank == 0):
        scored(tiny_model())


def error_of(function: Refused, rank: int) -> str:
    try:
        function(rank)
    except (fastdpo.NotFused, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_rank(rank: int) -> dict[str, str]:
    torch.set_num_threads(1)
    return {name: error_of(function, rank) for name, (_, function) in {**REASONS, **ERRORS}.items()}


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> Callable[[], list[dict[str, str]]]:
    """Of two ranks, which try all cases in one launch."""
    return functools.cache(lambda: run_ranks(2, tmp_path_factory.mktemp("ranks"), of_rank))


@pytest.mark.parametrize("name", REASONS | ERRORS)
def test_a_reason_or_an_error_is_raised_on_all_ranks(name, errors):
    expected, _ = (REASONS | ERRORS)[name]
    for error in errors():
        assert expected in error[name]
        assert name in ERRORS or (error[name].startswith("NotFused") and error[name].endswith(f"[{expected}]"))


def test_an_error_of_one_rank_is_named_on_all(tmp_path):
    def label_too_large(rank: int) -> str:
        batch = rows(0)
        batch["labels"][0, -1 if rank else 0] = -1 if rank else -100
        return error_of(lambda rank: scored(tiny_model(), batch), rank)

    first, last = run_ranks(2, tmp_path, label_too_large)
    assert last.startswith("ValueError: score: labels must be -100 or token ids")
    assert first == last


def of_unknown_kind(model: nn.Module) -> nn.Module:
    class Unknown(LookupError):
        pass

    def fail(*_: Any) -> None:
        raise Unknown("in a hook of a user")

    model.register_forward_pre_hook(fail)
    return model


BAD = {
    "no labels": dict(labels=None),
    "labels of another width": dict(labels=torch.zeros(2, 3, dtype=torch.long)),
    "labels that are no integers": dict(labels=torch.zeros(2, 30)),
    "an unknown argument": dict(temperature=2.0),
    "hidden states": dict(output_hidden_states=True),
    "a mask for a list": dict(input_ids=[[1, 2], [3]]),
    "a mask of another shape": dict(attention_mask=torch.ones(1, 1, dtype=torch.long)),
}


def errors_and_results(rank: int) -> list[Any]:
    """Of calls with bad arguments on one rank, with a good call after each of them."""
    torch.set_num_threads(1)
    model, found = tiny_model(), []
    for i, bad in enumerate(BAD.values()):
        batch = rows(0) | (bad if rank == i % 2 else {})
        found.append(error_of(lambda rank, batch=batch: scored(model, batch), rank))
        found.append(scored(model, rows(i)).logps.sum().item())
    hooked_one = of_unknown_kind(tiny_model()) if rank else tiny_model()
    try:
        scored(hooked_one)
    except LookupError as error:
        found.append(str(error))
    found.append(scored(model, rows(1)).logps.sum().item())
    return found


def test_bad_arguments_of_one_rank_are_an_error_of_all_in_the_same_call(tmp_path):
    first, last = run_ranks(2, tmp_path, errors_and_results)
    assert first == last
    for error, name in zip(first[::2], BAD, strict=False):
        assert error.startswith(("ValueError: score: ", "TypeError: score: ")), name
    assert first[-2] == "in a hook of a user"


def test_an_error_inside_of_a_rank_ends_the_others_in_a_bounded_time(tmp_path):
    """That of the process group, as for any collective."""

    def fail(rank: int) -> tuple[str, float]:
        group, model = dist.new_group(timeout=timedelta(seconds=3)), tiny_model()
        fastdpo.prepare(model, sequence_group=group)
        fastdpo.score(model, **rows(0))
        if rank == 1:
            attention.attend = lambda *args, **kwargs: 1 / 0
        start = time.monotonic()
        try:
            fastdpo.score(model, **rows(1))
        except (ZeroDivisionError, RuntimeError) as error:
            return type(error).__name__, time.monotonic() - start
        return "no error", 0.0

    (first, seconds), (last, _) = run_ranks(2, tmp_path, fail)
    assert (first, last) == ("RuntimeError", "ZeroDivisionError")
    assert seconds < 20


def test_a_copy_of_a_model_shares_the_group(tmp_path):
    def copied(rank: int) -> bool:
        model = tiny_model()
        expected = scored(model).logps
        return torch.equal(scored(copy.deepcopy(model)).logps, expected)

    assert run_ranks(2, tmp_path, copied) == [True, True]


def test_a_group_of_one_rank_is_none(tmp_path):
    def alone(rank: int) -> bool:
        model = fastdpo.prepare(tiny_model(), sequence_group=dist.new_group([rank], use_local_synchronization=True))
        return torch.equal(
            fastdpo.score(model, **rows(rank)).logps, fastdpo.score(fastdpo.prepare(tiny_model()), **rows(rank)).logps
        )

    assert run_ranks(2, tmp_path, alone) == [True, True]


class Held:
    """Counts the bytes that autograd holds of activations, each storage once."""

    def __init__(self, model: nn.Module) -> None:
        self.left_out = {x.untyped_storage().data_ptr() for x in model.parameters()}
        self.storages: dict[int, tuple[int, Tensor]] = {}

    def save(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if x.is_floating_point() and storage.data_ptr() not in self.left_out:
            self.storages[storage.data_ptr()] = storage.nbytes(), x  # kept, so that its address is not used again
        return x

    def bytes(self) -> int:
        return sum(size for size, _ in self.storages.values())


def long_rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (2, 1020), generator=generator)
    ids[1, :1000] = ids[0, :1000]
    labels = ids.clone()
    labels[:, :1000] = -100
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


def held(group: dist.ProcessGroup | None, is_checkpointed: bool) -> int:
    model = tiny_model(num_hidden_layers=4, num_key_value_heads=4, max_position_embeddings=2048).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    fastdpo.prepare(model, sequence_group=group)
    fastdpo.score(model, **rows(0))  # which probes the model
    counted = Held(model)
    with torch.autograd.graph.saved_tensors_hooks(counted.save, lambda x: x):
        fastdpo.score(model, **long_rows()).sums().sum().backward()
    return counted.bytes()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_holds_its_part_of_the_activations(world_size, tmp_path):
    def of_rank(rank: int) -> list[int]:
        torch.set_num_threads(1)
        return [held(world(), is_checkpointed) for is_checkpointed in (False, True)]

    whole = [held(None, is_checkpointed) for is_checkpointed in (False, True)]
    for parts in run_ranks(world_size, tmp_path, of_rank):
        for part, of_one in zip(parts, whole, strict=True):
            assert 0.95 < part * world_size / of_one < 1.12, "attention's output exists by head and by token"
