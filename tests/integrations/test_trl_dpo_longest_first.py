"""`patch(longest_first=True)`: TRL's DPOTrainer rehearses its largest batch, and trains as without."""

import random
import re
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from families import DYNAMIC
from transformers import TrainerCallback
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl_runs import adapter, build, long_pairs, tiny_model, train

import fastdpo
from fastdpo.integrations.drawn_batches import largest_pairs
from fastdpo.integrations.trl import rehearsal
from fastdpo.models import fallback

RAGGED = long_pairs() * 2  # 16 pairs: 4 batches an epoch
GROWING = long_pairs(((5, 3, 2),) * 4 + ((10, 12, 11),) * 4 + ((1, 20, 30),) * 4 + ((30, 4, 40),) * 4)
STEPS = dict(max_steps=6, data=RAGGED, optim="adamw_torch")
LINE = re.compile(r"longest_first: memory suffices for (the largest batch|a batch of the largest pairs), (\d+) pairs")


class Draws(DataCollatorForPreference):
    """A collator that draws random numbers of every kind."""

    def torch_call(self, examples):
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
        return super().torch_call(examples)


class Records(TrainerCallback):
    """Records the random states and the metrics at the beginning of each step."""

    def __init__(self):
        self.states = []

    def on_step_begin(self, args, state, control, **kwargs):
        numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        self.states.append((*numbers, state.num_input_tokens_seen))


def run(directory, monkeypatch, longest_first: bool, options: dict, model: dict, **patch):
    """Trains, and returns the record, the packed tokens of every call, random states and final weights."""
    tokens, records, made = [], Records(), []

    def counting(integration, padded, packed):
        tokens.append(packed)
        count(integration, padded, packed)

    class Recorded(DPOTrainer):
        def __init__(self, *args, callbacks, **kwargs):
            super().__init__(*args, callbacks=[*callbacks, records], **kwargs)
            made.append(self)

    count = fallback.count_tokens
    with monkeypatch.context() as patched:
        patched.setattr(fallback, "count_tokens", counting)
        models = [tiny_model(seed=seed, **model) for seed in range(2)]
        reference = None if options.get("reference") is False else models[1]
        options = {name: x for name, x in options.items() if name != "reference"}
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        with fastdpo.patched("trl.DPOTrainer", longest_first=longest_first, **patch):
            recorded = train(directory / str(longest_first), models[0], reference, trainer_class=Recorded, **options)
    weights = {name: x.detach().clone() for name, x in made[0].model.named_parameters()}
    return recorded, Counter(tokens), records.states, weights


def assert_same_bits(without, rehearsed):
    (a, _, states, weights), (b, _, states_after, weights_after) = without, rehearsed
    assert a.logs == b.logs
    assert len(a.gradients) == len(b.gradients) > 0
    for before, after in [*zip(a.gradients, b.gradients, strict=True), (weights, weights_after)]:
        assert before.keys() == after.keys()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert a.calls == b.calls
    assert states == states_after


def with_options(**options):
    return {**STEPS, **options}


DROPOUT = with_options(**adapter(lora_dropout=0.3), disable_dropout=False)

# case: options of the training, options of patch, entries of the model's configuration
CASES = {
    "full": (STEPS, {}, {}),
    "lora": (with_options(**adapter()), {}, {}),
    "dropout": (with_options(**adapter(lora_dropout=0.3), disable_dropout=False), {}, {}),
    "dropout_deterministic": (
        with_options(**adapter(lora_dropout=0.3), disable_dropout=False),
        dict(share_prompts="deterministic"),
        {},
    ),
    "accumulation": (with_options(per_device_train_batch_size=2, gradient_accumulation_steps=2), {}, {}),
    "gradient_checkpointing": (with_options(gradient_checkpointing=True), {}, {}),
    "max_tokens": (with_options(per_device_train_batch_size=8), dict(max_tokens=120), {}),
    "reference_memory": (STEPS, dict(reference_memory=True), {}),
    "verify": (STEPS, dict(verify=True), {}),
    "log_savings": (STEPS, dict(log_savings=True), {}),
    "precomputed": (with_options(precompute_ref_log_probs=True), {}, {}),
    "sequential": (with_options(train_sampling_strategy="sequential"), {}, {}),
    "truncation": (with_options(max_length=12), {}, {}),
    "logged_later": (with_options(logging_steps=4, include_num_input_tokens_seen="non_padding"), {}, {}),
    "growing_positions": (
        with_options(max_length=None, train_sampling_strategy="sequential", data=GROWING),
        {},
        dict(max_position_embeddings=16, rope_parameters=DYNAMIC),
    ),
}
ACCUMULATING = {"accumulation", "max_tokens"}


def case_of(name):
    options, patch, model = CASES[name]
    return {**options, "data_collator": Draws(0, options.get("max_length", 1024))}, patch, model


