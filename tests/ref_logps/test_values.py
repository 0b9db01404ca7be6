"""Values equal the float64 definition and TRL's, and the model is unchanged afterwards."""

import logging
from collections import Counter

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

import fastdpo
from fastdpo import ref_logps
from tests.support.models.families import tiny_family
from tests.support.models.watching import watch
from tests.support.ref_logps import assert_close, exact, tokens
from tests.support.trl.dpo import config, dataset, tiny_model, tokenizer

LORA = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
OPTIONS = {
    "all": {},
    "keep_start": dict(max_length=12),  # cuts answers, some entirely
    "keep_end": dict(max_length=12, truncation_mode="keep_end"),  # cuts prompts, and with them the shared prefix
    "ld": dict(ld_alpha=0.5),
    "ld_keep_end": dict(max_length=9, truncation_mode="keep_end", ld_alpha=0.3),
}


@pytest.fixture
def reference_calls():
    before = Counter(fastdpo.calls)
    return lambda path="fused": (fastdpo.calls - before)["fastdpo.ref_logps", "reference", path]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("in_arrow", [False, True], ids=["list", "arrow"])
def test_values_equal_the_definition(option, in_arrow, reference_calls):
    rows = tokens(24)
    logps = ref_logps.precompute(
        tiny_model(), Dataset.from_list(rows) if in_arrow else rows, tokens_per_batch=100, **OPTIONS[option]
    )
    assert_close(logps, exact(tiny_model(), rows, **OPTIONS[option]))
    assert reference_calls() > 2


@pytest.mark.parametrize(
    "family", ["llama-tied", "gemma2", "granite", "gpt2", "phi", "mixtral", "mistral", "falcon_mamba"]
)
def test_values_of_other_families(family, reference_calls):
    """Tied weights, softcaps, scaled logits, learned positions, biases, experts, windows and states."""
    rows = tokens(12)
    assert_close(ref_logps.precompute(tiny_family(family), rows), exact(tiny_family(family), rows))
    assert reference_calls() == 1


@pytest.mark.parametrize("family", ["bloom", "falcon-alibi"])
def test_an_unsupported_model_runs_its_own_forward(family, reference_calls, caplog, monkeypatch):
    rows = tokens(8)
    with caplog.at_level(logging.WARNING, logger="fastdpo"):
        logps = ref_logps.precompute(tiny_family(family), rows)
    assert_close(logps, exact(tiny_family(family), rows))
    assert reference_calls("stock") == 8
    assert "fastdpo.ref_logps (reference): not fused" in caplog.text
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(fastdpo.NotFused):
        ref_logps.precompute(tiny_family(family), rows)


@pytest.mark.parametrize("adapter", [None, "ref"])
def test_values_of_an_adapter(adapter):
    rows = tokens(12)

    def peft_model():
        torch.manual_seed(3)
        model = get_peft_model(tiny_model(), LoraConfig(**LORA))
        model.add_adapter("ref", LoraConfig(**{**LORA, "r": 2}))
        model.set_adapter("default")
        return model

    model = peft_model()
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    logps = ref_logps.precompute(model, rows, adapter=adapter)
    assert model.active_adapter == "default"
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trainable
    merged = peft_model().merge_and_unload(adapter_names=["ref"]) if adapter else tiny_model()
    assert_close(logps, exact(merged, rows))


def test_values_under_autocast():
    rows = tokens(12)
    with torch.autocast("cpu", torch.bfloat16):
        logps = ref_logps.precompute(tiny_model(), rows)
    expected = exact(tiny_model(), rows)
    assert_close(logps, expected, relative=0.05)
    assert not torch.allclose(logps.chosen, expected.chosen, rtol=1e-5)


