"""DPOTrainer of TRL 0.29 to 1.14, stock against patched.

`make test-trl-versions` runs these trainings with every minor version of TRL, and the other tests
here, and all losses and options of the contract, with three of them.
"""

from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.contract.trainers.trl import dpo as description
from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import tiny_model, train
from tests.support.trl.verified import assert_verified

installed = Version(version("trl"))
ROUTER = "router loss in the configuration"
OPTIONS = ("two_losses", "wpo", "ld", "adapter", "keep_start", "keep_end", "evaluation", "accumulation", ROUTER)
"""Those of the contract that are trained with every version."""


def test_verifying(tmp_path, caplog):
    assert_verified(
        lambda directory: train(directory, tiny_model(), tiny_model(seed=1)), tmp_path, "trl.DPOTrainer", caplog=caplog
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option):
    changes, calls = description.OPTIONS[option]
    stock, patched = both(**changes)
    assert_trained_alike((stock, patched), **calls)
    assert ("aux_loss" in stock.logs[0]) == (option == ROUTER and installed >= Version("1.8"))


def test_precomputing(both, caplog):
    """With TRL 0.29, which truncates later, TRL's own pass runs, in batches of a training's size."""
    own_pass = installed < Version("1.0")
    runs = both(precompute_ref_log_probs=True, evaluate=4)
    assert_trained_alike(runs, policy=3, eval=1, reference=4 + 1 if own_pass else 1 + 1)
    assert ("truncates batches after their collation" in caplog.text) == own_pass
