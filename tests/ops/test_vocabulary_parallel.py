"""linear_logps over a vocabulary that is cut over ranks: equal to the whole head, with small collectives."""

import pytest
import torch
import torch.distributed as dist

from fastdpo.ops import VocabularyGroup, linear_logps, linear_sequence_logps
from fastdpo.ops.head.results import STATISTICS
from tests.support.ops.heads import LEAVES, head_inputs
from tests.support.workers import vocabulary as worker
from tests.support.workers.processes import run_ranks

WORK = (
    worker.every_mode_equals_the_whole_head,
    worker.overflows_spread_as_in_the_whole_head,
    worker.parts_without_a_possible_entry,
    worker.ties_are_won_by_the_first_of_the_largest,
    worker.confident_predictions_keep_their_gradient,
    worker.collectives_are_small_and_few,
    worker.other_uses,
)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_on_ranks(work, ranks):
    run_ranks(ranks, work)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield VocabularyGroup.of(11)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("keep", "form_jacobian", "statistics"),
    [
        (0, False, ""),  # forward only
        (0, True, ""),  # a frozen head
        (8, False, ",".join(STATISTICS)),  # every tile kept, every result
    ],
)
def test_opcheck(keep, form_jacobian, statistics, dtype, group):
    inputs = head_inputs(8, 11, 5, dtype)
    call = (*(inputs[name] for name in (*LEAVES, "targets")), 5.0, 1.7, 0.7, dtype)
    cut, checked = (group.name, list(group.sizes), group.rank), ("test_schema", "test_faketensor")
    forward, backward = torch.ops.fastdpo.linear_logps_fwd, torch.ops.fastdpo.linear_logps_bwd
    arguments = (*call, statistics, keep, form_jacobian, *cut)
    torch.library.opcheck(forward, arguments, test_utils=checked)
    kept, jacobian, _, *results = forward(*arguments)
    of_entropy, n_sums = (torch.randn(8), 7) if statistics else (None, 5)
    needs = [True, not form_jacobian, not form_jacobian]
    upstream = torch.randn(8), of_entropy
    arguments = (*upstream, kept, jacobian, results[:n_sums], needs, None, *call, *cut)
    torch.library.opcheck(backward, arguments, test_utils=checked)


HEAD = dict(hidden=torch.randn(3, 4), weight=torch.randn(5, 4), targets=torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("op", [linear_logps, linear_sequence_logps])
def test_a_group_of_another_type_is_named(op):
    more = {} if op is linear_logps else {"cu_seqlens": torch.tensor([0, 3])}
    with pytest.raises(TypeError, match=r"^linear_logps: group must be a VocabularyGroup or None .*; got 2"):
        op(**HEAD, **more, group=2)


def test_a_weight_of_another_size_is_named():
    group = VocabularyGroup("world", (5, 7), 1)
    with pytest.raises(ValueError, match=r"^linear_logps: weight must have the 7 rows .* rank 1; got 5"):
        linear_logps(**HEAD, group=group)


def test_a_group_needs_a_process_group():
    with pytest.raises(ValueError, match=r"^VocabularyGroup.of: torch.distributed must be initialized"):
        VocabularyGroup.of(5)
    with pytest.raises(ValueError, match=r"^VocabularyGroup.of: rows must be a positive integer; got 0"):
        VocabularyGroup.of(0)
