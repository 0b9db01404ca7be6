"""TRL's SFTTrainer, stock against patched: the same loss, metrics and gradients."""

import functools
import warnings

import pytest
import torch
from torch.utils.data import SequentialSampler
from trl import SFTTrainer

import fastdpo
from fastdpo.integrations.bypass import bypass_reason
from fastdpo.integrations.trl.sft import SFTLine
from tests.support import faults
from tests.support.comparison import assert_far_from_same, double
from tests.support.models.families import FUSED, kind
from tests.support.trl import grouping
from tests.support.trl.dpo import (
    WORDS,
    adapter,
    assert_fused,
    assert_same,
    assert_same_bits,
    recorded_layouts,
    tiny_model,
    tokenizer,
)
from tests.support.trl.sft import rows, texts, train_both_sft, train_sft

FULL = dict(policy=3)
ADAPTER = {name: x for name, x in adapter().items() if name != "reference"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}w1 {{ m.content }} {% else %}"
    "{% generation %}{{ m.content }} <eos> {% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_sft, tmp_path)


def conversations(n: int, seed: int = 0) -> list[dict]:
    """Two turns each. The labels of a row then have a gap."""
    all_rows = rows(n, seed)
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"].strip()},
                {"role": "assistant", "content": row["completion"]},
                {"role": "user", "content": all_rows[-i]["prompt"].strip()},
                {"role": "assistant", "content": all_rows[-i]["completion"]},
            ]
        }
        for i, row in enumerate(all_rows)
    ]


# option: (changed arguments, number of calls of each kind)
OPTIONS = {
    "completions": (dict(), FULL),
    "everything": (dict(completion_only_loss=False), FULL),
    "texts": (dict(data=texts), FULL),
    "dft": (dict(loss_type="dft"), FULL),
    "evaluation": (dict(evaluate=6), dict(policy=3, eval=2)),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4)),
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),
    "truncated": (dict(max_length=8), FULL),  # some rows keep no completion
    "keep_end": (dict(max_length=8, truncation_mode="keep_end"), FULL),
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),
    "tokens_of_a_rank": (dict(average_tokens_across_devices=False), FULL),
    "dft_ignores_label_smoothing": (dict(loss_type="dft", label_smoothing_factor=0.1), FULL),
    "adapter": (dict(evaluate=4, **ADAPTER), dict(policy=3, eval=1)),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "checkpointing_adapter": (dict(gradient_checkpointing=True, **ADAPTER), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1)),
}


@pytest.mark.parametrize(
    "option", [pytest.param(x, marks=pytest.mark.thorough) if x == "compiled" else x for x in OPTIONS]
)
def test_option(both, option):
    options, calls = OPTIONS[option]
    stock, patched = both(**options)
    assert not stock.calls
    assert_fused(patched, **calls)
    assert_same(stock, patched)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral"])
def test_family(both, name):
    without_dropout = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0) if name == "gpt2" else {}
    stock, patched = both(kind=kind(name), tiny=FUSED[name][1] | without_dropout, max_steps=2)
    assert_fused(patched, policy=2)
    assert_same(stock, patched)


def test_router_loss(both):
    stock, patched = both(kind="mixtral", tiny=FUSED["mixtral"][1], router_aux_loss_coef=0.5)
    assert_fused(patched, **FULL)
    assert_same(stock, patched)
    assert "aux_loss" in patched.logs[0]


def test_assistant_only_loss(both, monkeypatch):
    template = tokenizer()
    template.chat_template = TEMPLATE
    monkeypatch.setattr("tests.support.trl.sft.tokenizer", lambda: template)
    stock, patched = both(data=conversations, assistant_only_loss=True)
    assert_fused(patched, **FULL)
    assert_same(stock, patched)


def test_token_accuracy_above_zero(both):
    """Random completions are never predicted; an accuracy of 0 would hide errors."""

    def repeated(n: int, seed: int = 0) -> list[dict]:
        return [{"prompt": f"w{i} w2 ", "completion": "w7 w7 w7"} for i in range(n)]

    stock, patched = both(data=repeated, learning_rate=0.2)
    assert_fused(patched, **FULL)
    assert_same(stock, patched)
    assert patched.logs[2]["mean_token_accuracy"] > 0.2
    assert "entropy" in patched.logs[2]


def test_compute_metrics_receives_logits_of_the_ordinary_forward(both):
    def compute_metrics(prediction) -> dict[str, float]:
        assert prediction.predictions.shape[-1] == len(WORDS)
        return {"mean_logit": float(prediction.predictions.mean())}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL deprecates it
        stock, patched = both(evaluate=4, compute_metrics=compute_metrics)
    assert_fused(patched, policy=3, eval=1)
    assert_same(stock, patched)
    assert "eval_mean_logit" in patched.logs[-1]


