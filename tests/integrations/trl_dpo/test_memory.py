"""`reference_memory` with TRL's DPOTrainer: equal training with one reference pass per pair."""

import errno
import logging
import os
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model

import fastdpo
from fastdpo import NotFused
from fastdpo.models import calls as counters
from fastdpo.ref_logps.memory import digests_of_pairs
from tests.support.comparison import assert_close
from tests.support.trl.dpo import LORA, assert_same, assert_same_bits, build, pairs, run_two_ranks, tiny_model, train

EPOCHS = dict(data=pairs(8), max_steps=-1, num_train_epochs=3, evaluate=8)
TWICE = dict(EPOCHS, eval_strategy="epoch")


def remembering(directory, model, reference, memory=True, **options):
    with fastdpo.patched("trl.DPOTrainer", reference_memory=memory):
        return train(directory, model, reference, **options)


def trained_adapter():
    torch.manual_seed(5)
    return get_peft_model(tiny_model(), LoraConfig(**LORA))


MODELS = {
    "full": lambda: dict(model=tiny_model(), reference=tiny_model(seed=1)),
    "adapter": lambda: dict(model=tiny_model(), reference=None, peft_config=LoraConfig(**LORA)),
    "adapter with dropout": lambda: dict(
        model=tiny_model(), reference=None, peft_config=LoraConfig(**{**LORA, "lora_dropout": 1e-9})
    ),
    "loaded adapter": lambda: dict(model=trained_adapter(), reference=None),
    "recurrent": lambda: dict(model=tiny_model("mamba", **MAMBA), reference=tiny_model("mamba", seed=1, **MAMBA)),
    "not packed": lambda: dict(model=tiny_model("bloom", **BLOOM), reference=tiny_model("bloom", seed=1, **BLOOM)),
}
MAMBA = dict(without=("head_dim", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"))
BLOOM = dict(n_layer=2, n_head=4)
OPTIONS = {
    "as it is": dict(),
    "ld_alpha": dict(ld_alpha=0.3),
    "ipo": dict(loss_type="ipo"),
    "truncated": dict(max_length=12),
    "accumulation": dict(gradient_accumulation_steps=2, per_device_train_batch_size=2),
    "checkpointing": dict(gradient_checkpointing=True),
    "other batches in evaluation": dict(per_device_eval_batch_size=3),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_training(tmp_path, name):
    stock = train(tmp_path / "stock", **MODELS[name](), **TWICE)
    patched = remembering(tmp_path / "patched", **MODELS[name](), **TWICE)
    assert_same(stock, patched)
    path = "stock" if name == "not packed" else "fused"
    # 2 batches per epoch and 2 per evaluation; 3 epochs and 4 evaluations, one of them explicit
    reference_calls = {key: n for key, n in patched.calls.items() if key[0] == "reference"}
    assert reference_calls == {("reference", path): 4, ("reference", "remembered"): 4 + 6}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(tmp_path, option):
    models = MODELS["full"]
    stock = train(tmp_path / "stock", **models(), **{**TWICE, **OPTIONS[option]})
    patched = remembering(tmp_path / "patched", **models(), **{**TWICE, **OPTIONS[option]})
    assert_same(stock, patched)
    assert patched.calls["reference", "remembered"] > patched.calls["reference", "fused"]


def test_only_new_pairs_are_computed(tmp_path):
    reference, calls = tiny_model(seed=1), []
    reference.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    # Batches of 4 and of 2 pairs, then the first of the second epoch.
    patched = remembering(tmp_path, tiny_model(), reference, data=pairs(6), evaluate=0, max_steps=3)
    assert calls == [8, 4]  # two rows per pair
    assert patched.calls["reference", "remembered"] == 1


def test_the_tokens_of_avoided_runs_were_given(tmp_path):
    counts = {}
    for memory in (False, True):
        counters.tokens.clear()
        options = dict(data=pairs(4), evaluate=0, max_steps=2)
        remembering(tmp_path / str(memory), tiny_model(), tiny_model(seed=1), memory, **options)
        counts[memory] = [counters.tokens["trl.DPOTrainer", name] for name in ("given", "computed")]
    given, computed = counts[False]
    assert counts[True] == [given, computed * 3 // 4]  # one of the four runs over the same batch is avoided


def test_a_batch_of_old_and_new_pairs(tmp_path):
    with fastdpo.patched("trl.DPOTrainer", reference_memory=True):
        trainer = build(tmp_path / "data", tiny_model(), tiny_model(seed=1), 8)
        examples = list(trainer.train_dataset)
        collated = {n: trainer.data_collator(examples[:n]) for n in (3, 8)}
        losses = [trainer.compute_loss(trainer.model, collated[n]) for n in (3, 8, 8)]
        assert fastdpo.calls["trl.DPOTrainer", "reference", "remembered"] >= 1
    stock = build(tmp_path / "again", tiny_model(), tiny_model(seed=1), 8)
    expected = [stock.compute_loss(stock.model, collated[n]) for n in (3, 8, 8)]
    assert_close(torch.stack(losses), torch.stack(expected))
    assert losses[1] == losses[2]


def test_a_directory_outlives_the_process(tmp_path):
    first = remembering(tmp_path / "1", **MODELS["full"](), memory=tmp_path / "memory", **EPOCHS)
    second = remembering(tmp_path / "2", **MODELS["full"](), memory=str(tmp_path / "memory"), **EPOCHS)
    assert_same_bits(first, second)
    assert first.calls["reference", "fused"] == 4
    assert second.calls["reference", "fused"] == 0
    assert second.calls["reference", "remembered"] == 6 + 2

    others = {  # runs that must not reuse the stored values
        "model": dict(MODELS["full"](), reference=tiny_model(seed=2)),
        "ld_alpha": dict(MODELS["full"](), ld_alpha=0.5),
        "precision": dict(MODELS["full"](), bf16=True),
        "tokens": dict(MODELS["full"](), max_length=12),
    }
    for name, other in others.items():
        run = remembering(tmp_path / name, memory=tmp_path / "memory", **{**EPOCHS, **other})
        assert run.calls["reference", "fused"] > 0, name
    adapter = remembering(tmp_path / "3", memory=tmp_path / "memory", **MODELS["adapter"](), **EPOCHS)
    again = remembering(tmp_path / "4", memory=tmp_path / "memory", **MODELS["adapter"](), **EPOCHS)
    assert (adapter.calls["reference", "fused"], again.calls["reference", "fused"]) == (4, 0)
    assert_same_bits(adapter, again)


def test_the_error_for_a_truncated_file_names_it(tmp_path):
    remembering(tmp_path / "1", **MODELS["full"](), memory=tmp_path / "memory", **EPOCHS)
    path, *_ = (tmp_path / "memory").rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=re.escape(f"{path} must be a whole safetensors file")):
        remembering(tmp_path / "2", **MODELS["full"](), memory=tmp_path / "memory", **EPOCHS)


def under_a_file(directory, monkeypatch):
    directory.write_text("a file")


def on_a_full_disk(directory, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def full_after_the_start(directory, monkeypatch):
    """The disk accepts the file that tests it at the start, and no other file."""
    stock, written = os.fsync, []

    def fsync(descriptor):
        written.append(descriptor)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        stock(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("break_it", [under_a_file, on_a_full_disk, full_after_the_start])
def test_an_unwritable_directory_does_not_stop_training(tmp_path, caplog, monkeypatch, break_it):
    stock = train(tmp_path / "stock", **MODELS["full"](), **EPOCHS)
    break_it(tmp_path / "memory", monkeypatch)
    patched = remembering(tmp_path / "patched", **MODELS["full"](), memory=tmp_path / "memory" / "kept", **EPOCHS)
    assert_same(stock, patched)
    assert patched.calls["reference", "remembered"] == 4
    messages = [record.message for record in caplog.records if "reference_memory" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith("fastdpo: trl.DPOTrainer: reference_memory is kept in RAM, not on disk: ")


def test_values_of_a_model_with_custom_hooks_stay_in_ram(tmp_path, caplog):
    reference = tiny_model(seed=1)
    reference.model.norm.register_forward_hook(lambda module, args, output: output * 1.1)
    run = remembering(tmp_path / "1", tiny_model(), reference, memory=tmp_path / "memory", **EPOCHS)
    assert run.calls["reference", "remembered"] == 4
    assert "reference_memory is kept in RAM, not on disk: " in caplog.text
    assert not list(tmp_path.glob("memory/**/*.safetensors"))


def adapter_on(model, **options) -> dict:
    return dict(model=model, reference=None, peft_config=LoraConfig(**{**LORA, **options}))


DISABLED_REASONS = {
    "the reference follows the policy": lambda: dict(
        sync_ref_model=True, ref_model_mixup_alpha=0.5, ref_model_sync_steps=1, **MODELS["full"]()
    ),
    "NEFTune adds noise to the reference": lambda: dict(neftune_noise_alpha=5.0, **MODELS["adapter"]()),
    "dropout is active in the reference": lambda: adapter_on(tiny_model(attention_dropout=0.5)),
    "trained weights are part of the reference": lambda: adapter_on(tiny_model(attention_bias=True), bias="all"),
}


@pytest.mark.parametrize("reason", DISABLED_REASONS)
def test_memory_is_disabled_if_reference_values_can_change(tmp_path, caplog, monkeypatch, reason):
    with caplog.at_level(logging.WARNING, "fastdpo"):
        run = remembering(tmp_path, data=pairs(4), max_steps=2, **DISABLED_REASONS[reason]())
    messages = [record.message for record in caplog.records if "reference_memory" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(f"fastdpo: trl.DPOTrainer: reference_memory is disabled, {reason}")
    assert not run.calls["reference", "remembered"]
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(NotFused, match="reference_memory is disabled"):
        remembering(tmp_path / "strict", data=pairs(4), max_steps=2, **DISABLED_REASONS[reason]())


def test_precomputed_values_need_no_memory(tmp_path):
    run = remembering(tmp_path, **MODELS["full"](), data=pairs(8), precompute_ref_log_probs=True)
    assert run.calls["reference", "remembered"] == 0


def test_digests_depend_only_on_the_tokens_of_a_pair():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [5, 6, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "completion_mask": torch.tensor([[0, 0, 1, 0], [0, 0, 1, 1]]),
    }

    def changed(**values) -> bool:
        other = {name: x.clone() for name, x in batch.items()}
        for name, (row, column, value) in values.items():
            other[name][row, column] = value
        return digests_of_pairs(*other.values()) != digests_of_pairs(*batch.values())

    assert not changed(input_ids=(0, 3, 42))  # padding
    assert changed(input_ids=(0, 0, 42))
    assert changed(input_ids=(1, 3, 42))
    assert changed(completion_mask=(0, 1, 1))
    assert changed(attention_mask=(1, 3, 0), completion_mask=(1, 3, 0))
    padded = {name: torch.nn.functional.pad(x, (2, 3)) for name, x in batch.items()}
    assert digests_of_pairs(*padded.values()) == digests_of_pairs(*batch.values())
    swapped = {name: x.flip(0) for name, x in batch.items()}
    assert digests_of_pairs(*swapped.values()) != digests_of_pairs(*batch.values())


def test_ranks_share_remembered_values(tmp_path):
    """Shuffling gives a rank pairs in the second epoch that the other computed in the first."""
    for rank in run_two_ranks("memory", tmp_path):
        calls = {key[1:]: n for key, n in rank["calls"].items()}
        assert calls["reference", "fused"] == 2  # the first epoch: 8 pairs on 2 ranks, 2 per batch
        assert calls["reference", "remembered"] == 4
