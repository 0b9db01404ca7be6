"""`patch(max_tokens=...)` in the versions of TRL that compute full logits."""

import pytest
import trl
from packaging.version import Version

import fastdpo
from tests.support.trl.dpo import assert_same
from tests.support.workers.budgets import DPO, MAX_TOKENS, REWARD, trained

CASES = {
    "as it is": {},
    "one micro-batch": dict(max_tokens=10_000),
    "pairs above the budget": dict(max_tokens=12),
    "evaluation": dict(evaluate=6, eval_strategy="steps", eval_steps=1),
    "checkpointing": dict(gradient_checkpointing=True),
}


@pytest.mark.skipif(Version(trl.__version__) < Version("1.8"), reason="DPOTrainer takes max_tokens since TRL 1.8")
@pytest.mark.parametrize("trainer", [DPO, REWARD])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_cut_anew(tmp_path, trainer, case):
    options = dict(CASES[case])
    max_tokens = options.pop("max_tokens", MAX_TOKENS[trainer])
    stock = trained(tmp_path / "stock", trainer, **options)
    with fastdpo.patched(trainer, max_tokens=max_tokens):
        patched = trained(tmp_path / "patched", trainer, **options)
    assert_same(stock, patched)
    assert {path for _, path in patched.calls} == {"fused"}
