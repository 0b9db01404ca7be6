"""What only TRL's SFTTrainer has: its rows, its metrics, and its subclasses."""

import functools
import warnings

import pytest
from torch.utils.data import SequentialSampler
from trl import SFTTrainer

import fastdpo
from fastdpo.integrations.bypass import bypass_reason
from fastdpo.integrations.trl.sft import SFTLine
from tests.contract.trainers.trl.sft import FULL
from tests.support.comparison import assert_trained_alike, double
from tests.support.trl import grouping
from tests.support.trl.dpo import (
    assert_same,
    recorded_layouts,
    tiny_model,
    tokenizer,
)
from tests.support.trl.sft import rows, train_both_sft, train_sft

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


def test_assistant_only_loss(both, monkeypatch):
    template = tokenizer()
    template.chat_template = TEMPLATE
    monkeypatch.setattr("tests.support.trl.dpo.tokenizer", lambda: template)
    assert_trained_alike(both(data=conversations, assistant_only_loss=True), **FULL)


def test_token_accuracy_above_zero(both):
    """Random completions are never predicted; an accuracy of 0 would hide errors."""

    def repeated(n: int, seed: int = 0) -> list[dict]:
        return [{"prompt": f"w{i} w2 ", "completion": "w7 w7 w7"} for i in range(n)]

    patched = assert_trained_alike(both(data=repeated, learning_rate=0.2), **FULL)
    assert patched.logs[2]["mean_token_accuracy"] > 0.2
    assert "entropy" in patched.logs[2]


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


def test_subclasses(both):
    class Scaled(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return 2 * super().compute_loss(model, inputs, *args, **kwargs)

    assert_trained_alike(both(trainer_class=Scaled), **FULL)


def test_labels_that_other_code_has_changed_unseen(both):
    """They come from the collator, and a write to `data` raises no version."""

    class Shortened(SFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            inputs["labels"].data[:, -3:] = -100
            return super().training_step(model, inputs, *args, **kwargs)

    assert_trained_alike(both(trainer_class=Shortened), policy=3)


@pytest.mark.parametrize("module", ["gkd", "gold"])
def test_trainers_of_trl_that_compute_their_loss_from_logits_are_left_unpatched(module):
    """They are subclasses of SFTTrainer for its data pipeline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experimental = pytest.importorskip(f"trl.experimental.{module}")
    kind = getattr(experimental, f"{module.upper()}Trainer")
    assert "compute_loss does not call" in bypass_reason(kind.__new__(kind), SFTTrainer, SFTLine.path)


def test_it_is_patched_by_name_only():
    assert "trl.SFTTrainer" not in {seam.name for seam in fastdpo.patch().seams}
    assert {seam.name: seam.on for seam in fastdpo.patch("trl").seams}["trl.SFTTrainer"]
