"""TRL's OnlineDPOTrainer, stock against patched: the same completions, loss, metrics and gradients.

Stock includes padding in four metrics. These are compared with `masked`, which is stock with zeros
at padding positions; all other numbers are compared with stock itself.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration
from trl.experimental.online_dpo import OnlineDPOTrainer

import fastdpo
from fastdpo.ops.head import logit_rows
from tests.contract.trainers.trl.online_dpo import FULL, OPTIONS, prompts
from tests.support.trl.dpo import assert_fused, assert_same_bits
from tests.support.trl.online import (
    SUMS_OVER_PADDING,
    assert_all_same,
    assert_same_online,
    build,
    masked,
    train_online,
    train_three,
    writer,
)


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


def test_the_text_of_a_multimodal_model_is_fused(three):
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    eye = CLIPVisionConfig(**sizes, image_size=4, patch_size=2)

    def seeing(text):
        model = LlavaForConditionalGeneration(LlavaConfig(vision_config=eye, text_config=text.config))
        model.model.language_model, model.lm_head = text.model, text.lm_head
        model.generation_config = text.generation_config
        return model

    runs = three(prepare=seeing, max_steps=1)
    assert_fused(runs[-1], policy=1, reference=1)
    assert_all_same(*runs)


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


def largest_allocation(path: Path, function) -> int:
    """Returns the bytes of the largest allocation during `function()`, including custom ops."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return max(event["args"]["Bytes"] for event in events if event["name"] == "[memory]")


def test_no_logits_are_stored(tmp_path, monkeypatch):
    """Only logits (16 completions of 16 tokens) or their gradient would be larger than the head."""
    vocabulary, hidden = 2000, 24
    monkeypatch.setattr(logit_rows, "MIN_TILE_ROWS", 8)
    monkeypatch.setattr(logit_rows, "TILE_BYTES", 0)
    monkeypatch.setattr("fastdpo.ops.head.linear_logps.MEMORY_BUDGET", 0)
    sizes = dict(vocab_size=vocabulary, hidden_size=hidden, attn_implementation="eager")
    options = dict(max_new_tokens=16, per_device_train_batch_size=8, max_steps=1)
    largest = {}
    for name in ("stock", "patched"):
        models = [writer(seed, **sizes) for seed in range(2)]
        if name == "patched":
            fastdpo.patch()
        trainer = build(tmp_path / name, *models, **options)
        largest[name] = largest_allocation(tmp_path / f"{name}.json", trainer.train)
    row = vocabulary * 4
    assert largest["stock"] >= 16 * 16 * row
    assert largest["patched"] <= hidden * row


@pytest.mark.parametrize(("reference", "bf16"), [(True, True), (False, True), (False, False)])
def test_models_can_serve_a_second_trainer(tmp_path, reference, bf16):
    """Without a reference, TRL copies the wrapped policy; accelerate's casts stay around both."""
    models = [writer(0), writer(1) if reference else None]
    fastdpo.patch()
    for name in ("first", "second"):
        assert_fused(train_online(tmp_path / name, *models, bf16=bf16), **FULL)
    fastdpo.unpatch()
    assert not train_online(tmp_path / "third", *models, bf16=bf16).calls


def test_subclasses(tmp_path):
    """A `_forward` that calls stock's is fused inside; one without that call stays stock."""

    class Own(OnlineDPOTrainer):
        def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
            logits = model(torch.cat([prompt_ids, completion_ids], 1)).logits[:, prompt_ids.shape[1] - 1 : -1]
            return logits.log_softmax(-1).gather(2, completion_ids[..., None])[..., 0]

    data = prompts(*[5] * 8)
    expected = train_online(tmp_path / "own", writer(0), writer(1), masked(Own), data=data)
    fastdpo.patch()
    own = train_online(tmp_path / "patched", writer(0), writer(1), masked(Own), data=data)
    assert not own.calls
    assert_same_online(expected, own)
    assert_same_bits(expected, own)
    added = train_online(tmp_path / "added", writer(0), writer(1), masked(OnlineDPOTrainer), data=data)
    assert_fused(added, **FULL)
    assert_same_online(expected, added)
