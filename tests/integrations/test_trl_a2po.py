"""What only TRL's A2POTrainer has: the log-probabilities of one completion of each prompt."""

import functools

import torch
from transformers import LlamaForCausalLM

import fastdpo
from fastdpo.ops.head import logit_rows
from tests.support.trl.a2po import A2PO
from tests.support.trl.dpo import recorded_layouts
from tests.support.trl.online import writer

NAME = "trl.A2POTrainer"


def test_policy_and_reference_share_a_layout_and_rows_what_they_begin_with(tmp_path, monkeypatch):
    layouts = recorded_layouts(monkeypatch)
    with fastdpo.patched(NAME):
        A2PO.train(tmp_path, writer(), data=[{"prompt": "w1 w2 w3 w4 w5 w6 w7"}] * 4, max_steps=1)
    policy, reference = layouts
    assert policy is reference
    assert policy.unshared - len(policy.token_index) >= 3 * 7


def test_a_call_that_falls_back_returns_the_logits_of_completions(tmp_path, monkeypatch):
    """As in TRL, which passes `logits_to_keep`."""
    stock, widths = LlamaForCausalLM.forward, []

    @functools.wraps(stock)
    def forward(*args, **kwargs):
        output = stock(*args, **kwargs)
        widths.append(output.logits.shape[1])
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    ids, model = torch.randint(3, 90, (4, 9)), writer(attention_dropout=0.1)
    with fastdpo.patched(NAME):
        trainer = A2PO.build(tmp_path, model)
        model.train()
        before = fastdpo.calls.copy()
        trainer._get_sequence_logps(model, ids, torch.ones_like(ids), 3)
    assert fastdpo.calls - before == {(NAME, "policy", "stock"): 1}
    assert widths[-1] == 4


def test_no_logits_are_stored(tmp_path, monkeypatch):
    """The largest piece of memory of the sums is far smaller than the logits of completions."""
    monkeypatch.setattr(logit_rows, "MIN_TILE_ROWS", 8)
    monkeypatch.setattr(logit_rows, "TILE_BYTES", 0)
    monkeypatch.setattr("fastdpo.ops.head.linear_logps.MEMORY_BUDGET", 0)
    ids, words = torch.randint(3, 90, (8, 40)), 4000

    def largest() -> int:
        model = writer(vocab_size=words)
        trainer = A2PO.build(tmp_path, model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            trainer._get_sequence_logps(model, ids, torch.ones_like(ids), 32).sum().backward()
        events = profile.profiler.kineto_results.events()
        return max(event.nbytes() for event in events if event.name() == "[memory]")

    assert largest() >= 8 * 32 * words * 4
    with fastdpo.patched(NAME):
        assert largest() <= writer(vocab_size=words).lm_head.weight.nbytes
