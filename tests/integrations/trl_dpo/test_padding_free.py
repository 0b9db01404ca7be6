"""`DPOConfig(padding_free=True)`: stock TRL warns and pads; patched, no padding and no warning."""

import logging

import pytest

import fastdpo
from tests.support.models.families import tiny_family
from tests.support.trl.dpo import build, tiny_model


@pytest.fixture
def trl_log(caplog):
    """Messages of TRL's logger, which does not propagate to the root."""
    logger = logging.getLogger("trl")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_flags_and_warnings(tmp_path, trl_log):
    stock = build(tmp_path / "stock", tiny_model(), tiny_model(seed=1), padding_free=True)
    assert (stock.args.padding_free, stock.padding_free) == (True, False)
    assert "temporarily unavailable" in trl_log.text
    trl_log.clear()
    with fastdpo.patched():
        patched = build(tmp_path / "patched", tiny_model(), tiny_model(seed=1), padding_free=True)
    assert (patched.args.padding_free, patched.padding_free) == (True, True)
    assert not [record for record in trl_log.records if record.name.startswith("trl")]


def test_a_model_that_stays_padded_logs_a_warning(tmp_path, caplog):
    with fastdpo.patched():
        trainer = build(tmp_path, tiny_family("bloom"), tiny_model(seed=1), padding_free=True)
    assert (trainer.args.padding_free, trainer.padding_free) == (True, False)
    assert "padding_free=True, but batches are padded for the reason logged above" in caplog.text
