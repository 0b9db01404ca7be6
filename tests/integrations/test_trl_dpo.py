"""TRL's DPOTrainer, stock against patched: the same training, and the fused path is what ran."""

import copy
import logging

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from trl_runs import assert_fused, assert_same, tiny_model, train

import fastdpo
from fastdpo import attention, packing
from fastdpo.integrations import fused_forward

MODELS = {
    "llama": dict(kind="llama"),
    "llama_tied": dict(kind="llama", tie_word_embeddings=True),  # the embedding's gradient has two parts
    "llama_eager": dict(kind="llama", attn_implementation="eager"),  # the prior attention is the model file's own
    "qwen2": dict(kind="qwen2"),  # biases in q, k, v
    "qwen3": dict(kind="qwen3"),  # norms of q and k
}


@pytest.fixture
def both(tmp_path):
    """Trains stock, then patched, from the same start."""

    def run(kind="llama", tiny=None, reference=True, **options):
        results = []
        for name in ("stock", "patched"):
            model = tiny_model(kind, seed=0, **(tiny or {}))
            ref = tiny_model(kind, seed=1, **(tiny or {})) if reference else None
            directory = tmp_path / name
            if name == "stock":
                results.append(train(directory, model, ref, **options))
            else:
                with fastdpo.patched("trl.DPOTrainer"):
                    results.append(train(directory, model, ref, **options))
        return results

    return run


@pytest.mark.parametrize("name", MODELS)
def test_same_training(both, name):
    tiny = dict(MODELS[name])
    stock, patched = both(tiny.pop("kind"), tiny)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3)


@pytest.mark.parametrize(
    "loss",
    [
        dict(loss_type=["ipo"]),  # divides by lengths of masks
        dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),  # reads per-token values
        dict(loss_type=["sigmoid"], use_weighting=True, ld_alpha=0.5),  # reads log_sum_sq_probs, splits lengths
    ],
    ids=["ipo", "sigmoid+sft", "wpo+ld"],
)
def test_same_training_with_loss(both, loss):
    stock, patched = both(**loss)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3)


def test_precomputed_reference_is_used(both):
    stock, patched = both(precompute_ref_log_probs=True, evaluate=4)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, eval=1, reference=4 + 1)  # each pair once, in batches of 4, before training


def test_precompute_without_a_reference_model(tmp_path):
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(), None, precompute_ref_log_probs=True)
    assert_fused(run, policy=3, reference=4)  # by the policy, whose calls these are not
    assert run.logs[0]["rewards/margins"] == 0.0


def test_evaluation(both):
    stock, patched = both(evaluate=6)  # a partial last batch
    assert_same(stock, patched)
    assert any("eval_rewards/margins" in log for log in patched.logs)
    assert_fused(patched, policy=3, reference=3 + 2, eval=2)


def test_lora(both):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    stock, patched = both(reference=False, peft_config=lora, evaluate=4)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3 + 1, eval=1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(both, reentrant):
    stock, patched = both(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3)


def test_gradient_accumulation_and_truncation(both):
    stock, patched = both(gradient_accumulation_steps=2, max_length=16, max_steps=2)
    assert_same(stock, patched)
    assert_fused(patched, policy=4, reference=4)


def test_mixed_precision(both):
    stock, patched = both(bf16=True)
    assert_fused(patched, policy=3, reference=3)
    for a, b in zip(stock.logs[:3], patched.logs[:3], strict=True):
        assert abs(a["loss"] - b["loss"]) < 2e-2 * a["loss"], "two roundings to 8 bits apart"
    for a, b in zip(stock.gradients, patched.gradients, strict=True):
        for name in a:
            assert b[name].dtype == torch.float32
            assert (a[name] - b[name]).norm() < 0.05 * a[name].norm()


def test_compiled_model(both):
    stock, patched = both(torch_compile=True, torch_compile_backend="eager", max_steps=2)
    assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=2)


def test_prompt_learning_trains_stock_and_its_reference_fused(both, caplog):
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    stock, patched = both(reference=False, peft_config=tuning)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "stock"): 3, ("reference", "fused"): 3}
    assert "without input_ids" in caplog.text


def test_a_head_that_peft_trains_is_left_to_stock(both, caplog):
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    stock, patched = both(reference=False, peft_config=lora, max_steps=1)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "stock"): 1, ("reference", "stock"): 1}
    assert "ModulesToSaveWrapper" in caplog.text


def test_equal_weights_give_a_margin_of_exactly_zero(tmp_path):
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(seed=0), tiny_model(seed=0), max_steps=1)
    assert run.logs[0]["rewards/margins"] == run.logs[0]["rewards/chosen"] == 0.0


def _late_positions(monkeypatch):
    stock = packing._to_device

    def late(device, token_index, position_ids, *rest):
        return stock(device, token_index, position_ids + (position_ids > 3), *rest)

    monkeypatch.setattr(packing, "_to_device", late)


def _no_prefix(monkeypatch):
    stock = packing.Layout.mask.fget

    def alone(self):
        mask = stock(self).clone()
        mask[..., 1] = 0
        return mask

    monkeypatch.setattr(packing.Layout, "mask", property(alone))


def _leak(monkeypatch):
    """The second row of each pair also sees the first row's completion."""
    stock = packing.Layout.mask.fget

    def leaking(self):
        mask = stock(self).clone()
        second = mask[..., 1] > 0
        mask[..., 1][second] = (mask[..., 2] - mask[..., 0])[second]
        return mask

    monkeypatch.setattr(packing.Layout, "mask", property(leaking))


def _wrong_target(monkeypatch):
    stock = packing._score_once

    def wrong(packed, target, in_prefix):
        target = target.clone()
        target[-1] = (target[-1] + 1) % 90
        return stock(packed, target, in_prefix)

    monkeypatch.setattr(packing, "_score_once", wrong)


