"""The comparison with stock must be able to fail; unusual calls of the patched forward."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers.models.llama.modeling_llama import LlamaModel
from trl import DPOTrainer

import fastdpo
from fastdpo.models import calls as counters
from tests.contract.trainers.trl.dpo import LOSSES, OF_TRL
from tests.support import faults
from tests.support.comparison import assert_trained_alike
from tests.support.models.families import FUSED, kind, tiny_family
from tests.support.models.watching import change, watch
from tests.support.trl.dpo import (
    adapter,
    assert_a_missing_token_is_noticed,
    assert_fused,
    assert_same,
    assert_same_bits,
    build,
    tiny_model,
    train,
    train_both,
)


def test_every_loss_of_trl_is_trained():
    assert OF_TRL
    assert set(OF_TRL) <= LOSSES.keys()


def test_equal_weights_give_a_margin_of_exactly_zero(tmp_path):
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(seed=0), tiny_model(seed=0), max_steps=1)
    assert run.logs[0]["rewards/margins"] == run.logs[0]["rewards/chosen"] == 0.0


# A line names kinds in the order in which this process has counted them first.
@mock.patch.dict(fastdpo.calls, clear=True)
def test_the_log_says_how_much_was_computed(tmp_path, caplog):
    caplog.set_level("INFO", logger="fastdpo")
    rows = [dict(prompt=f"w{i} w2 w3 ", chosen="w4 w5", rejected="w6") for i in range(10, 14)]
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(
            tmp_path, tiny_model(), tiny_model(), per_device_train_batch_size=2, max_steps=2, logging_steps=1
        )
        trainer.train_dataset = trainer._prepare_dataset(
            Dataset.from_list(rows), trainer.processing_class, trainer.args, "train"
        )
        trainer.train()
    padded, distinct = 2 * (3 + 2 + 1), 3 + 2 + 1  # of a pair; nothing is scored behind its end tokens
    given, computed = (2 * 2 * n for n in (padded, distinct))  # models and pairs of a step
    unshared = 2 * 2 * (5 + 4)
    lines = [record.message for record in caplog.records if "padded tokens" in record.message]
    assert lines == [
        f"fastdpo: trl.DPOTrainer calls: policy fused {n}, reference fused {n}; "
        f"100% of calls fused, {computed / given:.0%} of {n * given} padded tokens computed "
        f"({unshared / given:.0%} without sharing)"
        for n in (1, 2)
    ]


class WithoutGradients(DPOTrainer):
    """Computes losses alone, as zeroth-order optimizers need them."""

    def training_step(self, model, inputs, *args):
        with torch.no_grad():
            return self.compute_loss(model.train(), self._prepare_inputs(inputs))


class Elsewhere(DPOTrainer):
    """Computes losses at other weights than those of the model, as sharpness-aware and meta-learning methods do."""

    def _compute_loss(self, model, *args, **kwargs):
        weights = {name: 1.01 * p for name, p in model.named_parameters()}
        return super()._compute_loss(
            lambda *given, **named: torch.func.functional_call(model, weights, given, named), *args, **kwargs
        )


@pytest.mark.parametrize("options", [{}, adapter()], ids=["full", "LoRA"])
def test_a_function_in_the_place_of_the_policy(tmp_path, options):
    both = train_both(tmp_path, trainer_class=Elsewhere, **options)
    assert_same(*both)
    assert_fused(both[1], policy=3, reference=3)


@pytest.mark.parametrize("options", [{}, adapter()], ids=["full", "LoRA"])
def test_a_policy_that_trains_without_gradients_is_no_reference(tmp_path, options):
    models = [tiny_model(), None if options else tiny_model(seed=1)]
    options = {name: x for name, x in options.items() if name != "reference"}
    with fastdpo.patched("trl.DPOTrainer"):
        assert_fused(train(tmp_path, *models, trainer_class=WithoutGradients, **options), policy=3, reference=3)


def test_a_line_of_calls_that_fell_back(monkeypatch):
    calls = Counter({("x", "policy", "fused"): 3, ("x", "eval", "stock"): 1})
    monkeypatch.setattr(counters, "calls", calls)
    assert counters.calls_line("x") == "fastdpo: x calls: policy fused 3, eval stock 1; 75% of calls fused"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", dict(loss_type=["ipo"])),  # a square of differences of sums
        ("llama", dict(loss_type=["sppo_hard"])),
        ("gemma4_text", dict()),  # the family with the most rounding
    ],
    ids=["ipo", "sppo_hard", "gemma4_text"],
)
def test_the_comparison_detects_a_missing_token(tmp_path, name, options):
    """The comparison can fail even for the losses and families with the largest rounding errors."""
    assert_a_missing_token_is_noticed(tmp_path, kind(name), FUSED[name][1], **options)


@pytest.mark.parametrize("sabotage", [faults.late_positions, faults.no_prefix, faults.leak])
def test_a_model_that_fails_the_probe_trains_like_stock(both, monkeypatch, caplog, sabotage):
    sabotage(monkeypatch)
    assert_trained_alike(both(max_steps=1), {("policy", "stock"): 1, ("reference", "stock"): 1}, same=assert_same_bits)
    assert caplog.text.count("the packed hidden states of LlamaForCausalLM differ from its padded ones") == 2


def with_alibi(model):
    """Sets a config field that marks unsupported models. A Llama model does not read it."""
    model.config.alibi = True
    return model


def test_the_call_counters_detect_a_disabled_fused_path(both):
    """Without the fused path all numbers agree; only the call counters show the difference."""
    stock, patched = both(max_steps=1, prepare=with_alibi)
    assert_same(stock, patched)
    with pytest.raises(AssertionError):
        assert_fused(patched, policy=1, reference=1)


def with_doubled_packed_states(model):
    """Doubles the hidden states of packed calls, whose mask is an int32 layout."""

    def double(output, attention_mask, **kwargs):
        if attention_mask.dtype == torch.int32:
            output.last_hidden_state = 2 * output.last_hidden_state
        return output

    change(model.model, double)
    return model


def test_strict_raises_instead_of_falling_back(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with fastdpo.patched(), pytest.raises(fastdpo.NotFused, match="ALiBi"):
        train(tmp_path, tiny_family("falcon-alibi"), tiny_family("falcon-alibi", seed=1))
    with fastdpo.patched(), pytest.raises(fastdpo.NotFused, match="differ from its padded ones"):
        train(tmp_path / "probed", with_doubled_packed_states(tiny_model()), tiny_model(seed=1))


def test_one_layout_serves_policy_and_reference(tmp_path):
    positions = {"policy": [], "reference": []}
    models = {name: tiny_model(seed=seed) for seed, name in enumerate(positions)}
    for name, model in models.items():
        seen = positions[name]
        watch(model.model, lambda seen=seen, **kwargs: seen.append(kwargs.get("position_ids")))
    with fastdpo.patched():
        train(tmp_path, *models.values(), max_steps=2)
    (*_, a, b), (*_, c, d) = positions.values()  # the earlier ones are from probes
    assert len(a) == len(b) == 1, "packed"
    assert (a.data_ptr(), b.data_ptr()) == (c.data_ptr(), d.data_ptr()), "the same two layouts"
    assert a.data_ptr() != b.data_ptr()


def test_a_model_is_probed_once(tmp_path, monkeypatch):
    models = [tiny_model(seed=0), tiny_model(seed=1)]
    calls = []  # (model, number of training steps started)
    steps = Counter()

    class Counting(DPOTrainer):
        def training_step(self, *args, **kwargs):
            steps["done"] += 1
            return super().training_step(*args, **kwargs)

    own = LlamaModel.forward

    def forward(self, *args, **kwargs):
        calls.append((id(self), steps["done"]))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with fastdpo.patched():
        train(tmp_path, *models, trainer_class=Counting, max_steps=3)
    calls_by_step = Counter(calls)
    for model in models:
        first, *later = (calls_by_step[id(model.model), step] for step in (1, 2, 3))
        assert first > 1, "one probe and one batch"
        assert later == [1, 1]


@pytest.fixture
def wrapped(tmp_path):
    """A model that a patched trainer has used, and a padded batch for it."""
    model = tiny_model()
    with fastdpo.patched():
        train(tmp_path, model, tiny_model(seed=1), max_steps=1)
        ids = torch.randint(3, 90, (4, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        labels = ids.masked_fill(torch.arange(9) < 4, -100)
        yield model.eval(), dict(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)


def test_a_mask_with_holes_falls_back_to_stock(wrapped, caplog):
    model, batch = wrapped
    batch["attention_mask"][1, 2] = 0
    out = model(**batch)
    assert "an attention mask has holes" in caplog.text
    stock = vars(model)["_fastdpo_forward"].prior_forward(**batch)
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
    assert "copy of a patched model" in caplog.text


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