def test_dropout_is_disabled_and_the_model_restored(tmp_path):
    rows = tokens(6)
    model = tiny_family("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: id(x) for name, x in vars(model).items()}
    attention = model.config._attn_implementation
    logps = ref_logps.precompute(model, rows, cache_dir=tmp_path)
    assert modes == [module.training for module in model.modules()]
    assert before == {name: id(x) for name, x in vars(model).items()}
    assert attention == model.config._attn_implementation
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert_close(logps, exact(tiny_family("gpt2"), rows))


def test_rows_without_scored_tokens_are_zero_not_computed_and_stored(tmp_path, reference_calls):
    rows = [{"prompt_ids": [1, 2, 3], "chosen_ids": [4], "rejected_ids": []}] * 2
    for _ in range(2):
        logps = ref_logps.precompute(tiny_model(), rows, max_length=3, cache_dir=tmp_path)
        assert logps.chosen.tolist() == logps.rejected.tolist() == [0, 0]
        assert reference_calls() == 0
    assert ref_logps.precompute(tiny_model(), []).chosen.shape == (0,)


def test_the_budget_bounds_the_tokens_per_forward(monkeypatch):
    model, seen = tiny_model(), []
    watch(model.model, lambda **kwargs: seen.append(kwargs["input_ids"].numel()))
    for budget in (80, 160):
        seen.clear()
        ref_logps.precompute(model, tokens(60), tokens_per_batch=budget)
        assert budget / 2 < max(seen[-8:]) <= budget  # the first calls are the probe's


def test_with_ref_logps_adds_columns(tmp_path):
    rows = tokens(5)
    logps = ref_logps.precompute(tiny_model(), rows)
    plain = ref_logps.with_ref_logps(rows, logps)
    filtered = Dataset.from_list([*rows[:2], rows[0], *rows[2:]]).select([0, 1, 3, 4, 5])
    arrow = ref_logps.with_ref_logps(filtered, logps)
    assert arrow.features["ref_chosen_logps"].dtype == arrow.features["ref_rejected_logps"].dtype == "float32"
    for extended in (plain, list(arrow)):
        assert [row["prompt_ids"] for row in extended] == [row["prompt_ids"] for row in rows]
        assert [row["ref_chosen_logps"] for row in extended] == logps.chosen.tolist()
        assert [row["ref_rejected_logps"] for row in extended] == logps.rejected.tolist()
    collated = DataCollatorForPreference(pad_token_id=0)(plain)
    assert torch.equal(collated["ref_chosen_logps"], logps.chosen)
    assert "ref_chosen_logps" not in rows[0]
    for again in (plain, arrow):
        with pytest.raises(ValueError, match="must not have ref_chosen_logps"):
            ref_logps.with_ref_logps(again, logps)
    with pytest.raises(ValueError, match="logps must have 4 rows; got 5"):
        ref_logps.with_ref_logps(rows[:4], logps)


def with_id(column, token):
    rows = tokens(4)
    rows[2][column] = [5, token, 6]
    return rows


INVALID_ARGUMENTS = {  # what arguments alone may not be stands in tests/test_malformed.py
    "chosen_ids must lie from 0 to 96; got 1000 in row 2": dict(
        dataset=Dataset.from_list(with_id("chosen_ids", 1000)), max_length=1
    ),
    "adapter must be None without a PeftModel; got 'ref'": dict(adapter="ref"),
    "dataset must be a datasets.Dataset": dict(dataset=IterableDataset.from_generator(lambda: iter(tokens(2)))),
    "dataset must store its rows; got one with a transform": dict(
        dataset=Dataset.from_list(tokens(2)).with_transform(lambda rows: rows)
    ),
    "dataset must not have images, .*; got the column 'images'": dict(
        dataset=[tokens(2)[0], tokens(2)[1] | dict(images=[])]
    ),
    "dataset must not have images, .*; got the column 'image'": dict(
        dataset=Dataset.from_list([row | dict(image=0) for row in tokens(2)])
    ),
}


@pytest.mark.parametrize("message", INVALID_ARGUMENTS)
def test_invalid_arguments_raise(message):
    arguments = dict(model=tiny_model(), dataset=tokens(2)) | INVALID_ARGUMENTS[message]
    with pytest.raises((ValueError, TypeError), match=message):
        ref_logps.precompute(arguments.pop("model"), arguments.pop("dataset"), **arguments)


def test_an_unknown_adapter_raises():
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    with pytest.raises(ValueError, match=r"adapter must be one of \['default'\].*; got 'ref'"):
        ref_logps.precompute(model, tokens(2), adapter="ref")


def test_a_non_finite_value_raises_and_is_not_stored(tmp_path):
    model = tiny_model()
    model.model.embed_tokens.weight.data[50] = torch.nan
    rows = [{"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [i, 5]} for i in (4, 50, 6)]
    with pytest.raises(ValueError, match="must be finite; got others for row 1"):
        ref_logps.precompute(model, rows, cache_dir=tmp_path, tokens_per_batch=1)
    assert not any(b"nan" in path.read_bytes() for path in tmp_path.rglob("*.safetensors"))


def test_the_model_of_a_patched_trainer_is_rejected(tmp_path):
    with fastdpo.patched():
        model = tiny_model()
        DPOTrainer(
            model=model,
            ref_model=tiny_model(seed=1),
            args=config(tmp_path),
            train_dataset=dataset(4, tmp_path / "data"),
            processing_class=tokenizer(),
        )
        with pytest.raises(ValueError, match="must not belong to a patched trainer"):
            ref_logps.precompute(model, tokens(2))
    ref_logps.precompute(model, tokens(2))
