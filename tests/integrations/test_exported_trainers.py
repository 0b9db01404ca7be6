"""Every trainer that TRL exports: patched, fused as a subclass, or as in TRL. None changes silently."""

import importlib
import sys

import pytest
from trl import SFTTrainer

import fastdpo
from tests.contract.harness import harnesses
from tests.support.trl.exported import CLAIMS, LOGITS, UNTOUCHED, exported, line_of

EXPORTED = dict(exported())


def test_each_trainer_has_a_description_or_a_claim():
    described = {x.trainer_class() for x in harnesses()}
    for name, trainer_class in EXPORTED.items():
        assert (trainer_class in described) == (line_of(trainer_class) is not None) == (name not in CLAIMS)
    assert CLAIMS.keys() <= EXPORTED.keys()


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim == LOGITS])
def test_a_trainer_whose_loss_reads_logits_has_a_loss_of_its_own(name):
    """Subclasses of the SFTTrainer, of which the contract trains one: its calls are those of stock."""
    assert issubclass(EXPORTED[name], SFTTrainer)
    assert "compute_loss" in vars(EXPORTED[name])


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.startswith(UNTOUCHED)])
def test_an_untouched_trainer_keeps_all_that_it_is_made_of(name):
    """Its classes and their modules, also of those that need a server to train."""
    classes = EXPORTED[name].__mro__[:-1]

    def present():
        modules = {x.__module__ for x in classes if x.__module__.startswith("trl.")}
        return [dict(vars(x)) for x in classes], [dict(vars(sys.modules[module])) for module in modules]

    importlib.import_module(EXPORTED[name].__module__)
    before = present()
    with fastdpo.patched("trl"):
        assert present() == before
