"""Every trainer that TRL exports: patched, fused as a subclass, or as in TRL. None changes silently."""

import importlib
import sys

import pytest

import fastdpo
from tests.contract.harness import harnesses
from tests.support.comparison import assert_fused, double
from tests.support.trl.dpo import assert_same, assert_same_bits, record
from tests.support.trl.exported import CLAIMS, UNTOUCHED, entry_of, exported

EXPORTED = dict(exported())


def test_each_trainer_has_a_description_or_a_claim():
    described = {x.trainer_class() for x in harnesses()}
    for name, trainer_class in EXPORTED.items():
        assert (trainer_class in described) == (entry_of(trainer_class) is not None) == (name not in CLAIMS)
    assert CLAIMS.keys() <= EXPORTED.keys()


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.build])
def test_a_training(name, tmp_path):
    claim = CLAIMS[name]

    def run(side, cast=lambda model: model):
        def make(callbacks):
            return claim.build(tmp_path / side, callbacks, cast)

        return record(make)

    stock = run("stock")
    stock.in_float64 = lambda: run("float64", double)
    with fastdpo.patched("trl"):
        patched = run("patched")
    assert any(x.abs().max() > 0 for x in stock.gradients[-1].values())
    assert_fused(patched, **claim.calls)
    (assert_same if claim.calls else assert_same_bits)(stock, patched)


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.what.startswith(UNTOUCHED)])
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
