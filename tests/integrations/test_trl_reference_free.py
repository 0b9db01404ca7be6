"""TRL's CPOTrainer and ORPOTrainer, stock against patched: the same loss, metrics and gradients.

Stock averages `logits/*` over prompts and padding, too. These are compared with `completions_only`,
which is stock with logits of completion tokens only; all other numbers are compared with stock itself.
"""

import copyreg
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

import fastdpo
from tests.support import faults
from tests.support.comparison import assert_far_from_same, double
from tests.support.models.families import FUSED
from tests.support.trl.dpo import (
    Run,
    adapter,
    assert_fused,
    assert_same,
    assert_same_bits,
    pairs,
    tiny_model,
    train_both,
)
from tests.support.trl.reference_free import train_reference_free

FULL = dict(policy=3)
ADAPTER = {name: x for name, x in adapter().items() if name != "reference"}
BOTH = [CPOTrainer, ORPOTrainer]


def completions_only(trainer_class: type) -> type:
    """A subclass that returns logits of the completions only."""

    class CompletionsOnly(trainer_class):
        def concatenated_forward(self, model, batch):
            chosen_logps, rejected_logps, *logits, nll = super().concatenated_forward(model, batch)[:5]
            width = max(batch[f"{name}_labels"].shape[1] for name in ("chosen", "rejected"))
            for i, name in enumerate(("chosen", "rejected")):
                scored = torch.zeros(len(logits[i]), width - 1, dtype=torch.bool)
                labels = batch[f"{name}_labels"][:, 1:]
                scored[:, : labels.shape[1]] = labels != -100
                logits[i] = logits[i][:, : width - 1][scored]
            return chosen_logps, rejected_logps, *logits, nll

    return CompletionsOnly


def name_of(trainer_class: type) -> str:
    return f"trl.{next(kind.__name__ for kind in BOTH if issubclass(trainer_class, kind))}"


def three_runs(directory: Path, trainer_class: type, kind: str = "llama", tiny=None, **options) -> list[Run]:
    """Stock, `completions_only` stock, and patched."""
    train = functools.partial(train_reference_free, trainer_class=trainer_class)
    both = dict(reference=False, trainer=name_of(trainer_class), train=train)
    stock, patched = train_both(directory, kind, tiny, **both, **options)

    def completions(name: str, cast=lambda model: model) -> Run:
        model = cast(tiny_model(kind, **(tiny or {})))
        return train_reference_free(directory / name, model, trainer_class=completions_only(trainer_class), **options)

    defined = completions("defined")
    defined.in_float64 = functools.partial(completions, "defined in float64", double)
    return [stock, defined, patched]


def without_logits(run: Run) -> Run:
    logs = [{name: x for name, x in log.items() if "logits/" not in name} for log in run.logs]
    again = run.in_float64
    return replace(run, logs=logs, in_float64=None if again is None else lambda: without_logits(again()))


def assert_all_same(stock: Run, defined: Run, patched: Run) -> None:
    assert not stock.calls
    assert_same(without_logits(stock), without_logits(patched))
    assert_same(defined, patched)


LONG = [{**row, "chosen": " ".join([row["chosen"]] * 3), "prompt": row["prompt"] * 2} for row in pairs(16)]
OPTIONS = {
    "as it is": (dict(), FULL),
    "evaluation": (dict(evaluate=6), dict(policy=3, eval=2)),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4)),
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),
    "truncated": (dict(max_length=32, data=LONG), FULL),
    "adapter": (dict(evaluate=4, **ADAPTER), dict(policy=3, eval=1)),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "softcap": (dict(kind="gemma2", tiny=FUSED["gemma2"][1]), FULL),
    "learned positions": (dict(kind="gpt2", tiny=FUSED["gpt2"][1]), FULL),
}
OPTIONS_OF_CPO = {
    "ipo": dict(loss_type="ipo"),
    "hinge": dict(loss_type="hinge"),
    "simpo": dict(loss_type="simpo", cpo_alpha=0.0),
    "simpo with nll": dict(loss_type="simpo", cpo_alpha=0.5),
    "alpha": dict(alpha=0.02, loss_type="simpo"),
    "label_smoothing": dict(label_smoothing=0.1),
}


