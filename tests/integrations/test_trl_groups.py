"""What GRPO and RLOO have in common: odd batches, models, fallbacks, subclasses, ranks."""

import functools
import random
from collections import Counter

import pytest
import torch
from trl.trainer import grpo_trainer

import fastdpo
from tests.support.comparison import assert_close, assert_same_gradients
from tests.support.trl.dpo import tiny_model
from tests.support.trl.groups import NAMES, build_group, train_both_groups
from tests.support.trl.online import writer

BOTH = pytest.mark.parametrize("trainer_class", NAMES)


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_groups, tmp_path)


def odd_batch(seed: int) -> tuple[dict[str, torch.Tensor], int]:
    """A batch as the trainer scores it, and the width of its completions.

    Prompts are padded on the left and may be prefixes of each other, completions are padded on the
    right and may be empty or equal. Rows of one prompt are not next to each other.
    """
    draw = random.Random(seed)
    longest = [draw.randrange(3, 9) for _ in range(draw.randint(1, 6))]
    asked = [longest[: draw.randint(1, len(longest))] for _ in range(draw.randint(1, 3))]
    rows = []
    for _ in range(draw.randint(1, 9)):
        answer = [draw.randrange(3, 5) for _ in range(draw.choice((0, 1, 1, 2, 3, 5)))]
        rows.append((draw.choice(asked), answer))
    left = max(len(prompt) for prompt, _ in rows) + draw.choice((0, 2))
    right = max(1, *(len(answer) for _, answer in rows)) + draw.choice((0, 2))
    ids = [[0] * (left - len(p)) + p + a + [0] * (right - len(a)) for p, a in rows]
    mask = [[0] * (left - len(p)) + [1] * len(p + a) + [0] * (right - len(a)) for p, a in rows]
    ids, mask = torch.tensor(ids), torch.tensor(mask)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-right] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, right


def scored(model, batch: dict[str, torch.Tensor], width: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies of completions, any router loss, and the gradient of a sum of them."""
    model.zero_grad()
    output = model(**batch, fused_lm_head=True)
    parts = (output.log_probs[:, -width:], output.entropy[:, -width:])
    parts += () if output.aux_loss is None else (output.aux_loss,)
    torch.manual_seed(0)
    sum((x * torch.randn_like(x)).sum() for x in parts).backward()
    return *parts, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_odd_batches(kind):
    sizes = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True) if kind == "mixtral" else {}
    stock_model, model = (tiny_model(kind, **sizes) for _ in range(2))
    grpo_trainer.add_fused_lm_head(stock_model, outputs=("log_probs", "entropy"))
    fastdpo.patch("trl.GRPOTrainer")
    grpo_trainer.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    before = Counter(fastdpo.calls)
    for seed in range(60):
        batch, width = odd_batch(seed)
        stock, patched = (scored(each, batch, width) for each in (stock_model, model))
        for a, b in zip(patched[:-1], stock[:-1], strict=True):
            assert_close(a, b)
        assert_same_gradients([{"all": stock[-1]}], [{"all": patched[-1]}])
    assert fastdpo.calls - before == Counter({("trl.GRPOTrainer", "policy", "fused"): 60})


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
