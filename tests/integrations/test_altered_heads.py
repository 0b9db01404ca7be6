"""LM heads and models whose logits a user has changed: scored as they are, and not modified."""

import pytest
import torch
import torch.nn.utils.prune
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import nn

from fastdpo import ref_logps
from fastdpo.models import head as heads
from tests.support.models.altered_heads import ALTERED, closure, forward_of_the_model
from tests.support.ref_logps import assert_close, exact, tokens
from tests.support.trl.dpo import tiny_model


@pytest.mark.parametrize("alter", ALTERED)
def test_precomputing(caplog, alter):
    rows, model = tokens(12), alter(tiny_model())
    logps = ref_logps.precompute(model, rows)
    assert ALTERED[alter] in caplog.text
    assert_close(logps, exact(model, rows))


@pytest.mark.parametrize("alter", [closure, forward_of_the_model])
def test_a_forward_replaced_by_the_user_is_kept(alter):
    model = alter(tiny_model())
    owner = model.lm_head if alter is closure else model
    user_forward = owner.forward
    ref_logps.precompute(model, tokens(4))
    assert owner.forward == user_forward


def test_a_forward_wrapped_around_the_patched_one_is_kept():
    head = nn.Linear(3, 5)
    heads.install(head)
    patched_forward = head.forward
    head.forward = user_forward = lambda hidden: patched_forward(hidden)
    assert heads.unsupported_reason(head) is not None
    heads.restore(head)
    assert head.forward is user_forward
    x = torch.randn(2, 3)
    assert torch.equal(head(x), nn.Linear.forward(head, x))


def test_sequences_split_across_ranks_fall_back(monkeypatch, caplog):
    """Context parallelism looks up the attention by its name before the first forward pass."""
    rows, model = tokens(4), tiny_model()
    config = ParallelismConfig(cp_size=2)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", config)
    logps = ref_logps.precompute(model, rows)
    assert "sequences are split across ranks (context or sequence parallelism)" in caplog.text
    assert model.config._attn_implementation == "sdpa"
    assert_close(logps, exact(model, rows))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda head: setattr(head, "weight", nn.Parameter(head.weight.to("meta"))), "offloaded"),
        (lambda head: nn.utils.parametrizations.weight_norm(head), "ParametrizedLinear"),
        (lambda head: nn.utils.prune.random_unstructured(head, "weight", 0.5), "hooks: RandomUnstructured"),
    ],
)
def test_heads_whose_weight_is_computed_or_offloaded_are_unsupported(break_it, reason):
    head = nn.Linear(3, 5)
    assert heads.unsupported_reason(head) is None
    break_it(head)
    assert reason in (heads.unsupported_reason(head) or "")
