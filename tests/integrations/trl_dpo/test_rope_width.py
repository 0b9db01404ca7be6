"""Models whose rotary embeddings depend on the width of a batch, in TRL's DPOTrainer: options that change
widths are refused, or disabled with a reason, or leave the pass to TRL.

test_families.py trains these models without options.
"""

import pytest
import torch

import fastdpo
from fastdpo import ref_logps
from fastdpo.integrations.scored_rows import equal_when_merged
from fastdpo.models import forward, parts
from fastdpo.models.examine import support
from fastdpo.models.state import ForwardOptions
from tests.support.models.families import tiny_family
from tests.support.trl.dpo import assert_same, long_pairs, train

LIMITS = {"phi3-longrope": 16, "llama-dynamic": 15}
"""The largest width of a batch up to which the frequencies of each model are the same."""

NARROW = ((1, 2, 3), (5, 3, 2), (8, 4, 3), (2, 7, 1), (9, 1, 1), (3, 6, 5), (4, 4, 8), (7, 2, 3))
WIDE = ((1, 9, 20), (11, 1, 25), (5, 3, 12), (14, 13, 12), (12, 4, 3), (2, 40, 1), (10, 12, 11), (8, 9, 3))
BOTH = long_pairs(NARROW + WIDE)
"""Pairs of rows on both sides of the limits, next to an end token."""

STEPS = dict(data=BOTH, max_steps=-1, num_train_epochs=3, per_device_train_batch_size=2)

both_sides = pytest.mark.parametrize("name", LIMITS)


@pytest.fixture
def against_stock(both):
    """A function that trains a family stock and patched, asserts that both are the same training, and returns the
    patched one.
    """

    def train_both(name: str, **options):
        stock, patched = both(name, build=tiny_family, **STEPS | options)
        assert_same(stock, patched)
        return patched

    return train_both


@both_sides
def test_limit(name):
    """Up to this width a row has the same hidden states in each batch, and beyond it others."""
    model, limit = tiny_family(name).eval(), LIMITS[name]
    assert parts.rope_limit(model) == limit
    ids = torch.randint(3, 90, (1, 6))
    states = {}
    for width in (6, limit, limit + 1, limit + 2):
        padded = torch.nn.functional.pad(ids, (0, width - 6))
        mask = (torch.arange(width) < 6).long()[None]
        with torch.no_grad():
            states[width] = model.model(input_ids=padded, attention_mask=mask).last_hidden_state[:, :6]
    assert torch.allclose(states[6], states[limit], atol=1e-5)
    assert not torch.allclose(states[6], states[limit + 2], atol=1e-2)
    assert support.rope_reason(model, limit) is None
    assert str(limit) in str(support.rope_reason(model, limit + 1))


PADDED = dict(max_length=12, pad_to_multiple_of=24)
"""Rows of 12 tokens, in batches of 24."""


@both_sides
@pytest.mark.parametrize(("options", "width"), [({}, "[0-9]+"), (PADDED, "24")], ids=["rows", "collator"])
def test_max_tokens_is_refused(tmp_path, name, options, width):
    message = rf"^patch: max_tokens does not support batches of up to {width} tokens.*more than {LIMITS[name]} tokens"
    with fastdpo.patched("trl.DPOTrainer", max_tokens=60), pytest.raises(NotImplementedError, match=message):
        train(tmp_path, *(tiny_family(name, seed) for seed in range(2)), **STEPS | options)


@both_sides
def test_max_tokens_of_short_rows(against_stock, name):
    run = against_stock(name, max_tokens=60, max_length=12, max_steps=3, per_device_train_batch_size=8)
    assert run.calls["policy", "fused"] > 3


@both_sides
@pytest.mark.parametrize("batch_size", [2, 3])
def test_trls_own_pass_precomputes(against_stock, caplog, name, batch_size):
    run = against_stock(name, precompute_ref_log_probs=True, precompute_ref_batch_size=batch_size, max_steps=4)
    assert run.calls == {("policy", "fused"): 4, ("reference", "fused"): -(-16 // batch_size)}
    assert "TRL's own pass precomputes the reference log-probabilities, rotary embeddings depend" in caplog.text


@both_sides
def test_narrow_batches_are_precomputed(against_stock, caplog, name):
    run = against_stock(name, precompute_ref_log_probs=True, max_length=12, max_steps=4)
    assert run.calls == {("policy", "fused"): 4, ("reference", "fused"): 1}
    assert "own pass" not in caplog.text


def tokens(*lengths: int) -> dict[str, list[int]]:
    ids = [torch.randint(3, 90, (n,)).tolist() for n in lengths]
    return dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True))


@both_sides
def test_precompute_refuses_long_rows(name):
    rows, limit = [tokens(*lengths) for lengths in NARROW + WIDE], LIMITS[name]
    message = rf"^precompute: dataset must have shorter rows, .* more than {limit} tokens; got 42 in row 13\."
    with pytest.raises(NotImplementedError, match=message):
        ref_logps.precompute(tiny_family(name), rows)
    together = ref_logps.precompute(tiny_family(name), rows, max_length=limit)
    for i, row in enumerate(rows):
        alone = ref_logps.precompute(tiny_family(name), [row], max_length=limit)
        torch.testing.assert_close(torch.cat(alone), torch.stack([x[i] for x in together]), rtol=1e-4, atol=1e-4)


@both_sides
def test_batches_are_merged_only_where_none_becomes_wider_than_the_limit(name):
    """The KTO trainers ask before one call replaces two."""
    model, limit = tiny_family(name).eval(), LIMITS[name]
    forward.install(model, ForwardOptions("a trainer", "reference"), lambda scored, _: scored.logps.logps)

    def merges(a: int, b: int) -> bool:
        return equal_when_merged(model, torch.zeros(2, a, dtype=torch.long), torch.zeros(2, b, dtype=torch.long))

    assert merges(5, limit)
    assert merges(limit + 4, limit + 4)
    assert not merges(5, limit + 1)
    assert not merges(limit + 1, limit + 2)


def test_batches_of_other_models_are_merged_whatever_their_widths():
    model = tiny_family("llama").eval()
    forward.install(model, ForwardOptions("a trainer", "reference"), lambda scored, _: scored.logps.logps)
    assert equal_when_merged(model, torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 500, dtype=torch.long))
