"""What the first step of a training compiles on a GPU, and that later ones compile nothing."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.programs.warm import run_program

pytest.importorskip("triton")

KERNELS = Path(__file__).parents[2] / "kernels"
PROGRAM = """
import json

import torch
from tests.support.kernels import first_step
from fastdpo.kernels.linear_logps import target_logits
from fastdpo.kernels.token_logps import token_logps_bwd, token_logps_fwd

found = first_step.record(90).found
of_steps = [(name, *needed) for (name, _), needed in found.items()]
hidden, weight, logits = (torch.empty(*x, dtype=torch.bfloat16) for x in ((2, 4096), (128_256, 4096), (2, 128_256)))
targets, transform = torch.zeros(2, dtype=torch.int64), (None, 1.0, 1.0)
t = target_logits(hidden, weight, None, targets, *transform)
_, *sums = token_logps_fwd(logits, targets, *transform, "", t)
token_logps_fwd(logits, targets, *transform, "entropy,mean_logits,is_top1", t, logits)
token_logps_bwd(logits, None, None, logits, targets, sums, *transform)
print(json.dumps({"of steps": of_steps, "at the sizes of Llama 3 8B": len(found) - len(of_steps)}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    done = run_program(path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def counts(compiled):
    """Number of compilations by what needs them first, and by stage."""
    return Counter((needed_by, stage) for _, needed_by, stage in compiled["of steps"])


def test_every_kernel_is_found(compiled):
    kernels = re.findall(r"def (_\w+_kernel)\(", "".join(path.read_text() for path in KERNELS.glob("*.py")))
    assert len(kernels) == 9
    assert {name for name, *_ in compiled["of steps"]} == set(kernels)


def test_batches_of_other_lengths_compile_nothing(counts):
    """20 batches, with either attention."""
    assert all(needed_by != "batches of other lengths" for needed_by, _ in counts)


def test_steps_run_kernels_as_they_were_tried(counts):
    """Only the reference's forward has fewer results, and the trial of a library gathers fewer heads."""
    assert counts == {
        ("first batch, attention by a library", "self-check"): 9,
        ("first batch, attention by a library", "step"): 3,
        ("attention by fastdpo's kernels", "self-check"): 6,
        ("tuning of the head", "self-check"): 2,
        ("evaluation, or tokens beyond `memory_budget`", "step"): 1,
    }


def test_a_larger_head_compiles_nothing_else(compiled):
    assert compiled["at the sizes of Llama 3 8B"] == 0
