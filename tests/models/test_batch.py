"""The arguments of a model's call are made once of the same tensors, until one is replaced or written to."""

import weakref

import torch

from fastdpo.models import batch
from fastdpo.models.batch import KEPT_BATCHES, inputs_once
from fastdpo.reasons import Reason

UNSUPPORTED = Reason("no-batch-ids")


class Trainer:
    """Stands for the state of one."""


def made_of(ids: torch.Tensor, labels: torch.Tensor) -> dict:
    return {"input_ids": ids + 1, "attention_mask": torch.ones_like(ids), "labels": labels.clone()}


def test_made_once_for_the_same_tensors():
    made, trainer = [], Trainer()
    a, b = torch.zeros(1, 2), torch.zeros(1, 2)

    def get(*tensors, of=trainer) -> int:
        inputs = inputs_once(of, tensors, lambda: made.append(made_of(a, b)) or made[-1])
        return next(i for i, x in enumerate(made, 1) if x is inputs)

    assert [get(a, b), get(a, b)] == [1, 1]
    assert get(b, a) == 2
    assert get(a) == 3
    assert get(a, b) == 1
    assert get(a, b, of=Trainer()) == 4
    a.add_(1)
    assert [get(a, b), get(a, b)] == [5, 5]
    assert get(a.clone(), b) == 6
    a.data.add_(1)  # which raises no version
    assert [get(a, b), get(a, b)] == [7, 7]
    b.numpy()[0] = 1
    assert [get(a, b), get(a, b)] == [8, 8]
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    assert [get(unversioned), get(unversioned)] == [9, 10]
    assert [inputs_once(trainer, (b,), lambda: UNSUPPORTED) for _ in range(2)] == [UNSUPPORTED] * 2


def test_few_batches_are_kept():
    trainer, tensors = Trainer(), [torch.zeros(1, 2) for _ in range(KEPT_BATCHES + 1)]
    for i in range(len(tensors)):
        inputs_once(trainer, (tensors[i],), lambda i=i: made_of(tensors[i], tensors[i]))
    assert len(batch.recent) == KEPT_BATCHES
    first = weakref.ref(tensors.pop(0))
    assert first() is None
