"""`patch(max_tokens=...)` for GRPO and RLOO: the steps of stock, whose rows are cut anew by a budget of tokens."""

import re
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOTrainer, RLOOTrainer

import fastdpo
from fastdpo.integrations import outcomes
from fastdpo.integrations.trl import groups
from fastdpo.integrations.trl.max_tokens.planning import UnitPlanner
from fastdpo.models import calls as counters
from tests.support.trl.dpo import LORA
from tests.support.trl.groups import NAMES, build_group
from tests.support.trl.online import writer
from tests.support.workers import group_budgets
from tests.support.workers.group_budgets import MAX_TOKENS, STEPS, Trained, trained
from tests.support.workers.processes import run_ranks

ROUNDING = 5e-5
"""That of float32, in which norms, rotary embeddings and rewards are computed in any dtype, after several steps."""


def assert_same(stock: Trained, patched: Trained) -> None:
    """Asserts that two trainings have the same logs, in the same order, and the same gradients."""
    assert [list(log) for log in stock.logs] == [list(log) for log in patched.logs]
    for log, other in zip(stock.logs, patched.logs, strict=True):
        assert other == pytest.approx(log, rel=ROUNDING, abs=ROUNDING, nan_ok=True)
    assert len(stock.gradients) == len(patched.gradients) > 0
    for step, other in zip(stock.gradients, patched.gradients, strict=True):
        assert step.keys() == other.keys()
        for name in step:
            assert step[name].dtype == torch.float64
            assert (other[name] - step[name]).norm() <= ROUNDING * step[name].norm(), name


@pytest.fixture
def computed(monkeypatch):
    """The packed tokens of every call of a model."""
    tokens, count = [], counters.count_tokens
    monkeypatch.setattr(counters, "count_tokens", lambda *args: (tokens.append(args[-1]), count(*args)))
    return tokens


