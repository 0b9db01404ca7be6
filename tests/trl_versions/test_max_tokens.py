"""`patch(max_tokens=...)` in the versions of TRL that compute full logits."""

import pytest
import trl
from packaging.version import Version

from tests.support.workers.budgets import COMMON, DPO, REWARD, compared


@pytest.mark.skipif(Version(trl.__version__) < Version("1.8"), reason="DPOTrainer takes max_tokens since TRL 1.8")
@pytest.mark.parametrize("trainer", [DPO, REWARD])
@pytest.mark.parametrize("case", COMMON)
def test_steps_are_cut_anew(tmp_path, trainer, case):
    patched = compared(tmp_path, trainer, **COMMON[case])
    assert {path for _, path in patched.calls} == {"fused"}
