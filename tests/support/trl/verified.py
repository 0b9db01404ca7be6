"""Trainings with `patch(verify=True)`, compared with the same without it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastdpo
from tests.support import faults
from tests.support.faults import scaled_gradients


def assert_verified(
    train: Callable[[Path], Any],
    directory: Path,
    *names: str,
    caplog: pytest.LogCaptureFixture,
    calls: int = 2,
    **options: Any,
) -> None:
    """Asserts that a training is verified and the same as without, and that a wrong op ends it.

    Args:
        train: runs a training in a directory, with the same result each time. Returns logs,
            gradients and counters.
        directory: for its files.
        names: what is patched.
        caplog: pytest's.
        calls: how many are verified, one of them with gradients.
        options: of `patch`.
    """
    caplog.set_level(logging.INFO, "fastdpo")
    runs = []
    for verify in (False, True):
        with fastdpo.patched(*names, verify=verify, **options):
            runs.append(train(directory / f"verify {verify}"))
    plain, verified = runs
    assert plain.logs == verified.logs
    assert plain.calls == verified.calls
    assert len(plain.gradients) == len(verified.gradients) > 0
    for a, b in zip(plain.gradients, verified.gradients, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    messages = [x for x in caplog.messages if ": verified; differs in log-probabilities by" in x]
    assert len(messages) == calls, messages
    assert sum("gradient of" in x for x in messages) == 1
    raises = pytest.raises(fastdpo.VerificationError, match=r"in gradient of .* by 1\.0e-03")
    with pytest.MonkeyPatch.context() as planting, fastdpo.patched(*names, verify=True, **options):
        scaled_gradients(planting)
        with raises:
            train(directory / "wrong")


def assert_scores_verified(
    train: Callable[[str], object],
    trainer: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scores: str = "rewards",
) -> None:
    """Asserts that a training of a reward model is verified, once with gradients and once without, and that a
    wrong score ends it.

    Args:
        train: trains and evaluates, in a directory of this name.
        trainer: what is patched.
        monkeypatch, caplog: pytest's.
        scores: what is compared, in words.
    """
    caplog.set_level("INFO", logger="fastdpo")
    with fastdpo.patched(trainer, verify=True):
        train("right")
        verified = [x for x in caplog.messages if f"{trainer} (policy): verified; differs in {scores} by" in x]
        assert ["gradient of" in x for x in verified] == [True, False]
        faults.unnoticed_by_probes(monkeypatch)
        faults.targets_off_by_one(monkeypatch)
        with pytest.raises(fastdpo.VerificationError, match=f"in {scores} by"):
            train("wrong")
