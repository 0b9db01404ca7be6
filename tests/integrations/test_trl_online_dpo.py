"""TRL's OnlineDPOTrainer, stock against patched: the same completions, loss, metrics and gradients.

Stock includes padding in four metrics. These are compared with `masked`, which is stock with zeros
at padding positions; all other numbers are compared with stock itself.
"""

import functools
import gc
import json
import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import CLIPVisionConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration
from trl.experimental.online_dpo import OnlineDPOTrainer

import fastdpo
from fastdpo.integrations.trl import online_dpo
from fastdpo.ops.head import logit_rows
from tests.support import faults
from tests.support.comparison import assert_far_from_same
from tests.support.trl.dpo import LORA, assert_fused, assert_same_bits, trained_adapter
from tests.support.trl.online import (
    SUMS_OVER_PADDING,
    assert_all_same,
    assert_same_online,
    build,
    masked,
    reward,
    reward_model,
    train_online,
    train_three,
    writer,
)

FULL = dict(policy=3, reference=3)


@pytest.fixture
def three(tmp_path):
    return functools.partial(train_three, tmp_path)


def prompts(*sizes: int) -> list[dict]:
    return [{"prompt": " ".join(f"w{(7 * i + j) % 94}" for j in range(size))} for i, size in enumerate(sizes)]


LONG = prompts(3, 30, 8, 13, 20, 1, 12, 17)
OPTIONS = {
    "as it is": (dict(), FULL),
    "ipo": (dict(loss_type="ipo"), FULL),
    "no end": (dict(generation_kwargs={"suppress_tokens": list(range(1, 21))}), FULL),  # no completion is padded
    "one token": (dict(max_new_tokens=1), FULL),
    "batch of one": (dict(per_device_train_batch_size=1), FULL),
    "missing_eos_penalty": (dict(missing_eos_penalty=5.0), FULL),
    "beta": (dict(beta=[0.3, 0.1], max_steps=1), dict(policy=1, reference=1)),  # stock fails in its second step
    # truncation
    "prompts cut": (dict(max_length=12, data=LONG), FULL),
    "prompts cut away": (dict(max_length=4, data=LONG, generation_kwargs={"min_new_tokens": 4}), FULL),
    # rewards
    "reward model": (dict(rewards=reward_model), FULL | dict(reward=3)),
    "rewards": (dict(rewards=lambda: [reward_model(), reward], reward_weights=[3.0, 0.1]), FULL | dict(reward=3)),
    # reference
    "copied reference": (dict(reference=False, learning_rate=0.1), FULL),
    "adapter": (dict(reference=False, peft_config=LoraConfig(**LORA)), FULL),
    "adapter beside a reference": (dict(peft_config=LoraConfig(**LORA)), FULL),
    "loaded adapter": (dict(reference=False, prepare=trained_adapter, learning_rate=0.1), FULL),  # TRL copies it
    # batches and memory
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4, reference=4)),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1, reference=1)),
    # between the head and the logits
    "softcap": (dict(kind="gemma2", tiny=dict(query_pre_attn_scalar=8, final_logit_softcapping=3.0)), FULL),
    "scaled logits": (dict(kind="granite", tiny=dict(logits_scaling=4.0)), FULL),
}


@pytest.mark.parametrize(
    "option", [pytest.param(x, marks=pytest.mark.thorough) if x == "compiled" else x for x in OPTIONS]
)
def test_option(three, option):
    options, calls = OPTIONS[option]
    runs = three(**options)
    assert_fused(runs[-1], **calls)
    assert_all_same(*runs)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_the_comparison_detects_a_missing_token(tmp_path, three, loss_type):
    """A missing token makes the comparison of trainings fail."""

    class Losing(masked(OnlineDPOTrainer)):
        def _forward(self, model, *inputs):
            logps = super()._forward(model, *inputs)
            return logps * (torch.arange(logps.numel()).view_as(logps) > 0)

    _, stock, _ = three(loss_type=loss_type)
    with fastdpo.patched():
        sabotaged = train_online(tmp_path / "sabotaged", writer(0), writer(1), Losing, loss_type=loss_type)
    assert_fused(sabotaged, **FULL)
    assert_far_from_same(stock, sabotaged, stock.in_float64)


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


def test_position_ids_equal_those_of_generation(tmp_path):
    """Stock counts the left padding of a prompt in its position ids."""

    class Positioned(OnlineDPOTrainer):
        def _forward(self, model, *inputs):
            def call(ids, attention_mask):
                positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
                return model(ids, attention_mask=attention_mask, position_ids=positions)

            return super()._forward(call, *inputs)

    kind = dict(kind="gpt2", without=("head_dim", "num_key_value_heads", "intermediate_size"))
    stock = train_online(tmp_path / "stock", writer(0, **kind), writer(1, **kind), masked(Positioned))
    with fastdpo.patched():
        patched = train_online(tmp_path / "patched", writer(0, **kind), writer(1, **kind))
    assert_fused(patched, **FULL)
    assert_same_online(stock, patched)


def test_autocast(three):
    """Accelerate wraps both models in casts, the reference while the trainer is created."""
    cast = []

    def watched(model):
        model.model.register_forward_pre_hook(lambda *_: cast.append(torch.is_autocast_enabled("cpu")))
        return model

    stock, _, patched = three(bf16=True, prepare=watched, max_steps=2)
    assert_fused(patched, policy=2, reference=2)
    assert cast[-2:] == [True, True]
    eps = 2.0**-8  # see assert_same_but_for_rounding in trl_dpo/test_models.py
    assert abs(stock.logs[0]["loss"] - patched.logs[0]["loss"]) < 4 * eps
    a, b = stock.gradients[0], patched.gradients[0]
    assert all((a[name] - b[name]).norm() < 10 * eps * a[name].norm() for name in a)


