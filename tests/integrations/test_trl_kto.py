"""What only TRL's KTOTrainer has: its KL term, and reference calls for completions and KL term at once."""

import torch

from fastdpo.integrations.scored_rows import merged
from tests.support.comparison import assert_close
from tests.support.trl.dpo import tiny_model


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
