"""merged_sequence_logps: the sums of sequences that are split across ranks."""

import pytest
import torch

from fastdpo import ops
from tests.support.workers.processes import run_ranks
from tests.support.workers.split_sequences import LENGTHS, bounds, inputs, loss_of, score_part


@pytest.mark.parametrize("compiled", [False, True])
def test_two_ranks_equal_whole_sequences(compiled, tmp_path):
    """Sums, loss and gradients in float64. Those of the weight are the sum over the ranks."""
    run_ranks(2, score_part, tmp_path, compiled)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    with torch.device("cpu"):  # as the ranks
        hidden, weight, targets = inputs()
        whole = ops.linear_sequence_logps(hidden, weight, targets, bounds(LENGTHS))
        loss = loss_of(whole)
        loss.backward()
    for rank in ranks:
        torch.testing.assert_close(rank["sums"], tuple(whole))
        torch.testing.assert_close(rank["loss"], loss)
    for name, gradient in (("hidden", hidden.grad), ("weight", weight.grad)):
        torch.testing.assert_close(ranks[0][name] + ranks[1][name], gradient)
    assert min(rank["weight"].norm() for rank in ranks) > 0.1 * weight.grad.norm()


def test_without_process_group_there_is_one_rank():
    parts = ops.SequenceLogps(torch.randn(3), torch.tensor([1, 0, 4]))
    assert ops.merged_sequence_logps(parts) is parts
