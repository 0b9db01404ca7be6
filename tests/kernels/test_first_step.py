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
import sys

import torch
from tests.support.kernels import first_step
from fastdpo.kernels.linear_logps import target_logits
from fastdpo.kernels.token_logps import token_logps_bwd, token_logps_fwd

found = first_step.record(90, lora=sys.argv[1:] == ["LoRA"]).found
of_steps = [(name, *needed) for (name, _), needed in found.items()]
hidden, weight, logits = (torch.empty(*x, dtype=torch.bfloat16) for x in ((2, 4096), (128_256, 4096), (2, 128_256)))
targets, transform = torch.zeros(2, dtype=torch.int64), (None, 1.0, 1.0)
t = target_logits(hidden, weight, None, targets, *transform)
for tile in (None, logits):  # of the reference model, and of the policy
    _, *sums = token_logps_fwd(logits, targets, *transform, "entropy,mean_logits,is_top1", t, tile)
token_logps_bwd(logits, None, None, logits, targets, sums[:3], *transform)
print(json.dumps({"of steps": of_steps, "at the sizes of Llama 3 8B": len(found) - len(of_steps)}))
"""


@pytest.fixture(scope="module", params=["full", "LoRA"])
def compiled(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    done = run_program(path, request.param)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def counts(compiled):
    """Number of compilations by what needs them first, and by stage."""
    return Counter((needed_by, stage) for _, needed_by, stage in compiled["of steps"])


def test_every_kernel_is_found(compiled):
    kernels = re.findall(r"def (_\w+_kernel)\(", "".join(path.read_text() for path in KERNELS.glob("*.py")))
    assert len(kernels) == 8
    assert {name for name, *_ in compiled["of steps"]} == set(kernels)


def test_batches_of_other_lengths_compile_nothing(counts):
    """20 batches, with either attention."""
    assert all(needed_by != "batches of other lengths" for needed_by, _ in counts)


def test_steps_run_kernels_as_they_were_tried(counts):
    """Policy and reference, training and evaluation run the same ones, and nothing else is compiled to be tried."""
    assert counts == {
        ("first batch, attention by a library", "self-check"): 5,
        ("attention by fastdpo's kernels", "self-check"): 4,
        ("tuning of the head", "self-check"): 1,
    }


def test_a_larger_head_compiles_nothing_else(compiled):
    assert compiled["at the sizes of Llama 3 8B"] == 0
