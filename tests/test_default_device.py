"""Tensors on the host name it, because users set other default devices (`torch.set_default_device`).

"meta", whose tensors have no values, stands in for a GPU.
"""

import ast
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastdpo.commands import doctor

PACKAGE = Path(__file__).parents[1] / "fastdpo"
FACTORIES = {"arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"}
IN_A_TRIAL = "in a thread of its own, where no default device is set"
ON_THE_CPU = {"ops/choice/poisoned_memory.py": IN_A_TRIAL, "ops/head/trials.py": IN_A_TRIAL}
"""Files whose functions are called where the default device is the CPU, and why."""


def factories_without_a_device(source):
    """The lines that make a tensor on the default device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                if "device" not in {keyword.arg for keyword in node.keywords}:
                    yield node.lineno


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_new_tensor_names_its_device(path):
    lines = list(factories_without_a_device(path.read_text()))
    assert bool(lines) == (str(path.relative_to(PACKAGE)) in ON_THE_CPU), lines


def test_a_model_is_probed_and_packed_under_any_default_device():
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.device("meta"):
        findings = list(doctor.model_findings(model))
    assert {finding.status for finding in findings} == {doctor.OK}, findings
