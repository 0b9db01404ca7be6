"""linear_preference_loss: the loss and the gradients of the two ops that it is composed of."""

import pytest
import torch
import torch.nn.functional as F

from fastdpo import ops
from fastdpo.ops import PreferenceObjective, linear_preference_loss

V, D = 131, 24
LENGTHS = (5, 1, 17, 3, 4, 9, 0, 2)  # of the chosen completions, then of the rejected ones
LEAVES = ("hidden", "weight", "bias")
HEAD = dict(softcap=5.0, logit_scale=1.7, temperature=0.7, memory_budget=8 * V * 4)


def pair_inputs(lengths=LENGTHS):
    """Hidden states, weight, bias and targets of pairs, some of them ignored, and a reference."""
    n = sum(lengths)
    tensors = dict(hidden=torch.randn(n, D), weight=torch.randn(V, D) / 4, bias=torch.randn(V))
    tensors |= dict(targets=torch.randint(V, (n,)), cu_seqlens=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)))
    tensors["targets"][2::7] = -100
    references = -9 * torch.rand(2, len(lengths) // 2)
    return tensors, dict(ref_chosen_logps=references[0], ref_rejected_logps=references[1])


def loss_and_gradients(op, tensors, references, **options):
    leaves = {name: tensors[name].clone().requires_grad_() for name in LEAVES}
    result = op(**{**tensors, **leaves}, **references, **options)
    result.loss.backward()
    return [*result, *(x.grad for x in leaves.values())]


def composed(hidden, weight, targets, cu_seqlens, ref_chosen_logps, ref_rejected_logps, objective, weights, **head):
    logps, lengths = ops.linear_sequence_logps(hidden, weight, targets, cu_seqlens, **head)
    counts = dict(zip(("chosen_lengths", "rejected_lengths"), lengths.chunk(2), strict=True))
    references = ref_chosen_logps, ref_rejected_logps
    return ops.preference_loss(*logps.chunk(2), *references, objective, weights=weights, **counts)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", ("sft", "sigmoid_norm")], ids=str)
def test_it_is_composed_of_two_ops(loss):
    inputs, weights = pair_inputs(), torch.rand(len(LENGTHS) // 2)
    options = dict(objective=PreferenceObjective(loss), weights=weights, **HEAD)
    mine, expected = (loss_and_gradients(op, *inputs, **options) for op in (linear_preference_loss, composed))
    assert all(map(torch.equal, mine, expected))


def test_losses_that_compare_pairs_and_losses_without_a_reference():
    tensors, references = pair_inputs()
    for loss, given in (("aot", references), ("simpo", {})):
        assert linear_preference_loss(**tensors, **given, objective=PreferenceObjective(loss)).loss.isfinite()


def test_the_loss_of_a_layout():
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 4, 0, 0], [5, 6, 7, 10, 0], [5, 6, 3, 2, 1]])
    labels = ids.masked_fill((ids == 0) | (ids == 5), -100)
    layout = ops.pack_pairs(ids, ids != 0, labels)
    hidden, weight, refs = torch.randn(len(layout.token_index), D), torch.randn(V, D), torch.randn(2, 2)
    scored = hidden[layout.label_index]
    mine = linear_preference_loss(scored, weight, layout.labels, layout.label_bounds, *refs)
    logps = ops.linear_logps(hidden[layout.score_index], weight, layout.targets).logps
    expected = ops.preference_loss(*layout.unpack(logps).double().sum(1).float().chunk(2), *refs)
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
