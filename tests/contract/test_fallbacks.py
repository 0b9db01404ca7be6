"""What is not fused in a trainer: it trains as stock does, for one logged reason, or raises under `FASTDPO_STRICT`."""

import pytest

import fastdpo
from tests.contract.harness import cases, each


@cases("fallbacks")
def test_a_fallback_has_one_reason_for_each_model(case, tmp_path, caplog):
    """If nothing is fused, the training is that of stock to the last bit."""
    harness, (options, calls, reason) = case.harness, case.value
    runs = harness.both(tmp_path, **options)
    assert runs[-1].calls == calls
    models = ("policy",) if options.get("reference") is False else ("policy", "reference")
    for role in {role for role, path in calls if path == "stock" and role in models}:
        named = [x for x in caplog.messages if f"{harness.name} ({role}): not fused, " in x]
        assert len(named) == 1
        assert reason in named[0]
    fused = any(path == "fused" for _, path in calls)
    (harness.assert_same if fused else harness.assert_same_bits)(*runs)


@cases("bypassing")
def test_a_trainer_that_gains_nothing_says_so_and_trains_as_stock_does(case, tmp_path, caplog):
    harness, (options, reason) = case.harness, case.value
    models = []
    seen = dict(prepare=lambda model: models.append(model) or model) if harness.build else {}
    runs = harness.both(tmp_path, **seen, **options)
    assert not runs[-1].calls
    (message,) = (x for x in caplog.messages if "not fused" in x)
    assert message.startswith(f"fastdpo: {harness.name} (")
    assert f"): not fused, {reason}" in message
    assert bool(models) == bool(harness.build)
    assert not any("fastdpo" in name for model in models for module in model.modules() for name in vars(module))
    harness.assert_same_bits(*runs)


@each(lambda harness: harness.strict)
def test_strict_raises_instead_of_falling_back(harness, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    options, reason = harness.strict
    with fastdpo.patched(harness.name), pytest.raises(fastdpo.NotFused, match=reason):
        harness.train(tmp_path, *harness.models(), **options)
