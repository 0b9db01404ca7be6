"""What TRL's trainers compute once, do not compute at all, or leave to TRL."""

import pytest
import torch

import fastdpo
from fastdpo.ops.head import logit_rows
from tests.contract.harness import harnesses
from tests.support.trl.dpo import recorded_layouts
from tests.support.trl.online import writer

TRAINERS = {x.name.removeprefix("trl."): x for x in harnesses()}
ROWS = [dict(prompt="w1 w2 w3 w4 w5 w6 w7 ", chosen="w4 w5", rejected="w6", reference="w7 w8 w9")] * 16
PROMPTS = [{"prompt": row["prompt"]} for row in ROWS]
ON_PAIRS, ON_PROMPTS = (
    ("RewardTrainer", "TPOTrainer"),
    ("A2POTrainer", "OnlineDPOTrainer", "GRPOTrainer", "RLOOTrainer"),
)


@pytest.mark.parametrize("name", [*ON_PAIRS, *ON_PROMPTS])
def test_prompts_are_computed_once(name, tmp_path, monkeypatch):
    """In a batch whose rows have the same one."""
    trainer, layouts, before = TRAINERS[name], recorded_layouts(monkeypatch), fastdpo.calls.copy()
    data, groups = ROWS if name in ON_PAIRS else PROMPTS, name in ("GRPOTrainer", "RLOOTrainer")
    again = dict(steps_per_generation=2, num_iterations=2) if groups else {}
    with fastdpo.patched(trainer.name):
        trainer.train(tmp_path, *trainer.models(), data=data, **trainer.one_step | again)
    kinds = {kind for _, kind, _ in fastdpo.calls - before}
    assert kinds >= ({"policy", "old_policy", "reference"} if groups else {"policy"})
    assert len(layouts) >= len(kinds)
    for layout in layouts:
        assert layout.unshared - len(layout.token_index) >= 7 * (layout.output_shape[0] - 1)


LONG = {
    "OnlineDPOTrainer": dict(max_new_tokens=16, per_device_train_batch_size=8),
    "TPOTrainer": dict(data=[{**row, "prompt": 4 * row["prompt"]} for row in ROWS]),
    "A2POTrainer": dict(max_completion_length=32, per_device_train_batch_size=8),
}


@pytest.mark.parametrize("name", LONG)
def test_no_logits_are_stored(name, tmp_path, monkeypatch):
    """The largest piece of memory of a step is far smaller than the logits of its rows."""
    monkeypatch.setattr(logit_rows, "MIN_TILE_ROWS", 8)
    monkeypatch.setattr(logit_rows, "TILE_BYTES", 0)
    monkeypatch.setattr("fastdpo.ops.head.linear_logps.MEMORY_BUDGET", 0)
    trainer = TRAINERS[name]

    def largest() -> int:
        models = [writer(seed, vocab_size=4000) for seed in range(len(trainer.models()))]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            trainer.train(tmp_path, *models, **trainer.one_step | LONG[name])
        events = profile.profiler.kineto_results.events()
        return max(event.nbytes() for event in events if event.name() == "[memory]")

    stock = largest()
    with fastdpo.patched(trainer.name):
        assert largest() < stock / 3


OPTIONS = ("use_liger_kernel", "use_transformers_continuous_batching")
LEFT = [("TPOTrainer", OPTIONS[0]), *((name, option) for name in ("GRPOTrainer", "RLOOTrainer") for option in OPTIONS)]


@pytest.mark.parametrize(("name", "option"), LEFT)
def test_trainers_with_these_options_are_left_as_they_are(name, option, tmp_path, caplog):
    trainer = TRAINERS[name]
    fastdpo.patch(trainer.name)
    model, *_ = trainer.models()
    trainer.build(tmp_path, model, beta=0.0, **{option: True})
    assert caplog.text.count(f"{trainer.name} ({name}): not fused, {option} is set") == 1
    assert "fastdpo" not in repr(vars(model))
