"""TRL's OnlineDPOTrainer, stock against patched: the same completions, loss, metrics and gradients.

Stock includes padding in four metrics. These are compared with `masked`, which is stock with zeros
at padding positions; all other numbers are compared with stock itself.
"""

import functools

import pytest
import torch

import fastdpo
from tests.contract.trainers.trl.online_dpo import OPTIONS
from tests.support.trl.online import SUMS_OVER_PADDING, assert_same_online, build, train_three, writer


@pytest.fixture
def three(tmp_path):
    return functools.partial(train_three, tmp_path)


def test_four_metrics_differ_from_stock_only_by_padding(three):
    stock, masked_stock, patched = three(max_steps=1)
    ended = patched.batches[0][3].sum(1) < 8
    assert 0 < ended.sum() < len(ended), "some completions end early, some do not"
    for name in SUMS_OVER_PADDING:
        assert abs(stock.logs[0][name] - patched.logs[0][name]) > 0.1
        assert abs(masked_stock.logs[0][name] - patched.logs[0][name]) < 1e-4
    options, _ = OPTIONS["no end"]
    stock, _, patched = three(**options)
    assert_same_online(stock, patched)


def test_images_fall_back_to_stock(tmp_path, caplog):
    ids, mask = torch.randint(3, 90, (4, 9)), torch.ones(4, 9, dtype=torch.int64)
    mask[2:, 7:] = 0
    inputs = (ids[:, :5], mask[:, :5], ids[:, 5:], mask[:, 5:], {"pixel_values": torch.zeros(4, 3)})
    model = writer()
    expected = build(tmp_path / "stock", model, writer(1), max_length=6)._forward(model, *inputs)
    fastdpo.patch()
    trainer = build(tmp_path / "patched", model, writer(1), max_length=6)
    before = fastdpo.calls.copy()
    assert torch.equal(trainer._forward(model, *inputs), expected * mask[:, 5:])
    assert fastdpo.calls - before == {("trl.OnlineDPOTrainer", "policy", "stock"): 1}
    assert caplog.text.count("not fused") == 1
