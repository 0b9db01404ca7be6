"""Models that bitsandbytes or torchao has quantized: a probe changes nothing in them, and sees what float32 shows.

The packages are not in the environment, since transformers and PEFT look for them wherever they are.
"""

import json

import pytest

from tests.support.workers.packages import run_with


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `tests.support.workers.quantized` has saved, in a process that has the packages."""
    file = tmp_path_factory.mktemp("quantized") / "results.json"
    run_with("QUANTIZERS", "tests.support.workers.quantized", file)
    return json.loads(file.read_text())


@pytest.mark.parametrize("model", ["bitsandbytes, 4 bits", "bitsandbytes, 8 bits", "torchao, int8"])
def test_probes_change_no_bit_of_a_model(results, model):
    """bitsandbytes repacks 4-bit weights for inference, for good, if the processor multiplies bfloat16 by AVX-512, and
    a repacked layer has no backward pass. The first call of a layer chooses the dtype of its products.
    """
    probed = results["probed"][model]
    assert probed["changed"] == []
    # In evaluation mode, LLM.int8 computes the columns in which any token of the batch is large in half precision.
    assert probed["reasons"] == ([[False, "different-states"]] * 2 if "8 bits" in model else [])


@pytest.mark.parametrize("bits", [4, 8])
def test_qlora(results, bits):
    training = results["trainings"][f"{bits} bits"]
    assert training["calls"] == {"policy fused": 2, "reference fused": 2}
    assert training["difference"] <= 1, training["worst"]


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        ("4 bits, hook", "different-states"),
        ("8 bits, hook", "different-states"),
        ("float8, tensorwise", "different-"),
        ("float8, rowwise", "different-gradients"),
    ],
)
def test_policy_and_reference_get_one_verdict(results, training, reason):
    """A hook that depends on the position changes states by 4 % here, and scales of float8 depend on the batch."""
    result = results["trainings"][training]
    assert result["calls"] == {"policy stock": 2, "reference stock": 2}
    assert result["difference"] == 0
    assert any("(policy): not fused" in line and f"[{reason}" in line for line in result["messages"])
