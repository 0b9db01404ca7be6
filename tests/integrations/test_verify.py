"""`patch(verify=True)` raises before the first step if the fused path is wrong, and changes nothing if it is right."""

import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import fastdpo
from fastdpo import VerificationError
from fastdpo.models import head
from tests.support.faults import SOFTCAPPED, no_softcap, scaled_gradients, targets_off_by_one
from tests.support.models.multimodal import tiny_multimodal
from tests.support.trl.dpo import LORA, Run, adapter, assert_same_bits, long_pairs, tiny_model, train
from tests.support.trl.verified import assert_verified
from tests.support.trl.vision import FAMILIES, train_vision


def models(**tiny):
    return [tiny_model(seed=seed, **tiny) for seed in range(2)]


def run(directory: Path, verify: bool, pair: list, train=train, trainer="trl.DPOTrainer", **options) -> Run:
    """A patched training of models, of which the second is a reference."""
    torch.manual_seed(7)
    with fastdpo.patched(trainer, verify=verify):
        return train(directory, *pair, **options)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


OPTIONS = {
    "as it is": {},
    "adapters with dropout": dict(
        reference=False, peft_config=LoraConfig(**{**LORA, "lora_dropout": 0.3}), gradient_accumulation_steps=2
    ),
    "reentrant checkpoints": dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}, optim="adamw_torch"
    ),
    "checkpoints in bfloat16": dict(gradient_checkpointing=True, bf16=True),
    "dropout": dict(tiny=dict(kind="gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.0)),
    "precomputed": dict(precompute_ref_log_probs=True, loss_type="ipo"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_verified_training_ends_in_the_same_weights(name, tmp_path, caplog):
    options = dict(OPTIONS[name])
    tiny, reference = options.pop("tiny", {}), options.pop("reference", True)
    runs, ends = [], []
    caplog.set_level(logging.INFO, "fastdpo")
    for verify in (False, True):
        pair = models(**tiny)
        runs.append(run(tmp_path / str(verify), verify, [pair[0], pair[1] if reference else None], **options))
        ends.append(weights(pair[0]))
    assert_same_bits(*runs)
    assert runs[0].logs == runs[1].logs
    assert runs[0].calls == runs[1].calls
    assert {path for _, path in runs[0].calls} == {"fused"}
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])
    messages = [x for x in caplog.messages if "verified" in x]
    assert len(messages) == 2, messages
    assert sum("gradient of" in x for x in messages) == 1


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_pairs_with_images(name, lora, tmp_path, caplog):
    options = dict(max_steps=2, **({"peft_config": adapter()["peft_config"]} if lora else {}))

    def run(directory):
        pair = [tiny_multimodal(name, seed, **FAMILIES[name].rest) for seed in range(2)]
        return train_vision(name, directory, pair[0], None if lora else pair[1], **options)

    assert_verified(run, tmp_path, "trl.DPOTrainer", caplog=caplog)


def test_steps_by_a_budget_of_tokens(tmp_path, caplog):
    def run(directory):
        return train(directory, *models(), data=long_pairs() * 2, per_device_train_batch_size=8, max_steps=2)

    assert_verified(run, tmp_path, "trl.DPOTrainer", caplog=caplog, max_tokens=120)


class Checkpoint(torch.autograd.Function):
    """Recomputes a layer by `backward` inside of a backward pass, as Unsloth does."""

    @staticmethod
    def forward(ctx, layer, hidden):
        ctx.layer = layer
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return layer(hidden)

    @staticmethod
    def backward(ctx, gradient):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(hidden).backward(gradient)
        return None, hidden.grad


class CheckpointedMLP(LlamaMLP):
    def forward(self, x):
        return Checkpoint.apply(super().forward, x)


def test_checkpoints_that_cannot_be_compared(tmp_path, caplog, monkeypatch):
    """They leave no gradients behind."""
    runs = []
    for verify in (False, True):
        pair = models()
        pair[0].model.layers[0].mlp.__class__ = CheckpointedMLP
        runs.append(run(tmp_path / str(verify), verify, pair))
    assert_same_bits(*runs)
    assert caplog.text.count("(policy): not verified, its backward pass calls backward()") == 2  # code of its own
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(fastdpo.NotFused, match="verified-checkpoints"):
        run(tmp_path / "strict", True, pair)


def plant_a_wrong_statistic(monkeypatch):
    right = head.linear_logps

    def wrong(*args, **kwargs):
        scored = right(*args, **kwargs)
        return scored if scored.entropy is None else scored._replace(entropy=scored.entropy * (1 + 1e-3))

    monkeypatch.setattr(head, "linear_logps", wrong)


WRONG = {
    "targets": (targets_off_by_one, {}, "log-probabilities by .* row .*, token .*gradient of attention"),
    "softcap": (no_softcap, SOFTCAPPED, "log-probabilities by .*gradient of head"),
    "gradients": (scaled_gradients, {}, r"in gradient of embeddings by 1\.0e-03 \(at most .*gradient of MLP"),
    "statistic": (plant_a_wrong_statistic, {}, r"in entropy by 1\.0e-03"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_op_ends_the_training_before_its_first_step(name, tmp_path, monkeypatch):
    plant, tiny, message = WRONG[name]
    plant(monkeypatch)
    pair = models(**tiny)
    before = weights(pair[0])
    with pytest.raises(VerificationError, match=message) as raised:
        run(tmp_path, True, pair)
    assert str(raised.value).startswith("fastdpo: trl.DPOTrainer (policy): the fused path differs")
    assert all(torch.equal(before[k], p) for k, p in pair[0].named_parameters())
    assert all(p.grad is None for p in pair[0].parameters())
    run(tmp_path / "unverified", False, models(**tiny), max_steps=1)  # nothing else would have noticed


def test_a_wrong_reference_is_found(tmp_path, monkeypatch):
    right = head.linear_logps

    def wrong(hidden, *args, **kwargs):
        scored = right(hidden, *args, **kwargs)
        return scored if torch.is_grad_enabled() else scored._replace(logps=scored.logps + 0.01)

    monkeypatch.setattr(head, "linear_logps", wrong)
    with pytest.raises(VerificationError, match=r"\(reference\): .* log-probabilities by"):
        run(tmp_path, True, models())
    policy = tiny_model()
    with pytest.raises(VerificationError, match="log-probabilities by"):  # the policy without its adapters
        run(tmp_path / "adapters", True, [policy, None], peft_config=LoraConfig(**LORA))
