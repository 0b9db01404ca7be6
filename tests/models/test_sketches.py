"""Sketches of gradients: linear, and as large as the gradients."""

import pytest
import torch

from fastdpo.models.examine import gradients
from fastdpo.models.examine.gradients import SIZE, sketch, sketches

GROUPS = {"embed.weight": "embeddings", "mlp.weight": "MLP", "mlp.bias": "MLP"}


def random_gradients() -> dict[str, torch.Tensor]:
    shapes = {"embed.weight": (300, 2 * SIZE + 5), "mlp.weight": (200, 3, SIZE // 2), "mlp.bias": (7,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_norm_of_a_sketch_is_that_of_the_gradient(dtype):
    found = random_gradients()
    of_groups = sketches(((name, x.to(dtype)) for name, x in found.items()), GROUPS)
    assert {group: (x.shape, x.dtype) for group, x in of_groups.items()} == dict.fromkeys(
        ("embeddings", "MLP"), ((SIZE,), torch.float64)
    )
    of_mlp = torch.cat([found["mlp.weight"].flatten(), found["mlp.bias"]])
    for group, x in (("embeddings", found["embed.weight"]), ("MLP", of_mlp)):
        assert of_groups[group].norm().item() == pytest.approx(x.norm().item(), rel=0.06)


def test_the_difference_of_sketches_is_the_sketch_of_the_difference(monkeypatch):
    a, b = random_gradients(), random_gradients()
    differences = sketches(((name, a[name] - b[name]) for name in a), GROUPS)
    monkeypatch.setattr(gradients, "PIECE", 10_000)  # some pieces of each
    for group, expected in differences.items():
        found = sketches(a.items(), GROUPS)[group] - sketches(b.items(), GROUPS)[group]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_parameters_of_one_group_do_not_cancel():
    equal = torch.randn(64, 32)
    (total,) = sketches([("mlp.weight", equal), ("mlp.bias", -equal)], GROUPS).values()
    assert total.norm() > equal.norm()


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((5,), 5), ((0, 3), 3), ((3, 0), 0)])
def test_small_gradients(shape, size):
    x = torch.ones(shape)
    found = sketch("mlp.bias", x)
    assert found.shape == (size,)
    assert len(shape) > 1 or torch.equal(found, x.flatten()), "a vector is its own sketch"
