"""OpenRLHF's DPOTrainer: its labels, its attention and sharded models."""

import functools

import pytest
import torch
from openrlhf_runs import Strategy, assert_same, checkpoint, train

import fastdpo
from fastdpo.integrations.openrlhf.dpo import answer_labels
from tests.contract.trainers.openrlhf import dpo as description
from tests.support.stand_ins.flash import stand_in

FUSED = {("policy", "fused"): 3, ("reference", "fused"): 3}


@pytest.fixture
def both(tmp_path):
    return functools.partial(description.both, tmp_path)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packing_samples"])
def test_actors_with_flash_attention(tmp_path, packing, monkeypatch):
    """Actors use flash attention by default in OpenRLHF.

    On a CPU, a stand-in replaces the package, and stock uses sdpa.
    """
    stand_in(monkeypatch)
    paths = [checkpoint(tmp_path, seed=seed) for seed in range(2)]
    stock = train(*paths, Strategy(packing))
    with fastdpo.patched("openrlhf"):
        patched = train(*paths, Strategy(packing), attention="flash_attention_2")
    assert_same(stock, patched)
    assert patched.calls == FUSED


@pytest.mark.parametrize("seed", range(20))
def test_labels_equal_those_of_a_loop_over_tokens(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    pairs, width = int(draw(1, 5)), int(draw(3, 12))
    ids, lengths = draw(0, 9, 2 * pairs, width), draw(1, width + 1, 2 * pairs)
    mask = (torch.arange(width) < lengths[:, None]).long()
    prompts = draw(1, width + 1, pairs)

    expected = torch.full_like(ids, -100)
    for row in range(2 * pairs):
        for token in range(width):
            if token >= prompts[row % pairs] and token < lengths[row]:
                expected[row, token] = ids[row, token]
    assert torch.equal(answer_labels(ids, mask, prompts.tolist()), expected)
    assert torch.equal(answer_labels(ids, mask, prompts), expected)


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [("ring_attn_group", "a group", "ring attention"), ("ds_tensor_parallel_size", 2, "tensor parallelism")],
)
def test_models_sharded_over_ranks_fall_back_to_stock(tmp_path, monkeypatch, caplog, attribute, value, reason):
    monkeypatch.setattr(Strategy, attribute, value, raising=False)
    paths = [checkpoint(tmp_path, seed=seed) for seed in range(2)]
    with fastdpo.patched("openrlhf"):
        patched = train(*paths, Strategy())
    assert patched.calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    assert reason in caplog.text


def test_an_unsupported_version_raises(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.8.0" if package == "openrlhf" else "0")
    with pytest.raises(fastdpo.PatchError, match="install 'openrlhf"):
        fastdpo.patch("openrlhf.DPOTrainer")
