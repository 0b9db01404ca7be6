"""Models with `use_kernels=True`, whose layers Hugging Face's package `kernels` replaces.

The package is not in the environment, since transformers looks for kernels on the Hub wherever it is.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import import_utils

from tests.support.comparison import assert_same_training
from tests.support.trl.dpo import Run, assert_fused
from tests.support.workers.packages import run_with

WORKER = "tests.support.workers.hub_kernels"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A directory with the results of `WORKER`, in a process that has the package.

    transformers 5.23 asks for a version that the index may not have yet, and uses nothing that 0.17.2 does not have.
    """
    directory = tmp_path_factory.mktemp("hub_kernels")
    metadata = directory / "version" / "kernels.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {import_utils.KERNELS_MIN_VERSION}\n")
    run_with("HUB_KERNELS", WORKER, directory, before=(directory / "version",))
    return directory


def result_of(directory: Path, name: str) -> dict[str, Any]:
    result = torch.load(directory / f"{name}.pt", weights_only=False)
    assert "error" not in result, result["error"]
    return result


def runs_in(result: dict[str, Any]) -> list[Run]:
    return [Run(**run) for run in result["runs"]]


CALLS = {
    "DPO": dict(policy=2, reference=2 + 1, eval=1),
    "DPO lora": dict(policy=2, reference=2 + 1, eval=1),
    "KTO": dict(policy=4, reference=2 + 1, eval=2),
}


@pytest.mark.parametrize("case", CALLS)
def test_layers_of_the_hub_are_trained_fused(case, directory):
    result = result_of(directory, case)
    stock, patched = runs_in(result)
    assert result["kernels"].keys() == {"RMSNorm", "SwiGLUMLP", "Rotary"}
    assert_fused(patched, **CALLS[case])
    assert_same_training(stock, patched)


def test_a_function_with_a_kernel_for_evaluation(directory):
    """In training, it is PyTorch code inside a module, and gets packed tokens. The kernel gets whole rows."""
    result, functions = (result_of(directory, name) for name in ("convolutions", "functions"))
    stock, patched = runs_in(result)
    assert_fused(patched, policy=2, reference=2 + 1, eval=1)
    assert_same_training(stock, patched)
    assert set(functions["training"]) == {frozenset({"causal_conv1d_fn"})}
    assert set(functions["evaluation"]) == {frozenset()}
    assert functions["training again"] == functions["training"]
    assert result["kernels"]
    assert "CausalConv1d of 1 rows" not in result["kernels"]
