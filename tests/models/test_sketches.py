"""Sketches of gradients: linear, and as large as the gradients."""

import pytest
import torch
from torch import nn

from fastdpo.models.examine import gradients
from fastdpo.models.examine.gradients import by_group, sketch, sketches
from tests.support.trl.dpo import tiny_model

SHAPES = {"embed.weight": (300, 4001), "mlp.weight": (200, 3, 2048), "mlp.bias": (7,)}


def random_gradients() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_norm_of_a_sketch_is_that_of_the_gradient(dtype):
    for name, x in random_gradients().items():
        found = sketch(name, x.to(dtype))
        assert (found.shape, found.dtype) == (x.shape[-1:], torch.promote_types(dtype, torch.float32))
        assert found.norm().item() == pytest.approx(x.norm().item(), rel=0.06)


def test_the_difference_of_sketches_is_the_sketch_of_the_difference(monkeypatch):
    a, b = random_gradients(), random_gradients()
    differences = {name: sketch(name, a[name] - b[name]) for name in a}
    monkeypatch.setattr(gradients, "PIECE", 10_000)  # some pieces of each
    for name, expected in differences.items():
        torch.testing.assert_close(sketch(name, a[name]) - sketch(name, b[name]), expected, rtol=0, atol=1e-3)


def test_the_gradients_of_a_model_by_groups():
    """None is accumulated, and what is trained and has no gradient counts as zeros."""
    model, given, unused = tiny_model(), torch.ones(()).requires_grad_(), torch.ones(3).requires_grad_()
    model.model.norm.weight.requires_grad_(False)
    model.model.layers[0].mlp.unused = nn.Parameter(torch.ones(3, 5))
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    logits = given * model(torch.arange(6, 14)[None], use_cache=False).logits
    upstream = torch.randn(logits.shape)
    expected = dict(
        zip(trained, torch.autograd.grad(logits, [*trained.values()], upstream, True, allow_unused=True), strict=True)
    )
    sketched, (of_given, of_unused) = sketches(logits, upstream, trained, given, unused)
    assert of_given == (upstream * logits).sum()
    assert of_unused is None
    assert all(x.grad is None for x in trained.values())
    groups = by_group(sketched, model)
    assert [*groups] == ["embeddings", "attention", "MLP", "norms", "head"]
    of_mlp = {name: x for name, x in expected.items() if "mlp" in name}
    zeros = {name: torch.zeros(5) for name, x in of_mlp.items() if x is None}
    assert len(zeros) == 1
    found = [{**sketched, **zeros}[name] for name in of_mlp]
    torch.testing.assert_close(groups["MLP"], torch.cat(found))
    for name in sketched:
        torch.testing.assert_close(sketched[name], sketch(name, expected[name]))
    assert by_group({}, model) == {}


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((5,), 5), ((0, 3), 3), ((3, 0), 0)])
def test_small_gradients(shape, size):
    x = torch.ones(shape)
    found = sketch("mlp.bias", x)
    assert found.shape == (size,)
    assert len(shape) > 1 or torch.equal(found, x.flatten()), "a vector is its own sketch"
