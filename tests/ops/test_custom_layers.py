"""The GPT of examples/custom_layers.py: packed rows compared with each row alone."""

import runpy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fastdpo import ops
from tests.support import ROOT
from tests.support.comparison import assert_close, assert_same_gradients


@pytest.fixture
def example(device):
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "custom_layers.py")))


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two pairs of different lengths, one row padded on the left."""
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (4, 9))
    ids[2:, :5] = ids[:2, :5]
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    rolled = [torch.cat([x[:3], x[3:].roll(2, 1)]) for x in (ids, mask, labels)]
    rolled[1][3, :2], rolled[2][3, :6], rolled[2][3, 8] = 0, -100, rolled[0][3, 8]
    return tuple(rolled)


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_rows_pass_through_checkpointing(example, use_reentrant):
    torch.manual_seed(0)
    model, (ids, mask, labels) = example.GPT(use_reentrant=use_reentrant), batch()
    layout = ops.pack(ids, mask, labels, groups="content")
    hidden = model(layout.pack(ids), layout.position_ids[None], layout.rows)[0]
    logps = layout.unpack(ops.linear_logps(hidden[layout.label_index], model.head.weight, layout.labels).logps)
    found = gradients(model, logps.sum())
    rows = []
    for row, real, target in zip(ids, mask.bool(), labels, strict=True):
        states = model(row[real][None], torch.arange(int(real.sum()))[None], None)[0, :-1]
        target = target[real][1:]
        rows.append(-F.cross_entropy(model.head(states), target, reduction="sum"))
    assert_close(logps.sum(1), torch.stack(rows), absolute=1e-5)
    assert_same_gradients([gradients(model, torch.stack(rows).sum())], [found])