def stock_path(role: str, reason: str) -> str:
    return f"trl.OnlineDPOTrainer ({role}): not fused, {reason}"


def test_an_empty_prompt_falls_back_to_stock(three, caplog):
    runs = three(data=prompts(0, 5, 3, 0) * 2)
    assert runs[-1].calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    for role in ("policy", "reference"):
        assert caplog.text.count(stock_path(role, "a label is scored by a padding position")) == 1
    assert_all_same(*runs)


def test_attention_dropout_falls_back_to_stock_and_its_reference_is_fused(three, caplog):
    runs = three(tiny=dict(attention_dropout=0.1), disable_dropout=False)
    assert runs[-1].calls == {("policy", "stock"): 3, ("reference", "fused"): 3}
    assert stock_path("policy", "attention dropout is active") in caplog.text
    assert_all_same(*runs)


class Loud(LlamaForCausalLM):
    """Scales its logits in a way that neither its head nor its config shows."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 1.5 * output.logits
        return output


def test_logits_that_differ_from_the_heads_output_fall_back_to_stock(three, caplog):
    def loud(model):
        model.__class__ = Loud
        return model

    runs = three(prepare=loud)
    assert runs[-1].calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    reason = "the head of Loud gives other logits than its forward (relative difference 0.33)"
    assert stock_path("policy", reason) in caplog.text
    assert_all_same(*runs)


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


def test_strict_raises_instead_of_falling_back(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with fastdpo.patched(), pytest.raises(fastdpo.NotFused, match="padding position"):
        train_online(tmp_path, writer(), writer(1), data=prompts(0, 5, 3, 0))


def _padding_is_scored(monkeypatch):
    stock = online_dpo.batch_of
    monkeypatch.setattr(online_dpo, "batch_of", lambda *args: stock(*args[:-1], torch.ones_like(args[-1])))


def _prompts_a_token_short(monkeypatch):
    stock = online_dpo.batch_of
    monkeypatch.setattr(online_dpo, "batch_of", lambda n, ids, mask, *rest: stock(n, ids[:, 1:], mask[:, 1:], *rest))


@pytest.mark.parametrize(
    "sabotage", [faults.labels_a_token_late, _padding_is_scored, _prompts_a_token_short, faults.no_prefix]
)
def test_the_comparison_detects_sabotage(three, monkeypatch, sabotage):
    faults.unnoticed_by_probes(monkeypatch)
    sabotage(monkeypatch)
    _, masked_stock, patched = three(max_steps=1)
    assert_fused(patched, policy=1, reference=1)
    with pytest.raises(AssertionError, match="step 0"):
        assert_same_online(masked_stock, patched)


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
    sizes = dict(vocab_size=vocabulary, hidden_size=hidden, attn_implementation="eager")
    options = dict(max_new_tokens=16, per_device_train_batch_size=8, max_steps=1)
    largest = {}
    for name in ("stock", "patched"):
        models = [writer(seed, **sizes) for seed in range(2)]
        if name == "patched":
            fastdpo.patch(memory_budget=0)
        trainer = build(tmp_path / name, *models, **options)
        largest[name] = largest_allocation(tmp_path / f"{name}.json", trainer.train)
    row = vocabulary * 4
    assert largest["stock"] >= 16 * 16 * row
    assert largest["patched"] <= hidden * row


def test_unpatching_restores_the_class_and_existing_models(tmp_path):
    stock = dict(vars(OnlineDPOTrainer))
    fastdpo.patch()
    models = [writer(0), writer(1)]
    trainer = build(tmp_path, *models)
    assert dict(vars(OnlineDPOTrainer)) != stock
    trainer.train()
    fastdpo.unpatch()
    assert dict(vars(OnlineDPOTrainer)) == stock
    for model in models:
        assert model.config._attn_implementation == "sdpa"
        assert not any("fastdpo" in name or name == "forward" for module in model.modules() for name in vars(module))
    before = dict(fastdpo.calls)
    trainer.train()
    assert fastdpo.calls == before


def test_trainers_created_before_stay_stock_and_are_listed(tmp_path):
    gc.collect()  # trainers of other tests
    with fastdpo.patched():
        earlier = build(tmp_path / "earlier", writer(0), writer(1), bf16=True)  # its reference stays wrapped
        earlier.train()
    trainer = build(tmp_path, writer(0), writer(1))
    report = fastdpo.patch("trl.OnlineDPOTrainer")
    assert report.seams[0].stock_trainers == ("OnlineDPOTrainer",) * 2
    before = dict(fastdpo.calls)
    trainer.train()
    earlier.train()
    assert fastdpo.calls == before


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


@pytest.mark.parametrize("name", ["_forward", "create_accelerator_and_postprocess"])
def test_a_changed_signature_is_rejected(monkeypatch, caplog, name):
    monkeypatch.setattr(OnlineDPOTrainer, name, lambda self, something_new: None)
    changed = dict(vars(OnlineDPOTrainer))
    with caplog.at_level(logging.INFO, logger="fastdpo"):
        dpo, online, *_ = fastdpo.patch().seams
    assert dpo.on
    assert f"OnlineDPOTrainer.{name} must have the parameters" in online.reason
    assert "something_new" in online.reason
    assert dict(vars(OnlineDPOTrainer)) == changed
