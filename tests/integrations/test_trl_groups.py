"""What GRPO and RLOO have in common: odd batches, models, fallbacks, subclasses, ranks."""

import pytest
import torch

import fastdpo
from tests.support.trl.groups import NAMES, build_group
from tests.support.trl.online import writer

BOTH = pytest.mark.parametrize("trainer_class", NAMES)


def stock_path(trainer_class: type, role: str, reason: str) -> str:
    return f"{NAMES[trainer_class]} ({role}): not fused, {reason}"


IDS = torch.arange(3, 39).view(4, 9)
OTHER_INPUTS = {
    "an empty prompt": (  # generation fails on it, but a rollout function may return one
        dict(attention_mask=torch.ones_like(IDS).index_fill(1, torch.arange(5), 0)),
        "a label is scored by a padding position",
    ),
    "token_type_ids": (dict(token_type_ids=torch.zeros_like(IDS)), "argument token_type_ids is not supported yet"),
    "pixel_values": (
        dict(pixel_values=torch.zeros(4, 3), num_images=[1] * 4),
        "argument pixel_values is not supported yet",
    ),
}


@BOTH
@pytest.mark.parametrize("inputs", OTHER_INPUTS)
def test_other_inputs_fall_back_to_stock(tmp_path, caplog, trainer_class, inputs):
    options, reason = OTHER_INPUTS[inputs]
    options = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS), compute_entropy=True) | options
    model = writer()
    trainer = build_group(tmp_path / "stock", model, trainer_class, beta=0.0)
    expected = trainer._get_per_token_logps_and_entropies(model, logits_to_keep=4, **options)
    fastdpo.patch(NAMES[trainer_class])
    trainer = build_group(tmp_path / "patched", model, trainer_class, beta=0.0)
    before = fastdpo.calls.copy()
    for _ in range(2):
        result = trainer._get_per_token_logps_and_entropies(model, logits_to_keep=4, **options)
        assert all(map(torch.equal, result[:2], expected[:2]))
    assert fastdpo.calls - before == {(NAMES[trainer_class], "policy", "stock"): 2}
    assert caplog.text.count(stock_path(trainer_class, "policy", reason)) == 1