@pytest.mark.parametrize("case", CASES)
def test_same_bits(tmp_path, monkeypatch, caplog, case):
    options, patch, model = case_of(case)
    without = run(tmp_path, monkeypatch, False, options, model, **patch)
    with caplog.at_level("INFO", logger="fastdpo"):
        rehearsed = run(tmp_path, monkeypatch, True, options, model, **patch)
    assert_same_bits(without, rehearsed)
    assert {path for _, path in rehearsed[0].calls} <= {"fused", "remembered"}
    [line] = [record.getMessage() for record in caplog.records if "longest_first" in record.getMessage()]
    assert LINE.search(line)[1] == "the largest batch"
    tokens = int(re.search(r"with ([\d,]+) tokens", line)[1].replace(",", ""))
    runs = (1 if case == "precomputed" else 2) * (2 if case in ACCUMULATING else 1)
    added = rehearsed[1] - without[1]
    if case == "reference_memory":  # which may know some of the pairs
        assert added[tokens] >= 1
    else:
        [(computed, n)] = added.items()
        assert n == runs
        assert computed == tokens + (case == "growing_positions")  # whose layouts add the width of the batch
    if case not in ("precomputed", "growing_positions"):  # the reference has other batches then
        assert tokens == max(without[1])


SABOTAGED = {
    "_without_traces": (lambda trainer: nullcontext(), "full"),
    "_same_random_states": (nullcontext, "dropout"),
    "_put_back_modules": (lambda undo, modules: None, "growing_positions"),
    "_refill": (lambda container, contents: None, "full"),
}


@pytest.mark.parametrize("name", SABOTAGED)
def test_a_trace_is_noticed(tmp_path, monkeypatch, name):
    replacement, case = SABOTAGED[name]
    options, patch, model = case_of(case)
    without = run(tmp_path, monkeypatch, False, options, model, **patch)
    monkeypatch.setattr(rehearsal, name, replacement)
    with pytest.raises((AssertionError, ZeroDivisionError)):  # a mean of no values is one, too
        assert_same_bits(without, run(tmp_path, monkeypatch, True, options, model, **patch))


UNKNOWN_ORDER = dict(accelerator_config={"use_seedable_sampler": False})


@pytest.mark.parametrize("patch", [{}, dict(max_tokens=120)], ids=["rows", "max_tokens"])
def test_the_largest_pairs_of_an_unknown_order(tmp_path, monkeypatch, caplog, patch):
    options = with_options(max_steps=3, **UNKNOWN_ORDER)
    without = run(tmp_path, monkeypatch, False, options, {}, **patch)
    with caplog.at_level("INFO", logger="fastdpo"):
        rehearsed = run(tmp_path, monkeypatch, True, options, {}, **patch)
    assert_same_bits(without, rehearsed)
    assert "memory suffices for a batch of the largest pairs" in caplog.text
    [(tokens, runs)] = (rehearsed[1] - without[1]).items()
    assert tokens >= (max(without[1]) if not patch else 0.9 * patch["max_tokens"])
    assert runs == (4 if patch else 2)


def test_largest_pairs():
    sizes = np.array([3, 9, 5, 7, 1])
    assert largest_pairs(sizes, 2) == [1, 3]
    assert largest_pairs(sizes, 9, 15) == [1, 2, 4]
    assert largest_pairs(sizes, 2, 15) == [1, 2]
    assert largest_pairs(sizes, 9, 4) == [0, 4]


def test_resuming(tmp_path, caplog):
    """Each of the two trainings rehearses once."""
    options = dict(per_device_train_batch_size=2, max_steps=6, save_strategy="steps", save_steps=3, optim="adamw_torch")
    weights = []
    for longest_first in (False, True):
        directory = tmp_path / str(longest_first)
        with caplog.at_level("INFO", logger="fastdpo"), fastdpo.patched("trl.DPOTrainer", longest_first=longest_first):
            build(directory, tiny_model(), tiny_model(seed=1), 8, **options).train()
            resumed = build(directory / "resumed", tiny_model(), tiny_model(seed=1), 8, **options)
            resumed.train(resume_from_checkpoint=str(directory / "out" / "checkpoint-3"))
        weights.append(list(resumed.model.parameters()))
    assert all(map(torch.equal, *weights))
    assert len(LINE.findall(caplog.text)) == 2


class RunsOut(DPOTrainer):
    """Runs out of memory in the second batch that it computes."""

    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("patch", "advice"), [({}, "per_device_train_batch_size"), (dict(max_tokens=120), "max_tokens")]
)
def test_running_out_of_memory(tmp_path, patch, advice):
    with fastdpo.patched("trl.DPOTrainer", longest_first=True, **patch):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 16, RunsOut)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer.train()
    [note] = caught.value.__notes__
    assert re.match(
        rf"fastdpo: longest_first: memory ran out in the largest batch, \d+ pairs with \d+ tokens, which ran after "
        rf"step 1\. Lower {advice}",
        note,
    )
    assert all(x.grad is None for x in trainer.model.parameters())


def with_a_hook(model):
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    return model


REFUSED = {
    "streaming": (dict(stream=True), "streaming datasets"),
    "a hook": (dict(prepare=with_a_hook), "hooks that run when a gradient is accumulated"),
    "layerwise": (dict(optim="galore_adamw_layerwise"), "optim='galore_adamw_layerwise'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(tmp_path, case):
    changes, message = REFUSED[case]
    prepare = changes.pop("prepare", lambda model: model)
    with fastdpo.patched("trl.DPOTrainer", longest_first=True):
        trainer = build(tmp_path, prepare(tiny_model()), tiny_model(seed=1), 8, max_steps=1)
        if "stream" in changes:
            trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        else:
            trainer.args.optim = changes.get("optim", trainer.args.optim)
        before = sum(fastdpo.calls.values())
        with pytest.raises(NotImplementedError, match=f"^patch: longest_first does not support {message}"):
            trainer.train()
    assert sum(fastdpo.calls.values()) == before
