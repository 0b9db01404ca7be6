"""Every loss of TRL's DPOTrainer and every option that changes it, stock against the fused path.

Both runs use TRL's code for the loss. The losses differ in their inputs: sums over an answer or a
part of it, lengths, per-token values or token weights, and the order of subtraction.
"""

import inspect
import re

import pytest
from trl import DPOTrainer

from tests.support.trl.dpo import assert_fused, assert_same

LOSSES = {
    "sigmoid": dict(),  # one difference of sums
    "hinge": dict(),  # a kink: flat for some pairs
    "ipo": dict(),  # divides by the lengths of completion masks
    "exo_pair": dict(label_smoothing=1e-3),  # TRL requires label smoothing
    "nca_pair": dict(),  # each answer on its own
    "robust": dict(label_smoothing=0.1),  # divides by 1 - 2 * smoothing
    "bco_pair": dict(),  # each answer on its own
    "sppo_hard": dict(),  # squares of some 50 nats
    "aot": dict(label_smoothing=0.1),  # sorts the pairs of a batch, and smooths
    "aot_unpaired": dict(),  # sorts chosen and rejected separately
    "apo_zero": dict(),  # saturates
    "apo_down": dict(),  # saturates in the other directions
    "discopop": dict(),  # exponentials at the default temperature
    "sft": dict(),  # per-token values of chosen answers alone
    "sigmoid_norm": dict(),  # divides by lengths
}

OF_TRL = re.findall(r'loss_type == "(\w+)"', inspect.getsource(DPOTrainer._compute_loss))

MODIFIERS = {
    "two_losses": dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),  # sums and per-token values
    "three_losses": dict(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),  # TRL's MPO
    "losses_without_weights": dict(loss_type=["hinge", "ipo"]),
    "forward_kl": dict(f_divergence_type="forward_kl"),
    "js_divergence": dict(f_divergence_type="js_divergence"),
    "alpha_divergence": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7),
    "alpha_divergence_limit": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0),
    "wpo": dict(use_weighting=True),  # reads log_sum_sq_probs
    "wpo_of_losses": dict(use_weighting=True, loss_type=["ipo", "sigmoid"], loss_weights=[0.5, 1.0]),
    "ld": dict(ld_alpha=0.5),  # splits each answer where the shorter one of its pair ends
    "ld_masks": dict(ld_alpha=0.0),  # ignores tokens beyond the shared length
    "wpo_ld": dict(use_weighting=True, ld_alpha=0.5),
    "discopop_tau": dict(loss_type=["discopop"], discopop_tau=0.5),
    "beta": dict(beta=0.5),
}


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss in OF_TRL])
def test_loss(both, loss):
    stock, patched = both(loss_type=[loss], **LOSSES[loss], max_steps=2)
    assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=2)


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_modified_loss(both, modifier):
    stock, patched = both(**MODIFIERS[modifier], max_steps=2)
    assert_same(stock, patched)
    assert_fused(patched, policy=2, reference=2)


def test_every_loss_of_trl_is_listed():
    assert OF_TRL
    assert set(OF_TRL) <= LOSSES.keys()
