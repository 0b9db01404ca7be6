"""TRL's KTOTrainer, stock against patched: the same loss, metrics and gradients."""

import functools
import gc
import warnings

import pytest
import torch
from peft import PromptTuningConfig
from trl import KTOTrainer

import fastdpo
from fastdpo.integrations.scored_rows import merged
from fastdpo.integrations.trl import kto
from tests.support import faults
from tests.support.comparison import SIZES, assert_close, assert_far_from_same, assert_same_in_low_precision, double
from tests.support.models.families import DYNAMIC, FUSED, kind
from tests.support.models.multimodal import tiny_multimodal
from tests.support.trl.dpo import (
    WORDS,
    adapter,
    assert_fused,
    assert_same,
    assert_same_bits,
    tiny_model,
    trained_adapter,
)
from tests.support.trl.kto import rows, train_both_kto, train_kto

FULL = dict(policy=2 * 3, reference=3)
"""Calls of three steps: the policy for completions and for the KL term, the reference for both at once."""


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_kto, tmp_path)


def long_rows() -> list[dict]:
    """Rows shorter and longer than 12 tokens."""
    return [
        {**row, "completion": " ".join([row["completion"]] * (1 + i % 3)), "prompt": row["prompt"] * (1 + i % 2)}
        for i, row in enumerate(rows(20, seed=3))
    ]


# option: (changed arguments, number of calls of each kind)
OPTIONS = {
    "as it is": (dict(), FULL),
    # losses
    "apo_zero_unpaired": (dict(loss_type="apo_zero_unpaired", evaluate=4), dict(policy=3, reference=3 + 1, eval=1)),
    "weights": (dict(beta=0.5, desirable_weight=1.3, undesirable_weight=0.7), FULL),
    # truncation and padding
    "truncated": (dict(max_length=12, data=long_rows()), FULL),
    "untruncated": (dict(max_length=None, data=long_rows()), FULL),
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),
    # reference
    "sync_ref_model": (dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6), FULL),
    "precompute": (dict(precompute_ref_log_probs=True, evaluate=4), dict(policy=6, reference=4 + 1, eval=2)),
    "precompute_batch": (dict(precompute_ref_log_probs=True, precompute_ref_batch_size=6), dict(policy=6, reference=3)),
    "precompute_apo": (
        dict(precompute_ref_log_probs=True, loss_type="apo_zero_unpaired"),
        dict(policy=3, reference=4),
    ),
    "precompute_adapter": (dict(precompute_ref_log_probs=True, **adapter()), dict(policy=6, reference=4)),
    # evaluation
    "evaluation": (dict(evaluate=6), dict(policy=6, reference=3 + 2, eval=4)),  # the last batch has 2 of 4 rows
    "evaluation_alone": (dict(evaluate=6, only_evaluate=True), dict(reference=2, eval=4)),
    # batches
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=8, reference=4)),
    "batch_of_two": (dict(per_device_train_batch_size=2), FULL),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),  # 6, 6, 4 rows
    # adapters
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=6, reference=3 + 1, eval=2)),
    "dora": (adapter(use_dora=True), FULL),
    "trained_adapter": (  # TRL copies it
        dict(prepare=trained_adapter, reference=False, learning_rate=0.1, evaluate=4),
        dict(policy=6, reference=3 + 1, eval=2),
    ),
    # memory
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "checkpointing_adapter": (dict(gradient_checkpointing=True, **adapter()), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=2, reference=1)),
}
FAMILIES = ["gemma2", "gpt2", "mistral", "mixtral", "phi"]


@pytest.mark.parametrize(
    "option", [pytest.param(x, marks=pytest.mark.thorough) if x == "compiled" else x for x in OPTIONS]
)
def test_option(both, option):
    options, calls = OPTIONS[option]
    stock, patched = both(**options)
    assert not stock.calls
    assert_fused(patched, **calls)
    assert_same(stock, patched)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(both, name):
    stock, patched = both(kind=kind(name), tiny=FUSED[name][1], max_steps=2, prepare=lambda model: model.eval())
    assert_fused(patched, policy=4, reference=2)
    assert_same(stock, patched)


def test_router_loss(both):
    stock, patched = both(kind="mixtral", tiny=FUSED["mixtral"][1], router_aux_loss_coef=0.5)
    assert_fused(patched, **FULL)
    assert_same(stock, patched)
    assert "aux_loss" in patched.logs[0]


def test_reference_calls_of_different_widths_stay_apart_where_frequencies_depend_on_the_width(both):
    """One call would compute the shorter rows with the frequencies of the longer ones."""
    long = dict(kind="phi3", tiny=FUSED["phi3-longrope"][1], data=long_rows(), max_steps=4)
    stock, patched = both(**long)
    assert set(patched.calls) == {("policy", "fused"), ("reference", "fused")}
    assert patched.calls["policy", "fused"] == 8
    assert 4 <= patched.calls["reference", "fused"] <= 8
    assert_same(stock, patched)