@pytest.fixture
def compare(tmp_path):
    """Compares a training with that of stock, and returns it."""

    def both(trainer_class=GRPOTrainer, max_tokens=MAX_TOKENS, **options):
        stock = trained(tmp_path / "stock", trainer_class, **options)
        with fastdpo.patched(NAMES[trainer_class], max_tokens=max_tokens):
            patched = trained(tmp_path / "patched", trainer_class, **options)
        assert_same(stock, patched)
        return patched

    return both


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo", "sapo", "dapo", "cispo", "vespo"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_loss_type(compare, loss_type, accumulation):
    size = 16 // accumulation
    patched = compare(loss_type=loss_type, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    assert {path for _, path in patched.calls} == {"fused"}
    # Some step has three micro-batches: 16 rows are not cut into three equal parts.
    assert 2 * STEPS["max_steps"] < patched.calls["policy", "fused"] < 4 * STEPS["max_steps"]


AGAIN = dict(steps_per_generation=8, num_iterations=2, max_steps=4)
"""Each generation is two steps, on which the policy is trained twice: ratios differ from 1, and some are clipped."""
SPLIT = dict(per_device_train_batch_size=3, num_generations=6)
"""The batches of stock hold parts of groups."""
OPTIONS = {
    "trained on again": (GRPOTrainer, AGAIN),
    "sequence ratios": (GRPOTrainer, dict(**AGAIN, importance_sampling_level="sequence", loss_type="luspo")),
    "off-policy mask": (GRPOTrainer, dict(**AGAIN, off_policy_mask_threshold=0.05, delta=1.5, loss_type="grpo")),
    "batches twice in a step": (GRPOTrainer, dict(steps_per_generation=2, num_iterations=2)),
    "generations within a step": (GRPOTrainer, dict(steps_per_generation=1, loss_type="grpo")),
    "tokens of generations within a step": (GRPOTrainer, dict(steps_per_generation=2)),
    "generations across steps": (GRPOTrainer, dict(steps_per_generation=6)),
    "split groups": (GRPOTrainer, SPLIT),
    "one micro-batch": (GRPOTrainer, dict(max_tokens=10_000)),
    "truncated completions": (GRPOTrainer, dict(mask_truncated_completions=True)),
    "adapter": (GRPOTrainer, dict(**AGAIN, peft_config=LoraConfig(**LORA))),
    "checkpointing": (GRPOTrainer, dict(gradient_checkpointing=True)),
    "logged later": (GRPOTrainer, dict(logging_steps=2)),
    "evaluation": (GRPOTrainer, dict(evaluate=4, eval_strategy="steps", eval_steps=1)),
    "RLOO": (RLOOTrainer, {}),
    "RLOO without accumulation": (
        RLOOTrainer,
        dict(per_device_train_batch_size=16, gradient_accumulation_steps=1),
    ),
    "RLOO, trained on again": (RLOOTrainer, AGAIN),
    "RLOO, generations across steps": (RLOOTrainer, dict(steps_per_generation=6)),
    "RLOO, split groups": (RLOOTrainer, SPLIT),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(compare, option):
    trainer_class, options = OPTIONS[option]
    patched = compare(trainer_class, **options)
    assert {path for _, path in patched.calls} == {"fused"}
    if "num_iterations" in options and "max_steps" in options:
        assert any(log.get("clip_ratio/region_mean", 0) > 0 for log in patched.logs)


def test_two_ranks(tmp_path):
    run_ranks(2, group_budgets.train_rank, tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert [rank["world"] for rank in ranks] == [2, 2]
    for of_trainer in zip(*(rank["runs"] for rank in ranks), strict=True):
        for stock, patched in of_trainer:
            assert_same(Trained(*stock), Trained(*patched))
        calls = [Trained(*patched).calls for _, patched in of_trainer]
        assert calls[0] == calls[1], "all ranks have the same number of micro-batches"
        assert {path for _, path in calls[0]} == {"fused"}


def test_micro_batches_fill_the_budget_and_compute_prompts_once(tmp_path, computed):
    """Each of the two micro-batches holds all completions of its prompts."""
    sizes = dict(beta=0.0, max_steps=1, num_generations=8, per_device_train_batch_size=8)
    policy_tokens = {}
    for max_tokens in (None, 160):
        computed.clear()
        with fastdpo.patched("trl.GRPOTrainer", max_tokens=max_tokens):
            patched = trained(tmp_path / str(max_tokens), **sizes)
        assert {path for _, path in patched.calls} == {"fused"}
        policy_tokens[max_tokens] = list(computed)
    assert len(policy_tokens[None]) == 4
    assert max(policy_tokens[160]) <= 160
    assert sum(policy_tokens[160]) < 0.8 * sum(policy_tokens[None])
    with fastdpo.patched("trl.GRPOTrainer", max_tokens=10**6):
        computed.clear()
        trained(tmp_path / "tree", **sizes)
    assert sum(policy_tokens[160]) <= 1.02 * sum(computed)


def test_what_is_not_shared_counts_for_each_row(tmp_path, computed):
    calls = {}
    for share in (True, False):
        computed.clear()
        with fastdpo.patched("trl.GRPOTrainer", max_tokens=MAX_TOKENS, share_prompts=share):
            calls[share] = trained(tmp_path / str(share), beta=0.0).calls["policy", "fused"]
        assert max(computed) <= MAX_TOKENS
    assert calls[True] < calls[False]


def test_a_row_above_the_budget_runs_alone(compare, caplog):
    patched = compare(max_tokens=12)
    assert caplog.text.count("more than max_tokens=12, and runs alone") == 1
    assert patched.calls["policy", "fused"] > 4 * STEPS["max_steps"]


def test_the_outcome_of_the_option(tmp_path):
    fastdpo.patch("trl.GRPOTrainer", max_tokens=MAX_TOKENS)
    before = Counter(counters.outcomes)
    calls = trained(tmp_path).calls
    counted = {name: n for (_, name), n in (counters.outcomes - before).items()}
    assert counted == {"steps": STEPS["max_steps"], "micro-batches": calls["policy", "fused"]}
    assert re.search(r"; max_tokens=45 \(\d+ steps in \d+ micro-batches\)$", outcomes.line("trl.GRPOTrainer"))


class StopsWithinAStep(TrainerCallback):
    """Stops the first training after two of the four batches of its second step."""

    def __init__(self):
        self.substeps = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.substeps += 1
        control.should_training_stop |= self.substeps == 5


def test_a_training_after_one_that_was_stopped_within_a_step(tmp_path):
    fastdpo.patch("trl.GRPOTrainer", max_tokens=MAX_TOKENS)
    options = {**STEPS, "steps_per_generation": 4, "beta": 0.0}
    trainer = build_group(tmp_path, writer(), callbacks=[StopsWithinAStep()], **options)
    trainer.train()
    assert trainer.state.global_step == 1
    steps = counters.outcomes["trl.GRPOTrainer", "steps"]
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.train()
    assert trainer.state.global_step == STEPS["max_steps"]
    assert counters.outcomes["trl.GRPOTrainer", "steps"] == steps + STEPS["max_steps"]


class UnpatchesWithinAStep(TrainerCallback):
    """Undoes the patches after two of the four batches of the first step."""

    def __init__(self):
        self.substeps = 0

    def on_substep_end(self, args, state, control, **kwargs):
        self.substeps += 1
        if self.substeps == 2:
            fastdpo.unpatch()


@pytest.mark.parametrize("trainer_class", NAMES)
def test_unpatching_within_a_step_hands_its_batches_back(tmp_path, trainer_class):
    stock = trained(tmp_path / "stock", trainer_class)
    fastdpo.patch(NAMES[trainer_class], max_tokens=MAX_TOKENS)
    patched = trained(tmp_path / "patched", trainer_class, callbacks=[UnpatchesWithinAStep()])
    assert_same(stock, patched)
    assert ("policy", "fused") not in patched.calls, "no batch was due before"


@pytest.mark.parametrize("trainer_class", NAMES)
def test_a_lost_row_is_noticed(compare, monkeypatch, trainer_class):
    stock = UnitPlanner.units
    monkeypatch.setattr(UnitPlanner, "units", lambda self, run: [*stock(self, run)[:-1], stock(self, run)[0]])
    with pytest.raises(AssertionError):
        compare(trainer_class)


def test_a_wrong_weight_is_noticed(compare, monkeypatch):
    for name, values in {"SUMS_OVER_A_GENERATION": set(), "MEANS_OVER_ROWS": {"dapo"}}.items():
        monkeypatch.setattr(groups, name, values)
    with pytest.raises(AssertionError):
        compare(loss_type="dapo")


class OwnLoss(RLOOTrainer):
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


class OwnSteps(GRPOTrainer):
    def training_step(self, model, inputs, num_items_in_batch):
        return torch.zeros(())


REFUSED = {
    "bnpo": (GRPOTrainer, dict(loss_type="bnpo"), "loss_type='bnpo', which depends on the batch of a row"),
    "entropy bonus": (GRPOTrainer, dict(entropy_coef=0.3), "an entropy bonus, which is a mean"),
    "quantile": (GRPOTrainer, dict(top_entropy_quantile=0.35), "top_entropy_quantile below 1"),
    "loss": (OwnLoss, {}, "OwnLoss, which overrides the loss of RLOOTrainer"),
    "steps": (OwnSteps, {}, "OwnSteps, whose training_step does not call that of GRPOTrainer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(tmp_path, case):
    trainer_class, options, message = REFUSED[case]
    fastdpo.patch("trl.GRPOTrainer", "trl.RLOOTrainer", max_tokens=MAX_TOKENS)
    with pytest.raises(NotImplementedError, match=f"^patch: max_tokens does not support {re.escape(message)}"):
        build_group(tmp_path, writer(), trainer_class, beta=0.0, **options).train()


def test_a_router_loss_is_refused(tmp_path):
    fastdpo.patch("trl.GRPOTrainer", max_tokens=MAX_TOKENS)
    model = writer(0, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(NotImplementedError, match="does not support the auxiliary loss of routers"):
        build_group(tmp_path, model, beta=0.0, router_aux_loss_coef=0.1)


def test_batches_with_images_are_refused():
    with pytest.raises(NotImplementedError, match="does not support batches with pixel_values, such as"):
        groups.joined_entry("pixel_values", [torch.zeros(2, 3), torch.zeros(2, 3)])
    with pytest.raises(NotImplementedError, match="does not support batches with num_images, such as"):
        groups.joined_entry("num_images", [[1, 1], [1, 1]])
