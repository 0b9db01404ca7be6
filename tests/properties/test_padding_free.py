"""Loss and gradients of a packed batch equal those of its rows run one by one in float64."""

import torch
import torch.nn.functional as F

from fastdpo import packing
from tests.support.comparison import assert_same_gradients


def log_prob(model: torch.nn.Module, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Summed log-probability of the answer of one unpadded row, which begins at `start`."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[start:, None]).sum()


def test_a_step_equals_that_of_single_rows(line, tmp_path, monkeypatch):
    batches, stock = [], packing.pack

    def pack(ids, mask, labels, **options):
        batches.append((ids, mask))
        return stock(ids, mask, labels, **options)

    monkeypatch.setattr(packing, "pack", pack)  # every trainer line packs its batches here
    run = line.train(tmp_path)
    ids, mask = next(batch for batch in batches if len(batch[0]) % 2 == 0)

    policy, reference = (model.double() for model in line.models(tmp_path))
    starts = line.rows()
    margins = []
    for row, real in zip(ids, mask != 0, strict=True):
        start = starts[tuple(row[real].tolist())]
        margins.append(log_prob(policy, row[real], start) - log_prob(reference, row[real], start).detach())
    margins = torch.stack(margins)
    chosen, rejected = margins.chunk(2)
    loss = -F.logsigmoid(line.BETA * (chosen - rejected)).mean()
    loss.backward()
    assert abs(run.logs[0]["loss"] - loss.item()) <= 1e-4  # some trainers log four decimals
    exact = {name: policy.get_parameter(name.removeprefix(line.PREFIX)).grad for name in run.gradients[0]}
    assert_same_gradients([exact], run.gradients[:1])