def test_reference_calls_of_a_multimodal_model_stay_apart_likewise(both):
    """The configuration of its language model says what its rotary embeddings depend on."""
    text = {**SIZES, "vocab_size": len(WORDS), "head_dim": 8, "model_type": "llama", "max_position_embeddings": 16}
    text["rope_parameters"] = DYNAMIC
    long = dict(kind="llava", tiny=dict(text_config=text), build=tiny_multimodal, data=long_rows(), max_steps=4)
    stock, patched = both(**long)
    assert set(patched.calls) == {("policy", "fused"), ("reference", "fused")}
    assert 4 < patched.calls["reference", "fused"] <= 8
    assert_same(stock, patched)


def test_compute_metrics_receives_logits_of_the_ordinary_forward(both):
    def compute_metrics(prediction) -> dict[str, float]:
        return {"mean_logit": float(prediction.predictions.mean())}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL deprecates it
        stock, patched = both(evaluate=4, compute_metrics=compute_metrics)
    assert_fused(patched, policy=6, reference=3 + 1, eval=2)
    assert_same(stock, patched)
    assert "eval_mean_logit" in patched.logs[-1]


def test_precomputed_values_are_used(tmp_path):
    class ReferenceIsGone(KTOTrainer):
        def training_step(self, *args, **kwargs):
            for parameter in self.ref_model.parameters():
                parameter.data.fill_(torch.nan)
            return super().training_step(*args, **kwargs)

    with fastdpo.patched():
        models = [tiny_model(seed=seed) for seed in range(2)]
        expected = train_kto(tmp_path / "expected", *models)
        models = [tiny_model(seed=seed) for seed in range(2)]
        options = dict(precompute_ref_log_probs=True, trainer_class=ReferenceIsGone)
        assert_same(expected, train_kto(tmp_path / "precomputed", *models, **options))


def test_the_kl_term_is_above_zero(both):
    """TRL clamps it at 0, which would hide errors in the KL passes."""
    stock, patched = both()
    assert max(log.get("kl", 0.0) for log in stock.logs) > 1
    assert_same(stock, patched)


def test_attention_dropout_falls_back_to_stock_and_its_reference_is_fused(both, caplog):
    def loaded(model):
        return model.eval()  # as from_pretrained does; TRL sets the policy to training mode

    stock, patched = both(tiny=dict(attention_dropout=0.1), disable_dropout=False, prepare=loaded)
    assert patched.calls == {("policy", "stock"): 6, ("reference", "fused"): 3}
    assert caplog.text.count("trl.KTOTrainer (policy): not fused, attention dropout is active [attention-dropout]") == 1
    assert_same(stock, patched)


def test_prompt_tuning_falls_back_to_stock_and_its_reference_is_fused(both, caplog):
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    stock, patched = both(reference=False, peft_config=tuning)
    assert patched.calls == {("policy", "stock"): 6, ("reference", "fused"): 3}
    assert caplog.text.count("not fused, the model was called without input_ids") == 1
    assert_same(stock, patched)


def test_autocast(both, tmp_path):
    stock, patched = both(bf16=True, max_steps=2)
    assert_fused(patched, policy=4, reference=2)
    in_float64 = functools.partial(train_kto, tmp_path / "exact", double(tiny_model()), double(tiny_model(seed=1)))
    assert_same_in_low_precision(stock, patched, torch.bfloat16, functools.partial(in_float64, max_steps=2))


def test_a_reference_with_dropout_keeps_its_two_calls(both):
    stock, patched = both(tiny=dict(attention_dropout=0.1), disable_dropout=False, **adapter())
    assert patched.calls == {("policy", "stock"): 6, ("reference", "stock"): 6}
    assert_same_bits(stock, patched)


def test_an_unsupported_model_keeps_its_two_reference_calls(both):
    def with_alibi(model):
        model.config.alibi = True
        return model

    stock, patched = both(prepare=with_alibi)
    assert patched.calls == {("policy", "stock"): 6, ("reference", "stock"): 6}
    assert_same_bits(stock, patched)


