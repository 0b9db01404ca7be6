"""What only TRL's SFTTrainer has: its rows, its metrics, and its subclasses."""

import functools

import pytest

from tests.contract.trainers.trl.sft import FULL
from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import (
    tokenizer,
)
from tests.support.trl.sft import rows, train_both_sft

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
