"""What a person reads, line by line: wrong calls, a training, and a model that is not supported.

The reports of `check` and `doctor` are compared with those that docs/check.md shows, in the tests of these commands.
tests/test_run.py compares the lines of `fastdpo run`.
"""

import logging
from importlib.metadata import version

import pytest

import fastdpo
from tests.support.models.families import tiny_family
from tests.support.trl.dpo import train

ON = f"INFO fastdpo: trl.DPOTrainer ({version('trl')}): on"
NOT_FUSED = "not fused, BloomForCausalLM does not let its attention implementation be set [fixed-attention]"
SESSIONS = {
    "llama": [
        ON,
        "INFO fastdpo: trl.DPOTrainer calls: policy fused 1, reference fused 1; 100% of calls fused, "
        "44% of 352 padded tokens computed (70% without sharing)",
        "INFO fastdpo: trl.DPOTrainer calls: policy fused 2, reference fused 2; 100% of calls fused, "
        "46% of 720 padded tokens computed (69% without sharing)",
    ],
    "bloom": [
        ON,
        f"WARNING fastdpo: trl.DPOTrainer (policy): {NOT_FUSED}",
        f"WARNING fastdpo: trl.DPOTrainer (reference): {NOT_FUSED}",
        "INFO fastdpo: trl.DPOTrainer calls: policy stock 1, reference stock 1; 0% of calls fused, "
        "100% of 352 padded tokens computed",
        "INFO fastdpo: trl.DPOTrainer calls: policy stock 2, reference stock 2; 0% of calls fused, "
        "100% of 720 padded tokens computed",
    ],
}


@pytest.mark.parametrize("family", SESSIONS)
def test_a_training_logs_these_lines(family, tmp_path, caplog):
    """Of two steps, at levels INFO and above. The second line of calls is that of the end. Other trainings of the
    process are not counted.
    """
    with caplog.at_level(logging.INFO, "fastdpo"), fastdpo.patched("trl.DPOTrainer"):
        train(tmp_path, tiny_family(family), tiny_family(family, 1), max_steps=2)
    lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records if record.name == "fastdpo"]
    assert lines == SESSIONS[family]
