"""The command that finds out what a first step compiles."""

import re
from pathlib import Path

import pytest

from tests.support.programs.warm import run_program

pytest.importorskip("triton")

KERNELS = Path(__file__).parents[2] / "kernels"
PROGRAM = """
import torch
from triton import knobs
from triton.runtime import driver
from benchmarks import compile_times
from fastdpo.kernels.linear_logps import target_logits
from fastdpo.kernels.token_logps import token_logps_bwd, token_logps_fwd

compile_times.main(["--quick"])
before = len(driver.active.found)
knobs.runtime.jit_cache_hook = driver.active.record
hidden, weight, logits = (torch.empty(*x, dtype=torch.bfloat16) for x in ((2, 4096), (128_256, 4096), (2, 128_256)))
targets, transform = torch.zeros(2, dtype=torch.int64), (None, 1.0, 1.0)
t = target_logits(hidden, weight, None, targets, *transform)
_, *sums = token_logps_fwd(logits, targets, *transform, "", t)
token_logps_fwd(logits, targets, *transform, "entropy,mean_logits,is_top1", t, logits)
token_logps_bwd(logits, None, None, logits, targets, sums, *transform)
print(len(driver.active.found) - before, "at the sizes of Llama 3 8B")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    done = run_program(path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_is_listed(printed):
    kernels = re.findall(r"def (_\w+_kernel)\(", "".join(path.read_text() for path in KERNELS.glob("*.py")))
    assert len(kernels) == 9
    assert set(re.findall(r"`(_\w+_kernel)`", printed)) == set(kernels)


def test_batches_of_other_lengths_compile_nothing(printed):
    assert "20 batches of other lengths, with either attention: 0 more kernels" in printed


def test_steps_run_kernels_as_they_were_tried(printed):
    """Only the reference's forward has fewer results, and the trial of a library gathers fewer heads."""
    sums = re.findall(r"\| \*\*.*?\*\* +\| +(\d+) \| +(\d+)", printed)
    assert sums == [("9", "3"), ("6", "0"), ("2", "0"), ("0", "1")]


def test_a_larger_head_compiles_nothing_else(printed):
    assert "0 at the sizes of Llama 3 8B" in printed