@pytest.mark.parametrize("trainer_class", BOTH)
@pytest.mark.parametrize("option", OPTIONS)
def test_option(tmp_path, trainer_class, option):
    options, calls = OPTIONS[option]
    runs = three_runs(tmp_path, trainer_class, **options)
    assert_fused(runs[-1], **calls)
    assert_all_same(*runs)


@pytest.mark.parametrize("option", OPTIONS_OF_CPO)
def test_option_of_cpo(tmp_path, option):
    runs = three_runs(tmp_path, CPOTrainer, **OPTIONS_OF_CPO[option])
    assert_fused(runs[-1], **FULL)
    assert_all_same(*runs)


@pytest.mark.parametrize("trainer_class", BOTH)
def test_router_loss(tmp_path, trainer_class):
    tiny = FUSED["mixtral"][1] | dict(output_router_logits=True, router_aux_loss_coef=0.5)
    train = functools.partial(train_reference_free, trainer_class=trainer_class)
    options = dict(kind="mixtral", tiny=tiny, reference=False, train=train)
    stock, patched = train_both(tmp_path, trainer=name_of(trainer_class), **options)
    assert_fused(patched, **FULL)
    assert_same(without_logits(stock), without_logits(patched))


@pytest.mark.parametrize("trainer_class", BOTH)
def test_attention_dropout_falls_back_to_stock(tmp_path, trainer_class, caplog):
    options = dict(tiny=dict(attention_dropout=0.1), disable_dropout=False)
    stock, defined, patched = three_runs(tmp_path, trainer_class, **options)
    assert patched.calls == {("policy", "stock"): 3}
    assert f"{name_of(trainer_class)} (policy): not fused, attention dropout is active" in caplog.text
    assert_same_bits(without_logits(stock), without_logits(patched))
    assert_same(defined, patched)


@pytest.mark.parametrize("trainer_class", BOTH)
def test_an_override_that_calls_nothing_leaves_the_trainer_unpatched(tmp_path, trainer_class, caplog):
    class Own(trainer_class):
        def get_batch_loss_metrics(self, model, batch, train_eval="train"):
            return model(batch["chosen_input_ids"], labels=batch["chosen_labels"]).loss, {}

    fastdpo.patch(name_of(trainer_class))
    model = tiny_model()
    assert not train_reference_free(tmp_path, model, trainer_class=Own).calls
    assert caplog.text.count("not fused, Own.get_batch_loss_metrics does not call") == 1
    assert not any("fastdpo" in name for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("trainer_class", BOTH)
@pytest.mark.parametrize("sabotage", [faults.labels_a_token_late, faults.no_prefix])
def test_the_comparison_detects_sabotage(tmp_path, monkeypatch, trainer_class, sabotage):
    faults.unnoticed_by_probes(monkeypatch)
    sabotage(monkeypatch)
    _, defined, patched = three_runs(tmp_path, trainer_class, max_steps=1)
    assert_fused(patched, policy=1)
    with pytest.raises(AssertionError, match="step 0"):
        assert_same(defined, patched)
    assert_far_from_same(defined, patched, defined.in_float64)


@pytest.mark.parametrize("trainer_class", BOTH)
def test_unpatching_restores_the_class_and_its_model(tmp_path, trainer_class):
    copyreg._slotnames(trainer_class)  # which Python notes in a class when it first copies an instance
    stock = dict(vars(trainer_class))
    fastdpo.patch(name_of(trainer_class))
    assert dict(vars(trainer_class)) != stock
    model = tiny_model()
    assert_fused(train_reference_free(tmp_path, model, trainer_class=trainer_class), **FULL)
    fastdpo.unpatch()
    assert dict(vars(trainer_class)) == stock
    assert model.config._attn_implementation == "sdpa"
    assert not any("fastdpo" in name or name == "forward" for module in model.modules() for name in vars(module))
