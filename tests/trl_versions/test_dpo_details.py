"""DPOTrainer of TRL 0.29 to 1.14: what does not depend on the text of its functions.

`test_dpo.py` has the trainings that run with every version.
"""

import pytest
import torch
from trl import DPOTrainer

import fastdpo
from fastdpo.integrations.scored_rows import ScoredRows
from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import build, mean_logit, tiny_model


def test_metrics_of_logits_come_from_stock(both):
    calls = {("policy", "fused"): 3, ("reference", "fused"): 3, ("eval", "stock"): 1}
    assert_trained_alike(both(evaluate=4, compute_metrics=mean_logit), calls)


class WithTerm(DPOTrainer):
    """Adds a term to TRL's loss, from a call of the model that is an ordinary one."""

    def _compute_loss(self, model, inputs, return_outputs):
        loss = super()._compute_loss(model, inputs, return_outputs)
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return loss + 0.01 * logits.logsumexp(-1).square().mean()


def test_a_subclass_that_adds_to_the_loss(both):
    assert_trained_alike(both(trainer_class=WithTerm), policy=3, reference=3)


def test_a_loss_that_reads_no_logits_is_refused(monkeypatch):
    monkeypatch.setattr(DPOTrainer, "_compute_loss", lambda self, model, inputs, return_outputs: None)
    assert str(fastdpo.patch().seams[0].reason).endswith("DPOTrainer._compute_loss must read logits")


def test_an_unknown_operation_on_fused_logits_raises():
    logits = ScoredRows(logps=torch.zeros(2, 3), mask=torch.ones(2, 3) > 0).logits
    for operation in (
        lambda: logits[0],
        lambda: torch.softmax(logits, -1),
        lambda: torch.logsumexp(3.0 * logits, dim=-1),
    ):
        with pytest.raises(NotImplementedError, match="fused logits"):
            operation()
    with pytest.raises(AttributeError, match="fused logits have no 'entropy'"):
        _ = logits.entropy
    with pytest.raises(TypeError):
        _ = logits + 1


def test_liger_kernels_leave_a_trainer_unpatched(tmp_path, caplog):
    models = tiny_model(), tiny_model(seed=1)
    with fastdpo.patched("trl.DPOTrainer"), pytest.raises(ImportError, match="liger"):  # which is not installed here
        build(tmp_path, *models, use_liger_kernel=True)
    assert caplog.text.count("trl.DPOTrainer (DPOTrainer): not fused, use_liger_kernel is set") == 1
    assert "forward" not in vars(models[0])
