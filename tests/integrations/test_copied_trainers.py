"""Copies of patched trainers, and trainers that are pickled whole, train as those of stock trainers do."""

import copy
import pickle
import subprocess
import sys
import textwrap

import dill
import pytest
import torch
from accelerate.state import GradientState

import fastdpo
from tests.contract.harness import each, harnesses
from tests.integrations.test_training_again import losses

DESCRIBED = {harness.name: harness for harness in harnesses()}
REWARD, ONCE = "trl.RewardTrainer", dict(gradient_checkpointing=False)


def trained(trainer) -> list[float]:
    trainer.state.log_history.clear()
    torch.manual_seed(0)
    trainer.train()
    return losses(trainer)


@each(lambda harness: harness.build and harness.name.startswith("trl."))
def test_a_trainer_sent_by_dill(harness, tmp_path, caplog):
    """It trains fused where its class is patched, and as a stock one elsewhere."""

    def sent(side) -> bytes:
        torch.manual_seed(0)
        trainer = harness.build(tmp_path / side, *harness.models(), **harness.one_step)
        return dill.dumps(trainer)

    expected = trained(dill.loads(sent("stock")))
    with fastdpo.patched(harness.name):
        text = sent("patched")
        fastdpo.calls.clear()
        assert trained(dill.loads(text)) == pytest.approx(expected, rel=2e-3, abs=2e-4)
        assert {(name, path) for name, _, path in fastdpo.calls} == {(harness.name, "fused")}
    assert trained(dill.loads(text)) == pytest.approx(expected, rel=2e-3, abs=2e-4)
    assert "not fused" not in caplog.text


@pytest.mark.parametrize("options", [{}, {"max_tokens": 64}], ids=["plain", "budget"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_a_reward_trainer_is_fused(way, options, tmp_path, caplog):
    harness = DESCRIBED[REWARD]

    def made(side):
        torch.manual_seed(0)
        GradientState._reset_state()  # which refers to the loaders of earlier trainers
        return harness.build(tmp_path / side, *harness.models(), **harness.one_step, **ONCE)

    expected = trained(way(made("stock")))
    with fastdpo.patched(REWARD, **options):
        trainer = made("patched")
        copied = way(trainer)
        for each_one in (copied, trainer):
            fastdpo.calls.clear()
            assert trained(each_one) == pytest.approx(expected, rel=2e-3, abs=2e-4)
            assert {path for _, _, path in fastdpo.calls} == {"fused"}
    assert "not fused" not in caplog.text


def test_a_pickled_trainer_is_loaded_where_there_is_no_fastdpo(tmp_path):
    harness = DESCRIBED[REWARD]
    GradientState._reset_state()
    with fastdpo.patched(REWARD):
        trainer = harness.build(tmp_path, *harness.models(), **harness.one_step, **ONCE)
        (tmp_path / "trainer").write_bytes(pickle.dumps(trainer))
        expected = trained(trainer)
    program = f"""
        import pickle, sys, torch
        from accelerate import Accelerator
        sys.modules["fastdpo"] = None
        Accelerator(cpu=True)
        trainer = pickle.load(open({str(tmp_path / "trainer")!r}, "rb"))
        torch.manual_seed(0)
        trainer.train()
        print("losses", [log["loss"] for log in trainer.state.log_history if "loss" in log])
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    found = [float(x) for x in printed.rpartition("losses [")[2].rpartition("]")[0].split(",")]
    assert found == pytest.approx(expected, rel=2e-3, abs=2e-4)