def _wrong_scale(monkeypatch):
    stock = attention.packed_attention
    monkeypatch.setattr(attention, "packed_attention", lambda *args, scale: stock(*args, scale=scale * 1.001))


@pytest.mark.parametrize("sabotage", [_late_positions, _no_prefix, _leak, _wrong_target, _wrong_scale])
def test_sabotage_is_noticed(both, monkeypatch, sabotage):
    """The comparison above is one that can fail: each small wrong in the fused path turns it red."""
    sabotage(monkeypatch)
    stock, patched = both(max_steps=1)
    assert_fused(patched, policy=1, reference=1)
    with pytest.raises(AssertionError, match="step 0"):
        assert_same(stock, patched)


def test_silently_off_is_noticed(both, monkeypatch):
    """With the fused path off, numbers agree, of course; the counters are what turns red."""
    monkeypatch.setattr(fused_forward, "why_not", lambda model: "sabotage")
    stock, patched = both(max_steps=1)
    assert_same(stock, patched)
    with pytest.raises(AssertionError):
        assert_fused(patched, policy=1, reference=1)


@pytest.mark.parametrize(
    ("kind", "tiny", "reason"),
    [
        ("mistral", {}, "type 'mistral'"),
        ("qwen2", dict(use_sliding_window=True, sliding_window=4, max_window_layers=0), "sliding_attention"),
        ("llama", dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'"),
    ],
)
def test_other_models_train_stock_and_say_why(both, caplog, kind, tiny, reason):
    with caplog.at_level(logging.WARNING, logger="fastdpo"):
        stock, patched = both(kind, tiny)
    assert_same(stock, patched, rtol=0, atol=0)
    assert patched.calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    said = [record.message for record in caplog.records if reason in record.message]
    assert len(said) == 2, "once for the policy, once for the reference"


def test_attention_dropout_trains_stock(both, caplog):
    stock, patched = both(tiny=dict(attention_dropout=0.1), max_steps=1)
    assert_same(stock, patched, rtol=1e-6)
    assert patched.calls == {("policy", "stock"): 1, ("reference", "stock"): 1}
    assert "attention dropout is active" in caplog.text


def test_dropout_is_packed_but_not_shared(tmp_path, monkeypatch):
    shared = []
    stock = packing.pack

    def pack(*args, groups=None, **kwargs):
        shared.append(groups is not None)
        return stock(*args, groups=groups, **kwargs)

    monkeypatch.setattr(packing, "pack", pack)
    lora = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.2)
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(), None, peft_config=lora, disable_dropout=False, max_steps=1)
    assert_fused(run, policy=1, reference=1)
    assert not any(shared)


def test_strict_raises_instead_of_falling_back(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with fastdpo.patched(), pytest.raises(fastdpo.NotFused, match="mistral"):
        train(tmp_path, tiny_model("mistral"), tiny_model("mistral", seed=1))


def test_one_layout_serves_policy_and_reference(tmp_path, monkeypatch):
    packs = []
    stock = packing.pack
    monkeypatch.setattr(packing, "pack", lambda *args, **kwargs: packs.append(1) or stock(*args, **kwargs))
    with fastdpo.patched():
        train(tmp_path, tiny_model(seed=0), tiny_model(seed=1), max_steps=2)
    assert len(packs) == 2


@pytest.fixture
def wrapped(tmp_path):
    """A model that a patched trainer has been built around, and a padded batch for it."""
    model = tiny_model()
    with fastdpo.patched():
        train(tmp_path, model, tiny_model(seed=1), max_steps=1)
        ids = torch.randint(3, 90, (4, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        labels = ids.masked_fill(torch.arange(9) < 4, -100)
        yield model.eval(), dict(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)


def test_a_mask_with_holes_goes_to_stock(wrapped, caplog):
    model, batch = wrapped
    batch["attention_mask"][1, 2] = 0
    out = model(**batch)
    assert "an attention mask has holes" in caplog.text
    stock = vars(model)["_fastdpo"].stock(**batch)
    assert torch.equal(out.log_probs, stock.log_probs)


def test_a_deep_copy_computes_with_its_own_weights(wrapped, caplog):
    model, batch = wrapped
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
    expected = tiny_model().eval()
    expected.load_state_dict(copied.state_dict())
    logits = expected(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    reference = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0].masked_fill(batch["labels"][:, 1:] < 0, 0)
    torch.testing.assert_close(copied(**batch).log_probs, reference)
    assert "copy of a model that was wrapped" in caplog.text


def test_left_padding_equals_right_padding(wrapped):
    model, batch = wrapped
    right = model(**batch).log_probs
    padded = {name: torch.nn.functional.pad(batch[name], (3, 0), value=fill) for name, fill in PADS.items()}
    left = model(**padded, fused_lm_head=True).log_probs
    torch.testing.assert_close(left[:, 3:], right)


PADS = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def test_batch_without_labels_is_a_differentiable_zero(wrapped):
    model, batch = wrapped
    batch["labels"].fill_(-100)
    out = model(**batch)
    out.log_probs.sum().backward()
    assert out.log_probs.abs().max() == 0
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in model.parameters())


def test_shifted_labels_and_loss(wrapped):
    model, batch = wrapped
    plain = model(**batch, num_items_in_batch=7)
    shifted = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    out = model(**batch, shift_labels=shifted)
    torch.testing.assert_close(out.log_probs[:, :-1], plain.log_probs)
    torch.testing.assert_close(plain.loss, -plain.log_probs.sum() / 7)
    assert torch.equal(out.label_mask, shifted != -100)
