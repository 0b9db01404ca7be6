"""Only the trainers that are created while their class is patched are fused, and only as long as it is patched."""

import copyreg
import gc
import re
import sys

import pytest

import fastdpo
from fastdpo.integrations.patching import examine
from tests.contract.harness import each
from tests.support.comparison import assert_fused


def assert_stock(train) -> None:
    before = dict(fastdpo.calls)
    train()
    assert fastdpo.calls == before


def seams_of(harness) -> list:
    return [getattr(sys.modules[module], name) for module, _, name in (x.rpartition(".") for x in harness.seams)]


@each(lambda harness: harness.build)
def test_trainers_before_and_after_stay_stock(harness, tmp_path):
    gc.collect()  # trainers of other tests
    trainer_class, models = harness.trainer_class(), harness.models()
    attention = [model.config._attn_implementation for model in models]
    earlier = harness.build(tmp_path / "earlier", *harness.models(), **harness.one_step)
    copyreg._slotnames(trainer_class)  # which Python notes in a class when it first copies an instance
    stock, seams = dict(vars(trainer_class)), seams_of(harness)
    report = fastdpo.patch(harness.name)
    assert report.seams[0].stock_trainers == (trainer_class.__name__,)
    assert dict(vars(trainer_class)) != stock
    assert all(a is not b for a, b in zip(seams, seams_of(harness), strict=True))
    assert_stock(earlier.train)
    trainer, before = harness.build(tmp_path / "during", *models, **harness.one_step), fastdpo.calls.copy()
    accelerator = getattr(trainer, "accelerator", None)
    assert accelerator is None or "unwrap_model" in vars(accelerator)
    trainer.train()
    counted = fastdpo.calls - before
    assert {(name, path) for name, _, path in counted} == {(harness.name, "fused")}
    fastdpo.unpatch()
    assert dict(vars(trainer_class)) == stock
    assert seams_of(harness) == seams
    assert [model.config._attn_implementation for model in models] == attention
    for model in (*models, *harness.line().models(trainer).values()):
        assert not any("fastdpo" in name for module in model.modules() for name in vars(module))
        assert getattr(vars(model).get("forward"), "__module__", "").partition(".")[0] != "fastdpo"
    assert not any("fastdpo" in name for name in vars(trainer))
    assert accelerator is None or "unwrap_model" not in vars(accelerator)
    assert_stock(trainer.train)
    assert_stock(lambda: harness.train(tmp_path / "after", *models, **harness.one_step))
    with fastdpo.patched(harness.name):
        assert_stock(trainer.train)


@each(lambda harness: not harness.build)
def test_a_class_is_restored(harness, tmp_path):
    trainer_class = harness.trainer_class()
    stock = dict(vars(trainer_class))
    with fastdpo.patched(harness.name):
        assert dict(vars(trainer_class)) != stock
        run = harness.train(tmp_path / "during")
        assert_fused(run, **harness.fused(3))
    assert dict(vars(trainer_class)) == stock
    if hasattr(run, "model"):
        assert not any("fastdpo" in name for module in run.model.modules() for name in vars(module))
    assert_stock(lambda: harness.train(tmp_path / "after"))


@each()
def test_another_signature_is_refused_with_the_difference(harness, monkeypatch):
    """Of each function of the class that the line replaces or calls."""
    trainer_class, functions = harness.trainer_class(), harness.line().expected_parameters()
    for name in functions.keys() & {x for kind in trainer_class.__mro__ for x in vars(kind)}:
        with monkeypatch.context() as changing:
            changing.setattr(trainer_class, name, lambda something_new: something_new.logits)
            changed = dict(vars(trainer_class))
            (seam,) = examine(harness.name).seams
            difference = rf"{trainer_class.__name__}\.{name} must (have|begin with) the parameters"
            assert re.search(difference, str(seam.reason))
            assert "something_new" in str(seam.reason)
            with pytest.raises(fastdpo.PatchError):
                fastdpo.patch(harness.name)
            assert dict(vars(trainer_class)) == changed
