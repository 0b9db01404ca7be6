"""Multimodal models in TRL's DPOTrainer on pairs with images."""

import functools

import pytest
from multimodal_families import tiny_multimodal
from trl_runs import assert_same_bits, train_both
from vision_runs import FAMILIES, train_vision


@pytest.fixture
def both(tmp_path):
    def run(name, **options):
        train = functools.partial(train_vision, name)
        return train_both(tmp_path, name, FAMILIES[name].rest, build=tiny_multimodal, train=train, **options)

    return run


@pytest.mark.parametrize("name", FAMILIES)
def test_images_fall_back_to_stock(both, caplog, name):
    stock, patched = both(name, max_steps=2)
    assert_same_bits(stock, patched)
    assert patched.calls == {("policy", "stock"): 2, ("reference", "stock"): 2}
    assert caplog.text.count("pixel_values") == 2, "once for the policy, once for the reference"
