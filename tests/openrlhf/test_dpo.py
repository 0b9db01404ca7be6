"""OpenRLHF's DPOTrainer: its labels, its attention and sharded models."""

import functools
import logging

import pytest
import torch
from openrlhf_runs import Recorded, Strategy, assert_same, checkpoint, rows, tokenizer, train

import fastdpo
from fastdpo.integrations.openrlhf.dpo import answer_labels
from tests.contract.trainers.openrlhf import dpo as description
from tests.support.comparison import assert_far_from_same
from tests.support.stand_ins.flash import stand_in

FUSED = {("policy", "fused"): 3, ("reference", "fused"): 3}


@pytest.fixture
def both(tmp_path):
    return functools.partial(description.both, tmp_path)


@pytest.mark.parametrize("loss", [dict(), dict(ipo_enable=True)], ids=["sigmoid", "ipo"])
def test_a_lost_letter_is_noticed(both, tmp_path, loss):
    """The comparison of trainings fails when one letter of the data differs."""
    stock, _ = both(loss=loss)
    data = rows(12)
    data[5]["chosen"] = data[5]["chosen"][:-1]
    with fastdpo.patched("openrlhf"):
        paths = [checkpoint(tmp_path, seed=seed) for seed in range(2)]
        sabotaged = train(*paths, Strategy(**loss), data=data)
    assert sabotaged.calls == FUSED
    assert_far_from_same(stock, sabotaged, stock.in_float64)


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


def test_some_tokenized_prompts_are_no_prefix_of_their_rows():
    encode, differ = tokenizer(), 0
    for row in rows(40):
        n = len(encode(row["prompt"], add_special_tokens=False)["input_ids"])
        ids = [
            encode(row["prompt"] + row[name], add_special_tokens=False)["input_ids"] for name in ("chosen", "rejected")
        ]
        differ += ids[0][:n] != ids[1][:n]
    assert differ > 10


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


def test_a_wrong_number_of_prompt_lengths_raises():
    ids = torch.ones(4, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="one entry for each of 2 pairs; got 4"):
        answer_labels(ids, ids, [3, 3, 3, 3])


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


class DoublesLogps(Recorded):
    """A subclass that changes the results of the trainer's forward pass."""

    def concatenated_forward(self, model, *batch):
        chosen, rejected, aux_loss, nll_loss = super().concatenated_forward(model, *batch)
        return 2 * chosen, rejected, aux_loss, nll_loss


def test_subclass(both):
    stock, patched = both(trainer_class=DoublesLogps)
    assert_same(stock, patched)
    assert patched.calls == FUSED


def test_the_report(caplog):
    with caplog.at_level(logging.INFO, logger="fastdpo"), fastdpo.patched() as report:
        assert str(report) == "fastdpo: openrlhf.DPOTrainer (0.11.2): on | openrlhf.RewardModelTrainer (0.11.2): on"


def test_an_unsupported_version_raises(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.8.0" if package == "openrlhf" else "0")
    with pytest.raises(fastdpo.PatchError, match="install 'openrlhf"):
        fastdpo.patch("openrlhf.DPOTrainer")
