"""What only TRL's KTOTrainer has: its KL term, and reference calls for completions and KL term at once."""

import functools

import pytest
import torch

from fastdpo.integrations.scored_rows import merged
from tests.contract.trainers.trl.kto import long_rows
from tests.support.comparison import assert_close
from tests.support.models.families import FUSED
from tests.support.trl.dpo import assert_same, tiny_model
from tests.support.trl.kto import train_both_kto


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_kto, tmp_path)


def test_reference_calls_of_different_widths_stay_apart_where_frequencies_depend_on_the_width(both):
    """One call would compute the shorter rows with the frequencies of the longer ones."""
    long = dict(kind="phi3", tiny=FUSED["phi3-longrope"][1], data=long_rows(), max_steps=4)
    stock, patched = both(**long)
    assert set(patched.calls) == {("policy", "fused"), ("reference", "fused")}
    assert patched.calls["policy", "fused"] == 8
    assert 4 <= patched.calls["reference", "fused"] <= 8
    assert_same(stock, patched)


def test_merged_rows_have_the_log_probs_of_their_own_calls(tmp_path):
    """Rows of both calls differ in number of tokens, so that one of them is padded."""
    ids = torch.randint(3, 90, (4, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    inputs = dict(input_ids=ids, attention_mask=mask, completion_mask=mask * (torch.arange(9) >= 4))
    names = list(inputs)
    inputs |= {f"KL_{name}": x.roll(1, 0)[:, :8] for name, x in inputs.items()}
    rows = merged(*({name: inputs[f"{prefix}{name}"] for name in names} for prefix in ("", "KL_")))
    assert [x.shape for x in rows.values()] == [(8, 9)] * 3
    model = tiny_model().eval()

    def logps(batch: dict, prefix: str = "") -> torch.Tensor:
        of_all = model(input_ids=batch[f"{prefix}input_ids"], attention_mask=batch[f"{prefix}attention_mask"]).logits
        targets = batch[f"{prefix}input_ids"][:, 1:, None]
        of_targets = of_all[:, :-1].log_softmax(-1).gather(2, targets)[..., 0]
        return (of_targets * batch[f"{prefix}completion_mask"][:, 1:]).sum(1)

    with torch.no_grad():
        assert_close(logps(rows), torch.cat([logps(inputs), logps(inputs, "KL_")]), relative=1e-5)