def test_strict_raises_instead_of_falling_back(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    models = [tiny_model(seed=seed, attention_dropout=0.1) for seed in range(2)]
    with fastdpo.patched("trl.KTOTrainer"), pytest.raises(fastdpo.NotFused, match="attention dropout"):
        train_kto(tmp_path, *models, disable_dropout=False)


class OwnKL(KTOTrainer):
    """Scales the log-probabilities of the KL term, for policy and reference."""

    def _compute_kl_logps(self, model, batch):
        logps = super()._compute_kl_logps(model, batch)
        return None if logps is None else 2 * logps


class OwnLoss(KTOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss


def test_an_overridden_kl_pass_is_called_for_policy_and_reference(both):
    stock, patched = both(trainer_class=OwnKL)
    assert_fused(patched, policy=6, reference=6)
    assert_same(stock, patched)


def test_an_override_that_calls_nothing_leaves_the_trainer_unpatched(both, caplog):
    stock, patched = both(trainer_class=OwnLoss)
    assert not patched.calls
    reason = "trl.KTOTrainer (OwnLoss): not fused, OwnLoss._compute_loss does not call KTOTrainer._compute_loss"
    assert caplog.text.count(reason) == caplog.text.count("not fused") == 1
    assert_same_bits(stock, patched)


def test_the_experimental_name_of_the_trainer(both):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from trl.experimental.kto import KTOTrainer as Experimental

        stock, patched = both(trainer_class=Experimental)
    assert_fused(patched, **FULL)
    assert_same(stock, patched)


def _reference_of_other_rows(monkeypatch):
    monkeypatch.setattr(kto, "merged", lambda completions, of_KL: merged(of_KL, completions))


@pytest.mark.parametrize("sabotage", [faults.labels_a_token_late, faults.no_prefix, _reference_of_other_rows])
def test_the_comparison_detects_sabotage(both, monkeypatch, sabotage):
    faults.unnoticed_by_probes(monkeypatch)
    sabotage(monkeypatch)
    stock, patched = both(max_steps=1)
    assert_fused(patched, policy=2, reference=1)
    with pytest.raises(AssertionError, match="step 0"):
        assert_same(stock, patched)
    assert_far_from_same(stock, patched, stock.in_float64)


def test_unpatching_restores_the_class_and_existing_models(tmp_path):
    stock = dict(vars(KTOTrainer))
    trainers = []

    class Kept(KTOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    fastdpo.patch("trl.KTOTrainer")
    assert dict(vars(KTOTrainer)) != stock
    models = [tiny_model(seed=seed) for seed in range(2)]
    train_kto(tmp_path, *models, trainer_class=Kept)
    fastdpo.unpatch()
    assert dict(vars(KTOTrainer)) == stock
    for model in models:
        assert model.config._attn_implementation == "sdpa"
        assert not any("fastdpo" in name for module in model.modules() for name in vars(module))
    before = dict(fastdpo.calls)
    trainers[0].train()
    assert fastdpo.calls == before


def test_trainers_created_before_stay_stock_and_are_listed(tmp_path):
    gc.collect()  # trainers of other tests
    kept = []

    class Kept(KTOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            kept.append(self)

    train_kto(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=Kept)
    report = fastdpo.patch("trl.KTOTrainer")
    assert "Kept" in report.seams[0].stock_trainers
    before = dict(fastdpo.calls)
    kept[0].train()
    assert fastdpo.calls == before


@pytest.mark.parametrize("name", ["_compute_kl_logps", "compute_ref_log_probs", "_compute_loss"])
def test_a_changed_signature_is_rejected(monkeypatch, name):
    monkeypatch.setattr(KTOTrainer, name, lambda self, something_new: None)
    changed = dict(vars(KTOTrainer))
    (seam,) = (seam for seam in fastdpo.patch().seams if seam.name == "trl.KTOTrainer")
    assert f"KTOTrainer.{name} must have the parameters" in seam.reason
    assert dict(vars(KTOTrainer)) == changed


def test_merged_rows_have_the_log_probs_of_their_own_calls(tmp_path):
    """Rows of both calls differ in number of tokens, so that one of them is padded."""
    ids = torch.randint(3, 90, (4, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    inputs = dict(input_ids=ids, attention_mask=mask, completion_mask=mask * (torch.arange(9) >= 4))
    names = list(inputs)
    inputs |= {f"KL_{name}": x.roll(1, 0)[:, :8] for name, x in inputs.items()}
    rows = merged(*({name: inputs[f"{prefix}{name}"] for name in names} for prefix in ("", "KL_")))
    assert [x.shape for x in rows.values()] == [(8, 9)] * 3
    model = tiny_model().eval()

    def logps(batch: dict, prefix: str = "") -> torch.Tensor:
        of_all = model(input_ids=batch[f"{prefix}input_ids"], attention_mask=batch[f"{prefix}attention_mask"]).logits
        targets = batch[f"{prefix}input_ids"][:, 1:, None]
        of_targets = of_all[:, :-1].log_softmax(-1).gather(2, targets)[..., 0]
        return (of_targets * batch[f"{prefix}completion_mask"][:, 1:]).sum(1)

    with torch.no_grad():
        assert_close(logps(rows), torch.cat([logps(inputs), logps(inputs, "KL_")]), relative=1e-5)
