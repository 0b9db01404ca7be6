"""`patch(max_tokens=...)` for SFT, KTO, DPO, Reward and TPO: the steps of stock, whose rows and pairs are cut anew."""

import functools
import itertools

import pytest
import torch
from datasets import IterableDataset
from peft import PromptTuningConfig, TaskType
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.tpo import TPOTrainer

import fastdpo
from fastdpo.models import calls as counters
from tests.support.comparison import assert_same_gradients, assert_same_logs
from tests.support.trl import reward
from tests.support.trl.dpo import Run, adapter, pairs, recorded_packs, tokenizer
from tests.support.trl.resuming import assert_resumes
from tests.support.workers import budgets
from tests.support.workers.budgets import (
    COMMON,
    DPO,
    GROUPS,
    GRPO,
    KTO,
    MAX_TOKENS,
    REWARD,
    RLOO,
    SFT,
    TPO,
    TRAINERS,
    assert_cut_alike,
    compared,
    trained,
)
from tests.support.workers.processes import run_ranks

STEPS = 3
ADAPTER = {name: x for name, x in adapter().items() if name != "reference"}


@pytest.fixture
def compare(tmp_path):
    return functools.partial(compared, tmp_path)


OF_PAIRS = {
    "worker processes": dict(dataloader_num_workers=1, max_steps=2),
    "sequential": dict(train_sampling_strategy="sequential"),
    "input tokens": dict(include_num_input_tokens_seen="non_padding"),
    "data seed": dict(data_seed=7, accelerator_config={"use_seedable_sampler": False}),
    "dispatched batches": dict(accelerator_config={"dispatch_batches": True}),
    "streaming": dict(data=IterableDataset.from_generator(budgets.related_pairs, gen_kwargs=dict(n=budgets.UNITS))),
}


class Listed(DPOTrainer):
    def get_train_dataloader(self):
        self.train_dataset = list(self.train_dataset)
        return super().get_train_dataloader()


OPTIONS = {
    **{f"{trainer}, {name}": (trainer, options) for trainer in TRAINERS for name, options in COMMON.items()},
    **{f"{trainer}, {name}": (trainer, options) for trainer in (DPO, REWARD) for name, options in OF_PAIRS.items()},
    **{f"{trainer}, truncated": (trainer, dict(max_length=12)) for trainer in (SFT, KTO, DPO)},
    **{f"{trainer}, adapter": (trainer, ADAPTER) for trainer in (SFT, KTO, TPO)},
    "SFT, dft": (SFT, dict(loss_type="dft")),
    "SFT, every token": (SFT, dict(completion_only_loss=False)),
    "SFT, tokens of a rank": (SFT, dict(average_tokens_across_devices=False)),
    "KTO, apo_zero_unpaired": (KTO, dict(loss_type="apo_zero_unpaired", evaluate=4)),
    "KTO, weights": (KTO, dict(beta=0.5, desirable_weight=1.3, undesirable_weight=0.7)),
    "KTO, adapter as reference": (KTO, adapter()),
    "KTO, precomputed": (KTO, dict(precompute_ref_log_probs=True)),
    "KTO, precomputed apo": (KTO, dict(precompute_ref_log_probs=True, loss_type="apo_zero_unpaired")),
    "KTO, synchronized": (KTO, dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6)),
    "DPO, adapter": (DPO, adapter()),
    "DPO, precomputed": (DPO, dict(precompute_ref_log_probs=True)),
    "DPO, synchronized": (DPO, dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6)),
    "DPO, length-normalized and hinge": (DPO, dict(loss_type=["ipo", "hinge"], loss_weights=[0.5, 1.0])),
    "DPO, weighting": (DPO, dict(use_weighting=True)),
    "DPO, ld_alpha": (DPO, dict(ld_alpha=0.5)),
    "DPO, list": (DPO, dict(trainer_class=Listed)),
    "DPO, by length": (
        DPO,
        dict(
            data=[{**row, "length": len(row["chosen"])} for row in budgets.related_pairs(budgets.UNITS)],
            train_sampling_strategy="group_by_length",
            remove_unused_columns=False,
        ),
    ),
    "Reward, adapter": (REWARD, reward.adapter()),
    "Reward, padding of another id": (REWARD, dict(pad_token="<unk>")),  # not 0, which masks are padded with
    **{f"TPO, {loss}": (TPO, dict(loss_type=loss, beta=0.5)) for loss in ("hinge", "ipo", "tpo-l")},
    "TPO, large alpha": (TPO, dict(tpo_alpha=20.0)),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(tmp_path, caplog, option):
    """By a number of tokens, and by default where batches are accumulated, next to the same training of stock."""
    caplog.set_level("INFO", "fastdpo")
    trainer, options = OPTIONS[option]
    options = dict(options)
    number = options.pop("max_tokens", None)
    stock = trained(tmp_path / "stock", trainer, **options)
    by_default = number is None and options.get("gradient_accumulation_steps") != 1
    for max_tokens in [number, "own"] if by_default else [number]:
        counters.outcomes.clear()
        patched = compared(tmp_path, trainer, max_tokens, stock, **options)
        assert {path for _, path in patched.calls} == {"fused"}
    if by_default:
        assert "keeps the batches of TRL" not in caplog.text
        steps = counters.outcomes[trainer, "steps"]
        assert 0 < steps <= counters.outcomes[trainer, "micro-batches"] <= 4 * steps