class Sequential(SFTTrainer):
    """Trains on the rows in the order of the dataset."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("max_tokens", [None, 200])
def test_turns_of_a_conversation_come_together(tmp_path, monkeypatch, max_tokens):
    """Steps are those of stock with the same rows, and compute less than in the order that is drawn."""
    turns = [{"prompt": x["prompt"], "completion": x["chosen"]} for x in grouping.conversations()]
    orders, layouts = grouping.recorded_orders(monkeypatch), recorded_layouts(monkeypatch)
    options = dict(gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=1)
    computed = []
    for name, patch in {"drawn": {}, "grouped": dict(group_prompts=True)}.items():
        layouts.clear()
        with fastdpo.patched("trl.SFTTrainer", max_tokens=max_tokens, **patch):
            patched = train_sft(tmp_path / name, double(tiny_model()), data=lambda n: turns, **options)
        computed.append(sum(len(layout.token_index) for layout in layouts))
    assert {path for _, path in patched.calls} == {"fused"}
    assert sorted(orders[0]) == list(range(len(turns))) != orders[0]
    assert computed[1] < (0.75 if max_tokens is None else 0.85) * computed[0]
    in_order = dict(data=lambda n: [turns[i] for i in orders[0]], trainer_class=Sequential)
    assert_same(train_sft(tmp_path / "stock", double(tiny_model()), **in_order, **options), patched)


def loss_of_logits(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


DISABLED = {
    "packing": (dict(packing=True, max_length=32), "TRL packs its batches itself (packing=True)"),
    "wrapped": (
        dict(packing=True, packing_strategy="wrapped", max_length=32),
        "TRL packs its batches itself (packing=True)",
    ),
    "padding_free": (dict(padding_free=True, max_length=None), "TRL packs its batches itself (padding_free=True)"),
    "label_smoothing": (dict(label_smoothing_factor=0.1), "label smoothing needs the logits"),
    "compute_loss_func": (dict(compute_loss_func=loss_of_logits), "compute_loss_func needs the logits"),
}


@pytest.mark.parametrize("option", DISABLED)
def test_a_trainer_that_fastdpo_does_not_help_is_left_unpatched(both, caplog, option):
    options, reason = DISABLED[option]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL deprecates two of the options
        stock, patched = both(max_steps=2, **options)
    assert not patched.calls
    assert caplog.text.count(f"trl.SFTTrainer (SFTTrainer): not fused, {reason}") == 1
    assert caplog.text.count("not fused") == 1
    assert_same_bits(stock, patched)


def test_strict_raises_instead(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with fastdpo.patched("trl.SFTTrainer"), pytest.raises(fastdpo.NotFused, match="TRL packs its batches itself"):
        train_sft(tmp_path, tiny_model(), padding_free=True, max_length=None)


def test_attention_dropout_falls_back_to_stock(both, caplog):
    stock, patched = both(tiny=dict(attention_dropout=0.1))
    assert patched.calls == {("policy", "stock"): 3}
    assert caplog.text.count("trl.SFTTrainer (policy): not fused, attention dropout is active") == 1
    assert_same_bits(stock, patched)


def test_subclasses(both, tmp_path, caplog):
    class Scaled(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return 2 * super().compute_loss(model, inputs, *args, **kwargs)

    class Own(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    stock, patched = both(trainer_class=Scaled)
    assert_fused(patched, **FULL)
    assert_same(stock, patched)
    fastdpo.patch("trl.SFTTrainer")
    assert not train_sft(tmp_path / "own", tiny_model(), trainer_class=Own).calls
    assert "trl.SFTTrainer (Own): not fused, Own.compute_loss does not call SFTTrainer.compute_loss" in caplog.text


def test_labels_that_other_code_has_changed_unseen(both):
    """They come from the collator, and a write to `data` raises no version."""

    class Shortened(SFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            inputs["labels"].data[:, -3:] = -100
            return super().training_step(model, inputs, *args, **kwargs)

    stock, patched = both(trainer_class=Shortened)
    assert_fused(patched, policy=3)
    assert_same(stock, patched)


@pytest.mark.parametrize("module", ["gkd", "gold"])
def test_trainers_of_trl_that_compute_their_loss_from_logits_are_left_unpatched(module):
    """They are subclasses of SFTTrainer for its data pipeline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experimental = pytest.importorskip(f"trl.experimental.{module}")
    kind = getattr(experimental, f"{module.upper()}Trainer")
    assert "compute_loss does not call" in bypass_reason(kind.__new__(kind), SFTTrainer, SFTLine.path)


@pytest.mark.parametrize("sabotage", [faults.labels_a_token_late, faults.late_positions])
def test_the_comparison_detects_sabotage(both, monkeypatch, sabotage):
    faults.unnoticed_by_probes(monkeypatch)
    sabotage(monkeypatch)
    stock, patched = both(max_steps=1)
    assert_fused(patched, policy=1)
    with pytest.raises(AssertionError, match="step 0"):
        assert_same(stock, patched)
    assert_far_from_same(stock, patched, stock.in_float64)


def test_it_is_patched_by_name_only():
    assert "trl.SFTTrainer" not in {seam.name for seam in fastdpo.patch().seams}
    assert {seam.name: seam.on for seam in fastdpo.patch("trl").seams}["trl.SFTTrainer"]


def test_unpatching_restores_the_class_and_its_model(tmp_path):
    stock = dict(vars(SFTTrainer))
    fastdpo.patch("trl.SFTTrainer")
    assert dict(vars(SFTTrainer)) != stock
    model = tiny_model()
    train_sft(tmp_path, model)
    fastdpo.unpatch()
    assert dict(vars(SFTTrainer)) == stock
    assert model.config._attn_implementation == "sdpa"
    assert not any("fastdpo" in name for module in model.modules() for name in vars(module))
    assert not train_sft(tmp_path / "again", model).calls
