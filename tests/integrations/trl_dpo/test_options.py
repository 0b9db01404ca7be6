"""Options of TRL's DPOTrainer, its models and its data: equal to stock, and on the expected path.

Each option is set alone here; test_pairwise.py combines them.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl.trainer import dpo_trainer

import fastdpo
from tests.support.trl.dpo import LORA, adapter, assert_fused, assert_same, long_pairs, pairs, tiny_model, train

FULL = dict(policy=3, reference=3)


def trained_adapter(model):
    """Returns a model with an adapter, as a user loads it. TRL copies it as "ref"."""
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(**LORA))


def checkpointed(reentrant: bool) -> dict:
    return dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})


# option: (changed arguments, number of calls of each kind)
OPTIONS = {
    # truncation
    "keep_start": (dict(max_length=12, data=long_pairs()), FULL),  # cuts answers; drops long prompts
    "keep_end": (dict(max_length=12, truncation_mode="keep_end", data=long_pairs()), FULL),  # cuts entire prompts
    "untruncated": (dict(max_length=None, data=long_pairs()), FULL),
    # padding
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),  # every batch is padded beyond its longest row
    "pad_token_is_eos": (dict(pad_token="<eos>"), FULL),  # padding looks like the end of an answer
    # reference
    # The pass has one batch of 16 pairs and one for the evaluation; training runs no reference.
    "precompute": (dict(precompute_ref_log_probs=True, evaluate=4), dict(policy=3, eval=1, reference=1 + 1)),
    "precompute_ld": (dict(precompute_ref_log_probs=True, ld_alpha=0.5), dict(policy=3, reference=1)),
    "precompute_batch": (  # 16 pairs in batches of 6, unlike in training
        dict(precompute_ref_log_probs=True, precompute_ref_batch_size=6, evaluate=4),
        dict(policy=3, eval=1, reference=3 + 1),
    ),
    "precompute_adapter": (
        dict(precompute_ref_log_probs=True, **adapter()),
        dict(policy=3, reference=1),
    ),
    # evaluation
    "evaluation": (dict(evaluate=6), dict(policy=3, reference=3 + 2, eval=2)),  # the last batch has 2 of 4 pairs
    "evaluation_alone": (dict(evaluate=6, only_evaluate=True), dict(reference=2, eval=2)),
    "evaluation_first": (dict(evaluate=4, eval_on_start=True), dict(policy=3, reference=3 + 2, eval=2)),
    # batches
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4, reference=4)),
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),  # one pair: rows 0 and 1 share the prompt
    "last_batch_is_partial": (dict(per_device_train_batch_size=6, max_steps=3), FULL),  # 6, 6, 4 pairs
    "worker_processes": (dict(dataloader_num_workers=1, max_steps=2), dict(policy=2, reference=2)),  # shared memory
    # adapters
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=3, reference=3 + 1, eval=1)),
    "dora": (adapter(use_dora=True), FULL),
    "adapter_on_everything": (adapter(target_modules="all-linear"), FULL),  # except the head, which PEFT excludes
    "adapter_on_embeddings": (adapter(target_modules=["embed_tokens", "q_proj"]), FULL),
    "trained_embeddings": (adapter(modules_to_save=["embed_tokens"]), FULL),
    "disabled_dropout": (adapter(lora_dropout=0.3), FULL),  # TRL's default; prompts are then shared
    "trained_adapter": (
        dict(prepare=trained_adapter, reference=False, evaluate=4),
        dict(policy=3, reference=3 + 1, eval=1),
    ),
    # memory
    "checkpointing": (checkpointed(reentrant=False), FULL),
    "checkpointing_reentrant": (checkpointed(reentrant=True), FULL),
    "checkpointing_adapter": (dict(**checkpointed(reentrant=False), **adapter()), FULL),
    "checkpointing_reentrant_adapter": (dict(**checkpointed(reentrant=True), **adapter()), FULL),
    # TrainingArguments that DPOTrainer does not read: TRL computes its own loss
    "label_smoothing_factor": (dict(label_smoothing_factor=0.1), FULL),
    "average_tokens": (dict(average_tokens_across_devices=False), FULL),
    "unused_columns": (dict(remove_unused_columns=False), FULL),
    "use_cache": (dict(use_cache=True), FULL),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option):
    options, calls = OPTIONS[option]
    stock, patched = both(**options)
    assert_same(stock, patched)
    assert_fused(patched, **calls)


def test_precompute_without_a_reference_model(tmp_path):
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(), None, precompute_ref_log_probs=True)
    assert_fused(run, policy=3, reference=1)  # computed with the policy, but counted as reference
    assert run.logs[0]["rewards/margins"] == 0.0


def test_streaming(both):
    stream = Dataset.from_list(pairs(16)).to_iterable_dataset()
    stock, patched = both(data=stream)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3)


def test_compute_metrics_receives_logits_of_the_ordinary_forward(both):
    seen = []

    def compute_metrics(prediction) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"mean_logit": float(prediction.predictions.mean())}

    stock, patched = both(evaluate=4, compute_metrics=compute_metrics)
    assert_same(stock, patched)
    fused = hasattr(dpo_trainer, "add_fused_lm_head")  # TRL before 1.15 has no call for the logits alone
    evaluation = {("eval", "fused"): 1, ("reference", "fused"): 3 + 1} if fused else {("eval", "stock"): 1}
    assert patched.calls == {("policy", "fused"): 3, ("reference", "fused"): 3, **evaluation}
    assert any("eval_mean_logit" in log for log in patched.logs)
    assert seen[0].shape == seen[1].shape == (8, seen[0].shape[1], 97)


def test_token_accuracy_above_zero(both):
    """Random answers are never predicted; an accuracy of 0 would hide errors."""
    data = [dict(prompt=f"w{i} w2 ", chosen="w7 w7 w7", rejected=f"w{i} w8 w9 w8") for i in range(16)]
    stock, patched = both(data=data, loss_type=["sft"], learning_rate=0.2)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, reference=3)
    assert patched.logs[2]["mean_token_accuracy"] > 0.2


def test_reference_follows_the_policy(both, tmp_path):
    synced = dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6, max_steps=4)
    stock, patched = both(**synced)
    assert_same(stock, patched)
    assert_fused(patched, policy=4, reference=4)
    fixed = train(tmp_path / "fixed", tiny_model(seed=0), tiny_model(seed=1), max_steps=4)
    moved = [abs(stock.logs[i]["rewards/margins"] - fixed.logs[i]["rewards/margins"]) > 1e-3 for i in range(4)]
    assert moved == [False, False, True, True]


def test_a_reference_equal_to_the_policy_gives_a_margin_of_zero(tmp_path):
    synced = dict(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, max_steps=2)
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(seed=0), tiny_model(seed=1), **synced)
    assert [run.logs[i]["rewards/margins"] == 0 for i in range(2)] == [False, True]