def test_kl_terms_above_zero(compare):
    """TRL's are not below 0, which would hide errors."""
    patched = compare(KTO, max_steps=2)
    assert min(log["kl"] for log in patched.logs if "kl" in log) > 0.5


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_computed_in_a_step(tmp_path, computed, trainer):
    """The rows of a prompt come into one micro-batch. The policy is called once for each, and for its KL term."""
    half = 200 if trainer in (SFT, KTO) else 300
    reference = {KTO: {("policy", "fused"): 4, ("reference", "fused"): 2}, DPO: {("reference", "fused"): 2}}
    sums = {}
    for max_tokens in (None, half, 10**6):
        computed.clear()
        with fastdpo.patched(trainer, max_tokens=max_tokens):
            patched = trained(tmp_path / str(max_tokens), trainer, max_steps=1)
        sums[max_tokens] = sum(computed)
        if max_tokens == half:
            assert patched.calls == {("policy", "fused"): 2} | reference.get(trainer, {})
            assert trainer == KTO or half / 3 < max(computed) <= half
    assert sums[half] <= 1.02 * sums[10**6] < sums[None]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_call_is_packed_once(tmp_path, monkeypatch, trainer):
    """Those with gradients are packed on the host, where their layouts are found again, by the reference of DPO too."""
    packs = recorded_packs(monkeypatch)
    with fastdpo.patched(trainer, max_tokens=MAX_TOKENS[trainer]):
        packs.clear()
        patched = trained(tmp_path, trainer, max_steps=2)
    assert {path for _, path in patched.calls} == {"fused"}
    models = 1 if trainer in (SFT, REWARD, TPO) else 2  # each of which is examined once
    calls = patched.calls["policy", "fused"] if trainer == DPO else sum(patched.calls.values())
    assert len(packs) == calls + models


@pytest.mark.parametrize("trainer", [DPO, REWARD, GRPO])
def test_what_is_not_shared_counts_for_each_row(tmp_path, computed, trainer):
    calls = {}
    for share in (True, False):
        with fastdpo.patched(trainer, max_tokens=MAX_TOKENS[trainer], share_prompts=share):
            options = dict(beta=0.0) if trainer == GRPO else {}  # without a reference, which scores whole batches
            calls[share] = trained(tmp_path / str(share), trainer, **options).calls["policy", "fused"]
    assert max(computed) <= MAX_TOKENS[trainer]
    assert calls[True] < calls[False]


def test_a_pair_above_the_budget_runs_alone(tmp_path, caplog):
    with fastdpo.patched(DPO, max_tokens=12):
        trained(tmp_path, DPO, max_steps=1)
    assert caplog.text.count("a pair has") == 1
    assert "more than max_tokens=12, and runs alone" in caplog.text


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_resuming(tmp_path, sampling):
    """Stops in the second epoch, and continues in another trainer."""
    rows = [{**row, "length": len(row["prompt"].split())} for row in pairs(20)]
    fastdpo.patch(DPO, max_tokens=MAX_TOKENS[DPO])
    accumulated = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)  # 8, 8 and 4 pairs
    assert_resumes(tmp_path, rows, train_sampling_strategy=sampling, remove_unused_columns=False, **accumulated)


@pytest.mark.parametrize("trainer", [*TRAINERS, *GROUPS])
def test_two_ranks(tmp_path, trainer):
    run_ranks(2, budgets.train_rank, tmp_path, trainer)
    ranks = [[Run(**x) for x in torch.load(tmp_path / f"rank{rank}.pt")] for rank in range(2)]
    for stock, patched in ranks:
        assert not stock.calls
        assert_cut_alike(trainer, stock, patched)
        assert {path for _, path in patched.calls} == {"fused"}
    assert ranks[0][1].calls == ranks[1][1].calls, "all ranks have the same number of micro-batches"
    if trainer in (
        DPO,
        REWARD,
    ):  # in one process, the batches of both ranks are one, and the repeated pairs are missing
        one = trained(tmp_path / "one process", trainer, per_device_train_batch_size=8, max_steps=1)
        for _, patched in ranks:
            assert_same_gradients(one.gradients, patched.gradients[:1])
            assert_same_logs(one.logs[:1], patched.logs[:1])
    assert ranks[0][1].calls["policy", "fused"] >= 6


