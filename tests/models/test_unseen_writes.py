"""Writes that raise no version, to batches on a device: an error before an optimizer steps. The CPU stands for one."""

import pytest
import torch
from trl import DPOTrainer

import fastdpo
from fastdpo.models import batch
from fastdpo.models.batch import are_as_copied, copies_of
from tests.support.trl.dpo import tiny_model, train


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(batch, "is_host", lambda device: False)
    yield
    batch.unread.clear()


class Shortened(DPOTrainer):
    """The user changes the batches of the second step."""

    def training_step(self, model, inputs, *args, **kwargs):
        if self.state.global_step:
            self.before = [p.detach().clone() for p in model.parameters()]
            inputs["completion_mask"].data[:, ::2] = 0
        return super().training_step(model, inputs, *args, **kwargs)


class OnItsWay:
    """The event of a copy that reaches the host when it is waited for."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class OnTheirWay(list):
    def append(self, comparison: tuple) -> None:
        differs, _ = comparison
        super().append((differs, OnItsWay()))


def test_no_optimizer_steps_with_a_stale_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "unread", OnTheirWay())
    trainers: list[DPOTrainer] = []

    class Kept(Shortened):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    with (
        fastdpo.patched("trl.DPOTrainer"),
        pytest.raises(RuntimeError, match="a batch must not be written to"),
    ):
        train(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=Kept)
    (trainer,) = trainers
    assert trainer.state.global_step == 1
    assert all(map(torch.equal, trainer.model.parameters(), trainer.before))


def test_a_later_comparison_raises_without_an_optimizer():
    x, other = torch.tensor([1.0, torch.nan]), torch.zeros(1)
    copies = copies_of([x])
    assert are_as_copied([x], copies)
    x.data[0] = 2
    assert are_as_copied([x], copies)
    with pytest.raises(RuntimeError, match="a batch must not be written to"):
        are_as_copied([other], copies_of([other]))
    assert are_as_copied([other], copies_of([other]))


def test_a_tensor_of_another_shape_differs_at_once():
    x = torch.zeros(3)
    copies = copies_of([x])
    x.data = torch.zeros(2)
    assert not are_as_copied([x], copies)
