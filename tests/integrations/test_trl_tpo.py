"""What only TRL's TPOTrainer has: three rows of a prompt."""

import functools

import pytest
import torch

import fastdpo
from tests.support.comparison import assert_trained_alike
from tests.support.models.multimodal import IMAGE, tiny_multimodal
from tests.support.trl.dpo import assert_same_bits, recorded_layouts, recorded_packs, tiny_model, train_both
from tests.support.trl.tpo import TPO, triples

NAME = "trl.TPOTrainer"


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both, tmp_path, reference=False, trainer=NAME, train=TPO.train)


@pytest.mark.parametrize("alpha", [1.0, 0.0])
def test_prompts_are_computed_once(both, monkeypatch, alpha):
    layouts = recorded_layouts(monkeypatch)
    rows = [dict(prompt=f"w{i} w2 w3 ", chosen="w4 w5", rejected="w6", reference="w7 w8 w9") for i in range(10, 26)]
    both(data=rows, max_steps=1, tpo_alpha=alpha)
    (layout,) = layouts
    completions = (2, 1, 3) if alpha else (2, 1)
    assert layout.token_index.numel() == 4 * (3 + sum(completions))
    assert len(layout.score_index) == 4 * (sum(completions) + len(completions))  # and an end token of each


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_with_their_layouts(both, monkeypatch, workers):
    packed = recorded_packs(monkeypatch)
    assert_trained_alike(both(dataloader_num_workers=workers), policy=3)
    assert packed.count(12) == (0 if workers else 4)


def with_images(collate):
    """A collator that adds an image to each row."""
    return lambda examples: (
        (batch := collate(examples)) | dict(pixel_values=torch.ones(len(batch["input_ids"]), 3, 16, 16))
    )


class Images(TPO.trainer_class):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator = with_images(self.data_collator)


def test_batches_with_images_run_as_in_stock(both, caplog):
    placeholder = f"w{IMAGE - 3}"
    rows = [{name: text.replace(placeholder, "w1") for name, text in row.items()} for row in triples(16)]
    rows = [{**row, "prompt": f"{placeholder} " * 16 + row["prompt"]} for row in rows]
    stock, patched = both("llava", build=tiny_multimodal, trainer_class=Images, data=rows)
    assert patched.calls == {("policy", "stock"): 3}
    assert caplog.text.count(f"{NAME} (policy): not fused, argument pixel_values is not supported") == 1
    assert_same_bits(stock, patched)


def test_liger_leaves_the_trainer_as_it_is(tmp_path, caplog):
    fastdpo.patch(NAME)
    TPO.build(tmp_path, model := tiny_model(), use_liger_kernel=True)
    assert f"{NAME} (TPOTrainer): not fused, use_liger_kernel is set" in caplog.text
    assert "fastdpo" not in repr(vars(model))


def test_no_logits_are_stored(tmp_path):
    """The largest piece of memory of a step is far smaller than the logits of its rows."""
    words, rows = 4000, [{**row, "prompt": row["prompt"] * 4} for row in triples(4)]

    def largest() -> int:
        trainer = TPO.build(tmp_path, tiny_model(vocab_size=words), data=rows, max_steps=1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            trainer.train()
        events = profile.profiler.kineto_results.events()
        return max(event.nbytes() for event in events if event.name() == "[memory]")

    stock = largest()
    with fastdpo.patched(NAME):
        patched = largest()
    assert patched < stock / 4