TUNING = dict(num_virtual_tokens=3)


@pytest.mark.parametrize("trainer", [SFT, KTO, DPO])
def test_batches_that_fall_back(compare, trainer):
    tuning = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, **TUNING)
    patched = compare(trainer, peft_config=tuning, **({} if trainer == SFT else dict(reference=False)))
    assert patched.calls["policy", "stock"] > STEPS
    assert not patched.calls["policy", "fused"]


CLASSES = {SFT: SFTTrainer, KTO: KTOTrainer, DPO: DPOTrainer, REWARD: RewardTrainer, TPO: TPOTrainer}
CLASSES |= {GRPO: GRPOTrainer, RLOO: RLOOTrainer}


def collating(trainer_class: type, change) -> type:
    """A subclass whose batches are what a function makes of those of its collator."""

    class Collating(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            collate = self.data_collator
            self.data_collator = lambda examples: change(collate(examples))

    return Collating


def with_padding(trainer_class: type, is_real) -> type:
    """A subclass whose collator leaves tokens out of its masks. `is_real` is called with ids and masks [R, L]."""

    def masked(batch):
        for name in {"attention_mask", "KL_attention_mask"} & batch.keys():
            ids = batch[name.replace("attention_mask", "input_ids")]
            batch[name] = batch[name] * is_real(ids, batch[name]).long()
        return batch

    return collating(trainer_class, masked)


MASKS = {
    "padding is the end of a row": lambda ids, mask: ids != tokenizer().eos_token_id,
    "without the last tokens": lambda ids, mask: mask.flip(1).cumsum(1).flip(1) > 2,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_tokens_with_labels_outside_the_mask_are_kept(compare, trainer, mask):
    compare(trainer, trainer_class=with_padding(CLASSES[trainer], MASKS[mask]))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_empty_mask_is_refused(tmp_path, trainer):
    masked = with_padding(CLASSES[trainer], lambda ids, mask: torch.arange(len(ids))[:, None] != 1)
    fastdpo.patch(trainer, max_tokens=MAX_TOKENS[trainer])
    with pytest.raises(NotImplementedError, match="max_tokens does not support rows whose attention mask is 0"):
        trained(tmp_path, trainer, trainer_class=masked)


class Interrupted(Exception):
    pass


def _interrupt(trainer, control):
    raise Interrupted


def _stop(trainer, control):
    control.should_training_stop = True


def _unpatch(trainer, control):
    fastdpo.unpatch()


WITHIN_A_STEP = {  # what happens, and behind which substep: of a step with four batches, three are substeps
    "evaluation": (lambda trainer, control: trainer.evaluate(), 5),
    "exception": (_interrupt, 2),
    "stop": (_stop, 5),
    "unpatching": (_unpatch, 1),
    "unpatching at the end": (_unpatch, 3),
}


def act_within_a_step(trainer, act, substep: int) -> None:
    """Acts after some of the batches of a step, as the handler of a signal may."""
    seen, end = itertools.count(1), trainer.callback_handler.on_substep_end

    def on_substep_end(args, state, control):
        control = end(args, state, control)
        if next(seen) == substep:
            act(trainer, control)
        return control

    trainer.callback_handler.on_substep_end = on_substep_end


def acting(trainer_class: type, act, substep: int) -> type:
    """A subclass that acts after some of the batches of a step, and trains again after an exception."""

    class Acting(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            act_within_a_step(self, act, substep)

        def train(self):
            try:
                return super().train()
            except Interrupted:
                return super().train()

    return Acting


ACTIONS = [(trainer, action) for trainer in TRAINERS for action in WITHIN_A_STEP]
ACTIONS += [(trainer, action) for trainer in GROUPS for action in WITHIN_A_STEP if "unpatching" in action]


@pytest.mark.parametrize(("trainer", "action"), ACTIONS)
def test_batches_that_wait_for_the_end_of_a_step_are_not_lost(compare, trainer, action):
    patched = compare(trainer, trainer_class=acting(CLASSES[trainer], *WITHIN_A_STEP[action]), evaluate=6)
    paths = {path for role, path in patched.calls if role == "policy" or trainer in TRAINERS}
    assert paths == ({"fused"} if "unpatching" not in action else set())
