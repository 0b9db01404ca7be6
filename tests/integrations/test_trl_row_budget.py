"""`patch(max_tokens=...)` for SFT and KTO: the steps of stock, whose rows are cut anew by a budget of tokens."""

import pytest
import torch
from peft import PromptTuningConfig
from transformers import TrainerCallback
from trl import KTOTrainer, SFTTrainer

import fastdpo
from fastdpo.batching.rows import RowPlanner
from fastdpo.integrations.trl import kto as kto_line
from fastdpo.integrations.trl.sft import SFTLine
from fastdpo.models import calls as counters
from tests.support.models.families import DYNAMIC, FUSED
from tests.support.trl import kto, sft
from tests.support.trl.dpo import Run, adapter, assert_same, recorded_packs, tiny_model, tokenizer
from tests.support.workers import row_budgets
from tests.support.workers.processes import run_ranks
from tests.support.workers.row_budgets import MAX_TOKENS, TRAINERS, trained

STEPS = 3
SFT, KTO = TRAINERS
ADAPTER = {name: x for name, x in adapter().items() if name != "reference"}


@pytest.fixture
def compare(tmp_path):
    """Compares a training in float64 with that of stock, and returns it."""

    def both(trainer: str, max_tokens: int = MAX_TOKENS, **options) -> Run:
        stock = trained(tmp_path / "stock", trainer, **options)
        with fastdpo.patched(trainer, max_tokens=max_tokens):
            patched = trained(tmp_path / "patched", trainer, **options)
        assert_same(stock, patched)
        return patched

    return both


LONG = dict(per_device_train_batch_size=16, gradient_accumulation_steps=1)
COMMON = {
    "as it is": {},
    "one micro-batch": dict(max_tokens=10_000),
    "rows above the budget": dict(max_tokens=12),
    "without accumulation": LONG,
    "logged later": dict(logging_steps=2),
    "evaluation": dict(evaluate=6, eval_strategy="steps", eval_steps=1),
    "truncated": dict(max_length=12),
    "pad_to_multiple_of": dict(pad_to_multiple_of=16),
    "checkpointing": dict(gradient_checkpointing=True),
    "adapter": ADAPTER,
}
OPTIONS = {
    **{f"SFT, {name}": (SFT, options) for name, options in COMMON.items()},
    "SFT, dft": (SFT, dict(loss_type="dft")),
    "SFT, every token": (SFT, dict(completion_only_loss=False)),
    "SFT, tokens of a rank": (SFT, dict(average_tokens_across_devices=False)),
    **{f"KTO, {name}": (KTO, options) for name, options in COMMON.items()},
    "KTO, apo_zero_unpaired": (KTO, dict(loss_type="apo_zero_unpaired", evaluate=4)),
    "KTO, weights": (KTO, dict(beta=0.5, desirable_weight=1.3, undesirable_weight=0.7)),
    "KTO, adapter as reference": (KTO, adapter()),
    "KTO, precomputed": (KTO, dict(precompute_ref_log_probs=True)),
    "KTO, precomputed apo": (KTO, dict(precompute_ref_log_probs=True, loss_type="apo_zero_unpaired")),
    "KTO, synchronized": (KTO, dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6)),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(compare, option):
    trainer, options = OPTIONS[option]
    patched = compare(trainer, **options)
    assert {path for _, path in patched.calls} == {"fused"}


def testkl_terms_above_zero(compare):
    """TRL's are not below 0, which would hide errors."""
    patched = compare(KTO, max_steps=2)
    assert min(log["kl"] for log in patched.logs if "kl" in log) > 0.5


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_computed_in_a_step(tmp_path, monkeypatch, trainer):
    """The rows of a prompt come into one micro-batch. The policy is called once for each, and for its KL term."""
    tokens, count = [], counters.count_tokens
    monkeypatch.setattr(counters, "count_tokens", lambda *args: (tokens.append(args[-1]), count(*args)))
    computed = {}
    for max_tokens in (None, 200, 10**6):
        tokens.clear()
        with fastdpo.patched(trainer, max_tokens=max_tokens):
            patched = trained(tmp_path / str(max_tokens), trainer, max_steps=1)
        computed[max_tokens] = sum(tokens)
        if max_tokens == 200:
            assert patched.calls == {("policy", "fused"): 2} | (
                {("policy", "fused"): 4, ("reference", "fused"): 2} if trainer == KTO else {}
            )
            assert trainer == KTO or max(tokens) <= 200
    assert computed[200] <= 1.02 * computed[10**6] < computed[None]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_call_is_packed_once(tmp_path, monkeypatch, trainer):
    """Those with gradients are packed on the host, where their layouts are found again."""
    packs = recorded_packs(monkeypatch)
    with fastdpo.patched(trainer, max_tokens=MAX_TOKENS):
        packs.clear()
        patched = trained(tmp_path, trainer, max_steps=2)
    assert {path for _, path in patched.calls} == {"fused"}
    models = 1 if trainer == SFT else 2  # each of which is examined once
    assert len(packs) == sum(patched.calls.values()) + models


@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_ranks(tmp_path, trainer):
    run_ranks(2, row_budgets.train_rank, tmp_path, trainer)
    ranks = [[Run(**x) for x in torch.load(tmp_path / f"rank{rank}.pt")] for rank in range(2)]
    for stock, patched in ranks:
        assert not stock.calls
        assert_same(stock, patched)
        assert {path for _, path in patched.calls} == {"fused"}
    assert ranks[0][1].calls == ranks[1][1].calls, "all ranks have the same number of micro-batches"
    assert ranks[0][1].calls["policy", "fused"] >= 6


@pytest.mark.parametrize("trainer", TRAINERS)
def test_batches_that_fall_back(compare, trainer):
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    patched = compare(trainer, peft_config=tuning, **(dict(reference=False) if trainer == KTO else {}))
    assert patched.calls["policy", "stock"] > STEPS
    assert not patched.calls["policy", "fused"]


CLASSES = {SFT: SFTTrainer, KTO: KTOTrainer}


def with_padding(trainer_class: type, is_real) -> type:
    """A subclass whose collator leaves tokens out of its masks. `is_real` is called with ids and masks [R, L]."""

    class Masked(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            collate = self.data_collator
            self.data_collator = lambda examples: self.masked(collate(examples))

        def masked(self, batch):
            for name in {"attention_mask", "KL_attention_mask"} & batch.keys():
                ids = batch[name.replace("attention_mask", "input_ids")]
                batch[name] = batch[name] * is_real(ids, batch[name]).long()
            return batch

    return Masked


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
    fastdpo.patch(trainer, max_tokens=MAX_TOKENS)
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


def acting(trainer_class: type, act, substep: int) -> type:
    """A subclass that acts after some of the batches of a step, and trains again after an exception."""

    class Acting(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Acts(self))

        def train(self):
            try:
                return super().train()
            except Interrupted:
                return super().train()

    class Acts(TrainerCallback):
        def __init__(self, trainer):
            self.trainer, self.seen = trainer, 0

        def on_substep_end(self, args, state, control, **kwargs):
            self.seen += 1
            if self.seen == substep:
                act(self.trainer, control)

    return Acting


@pytest.mark.parametrize("action", WITHIN_A_STEP)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_batches_that_wait_for_the_end_of_a_step_are_not_lost(compare, trainer, action):
    patched = compare(trainer, trainer_class=acting(CLASSES[trainer], *WITHIN_A_STEP[action]), evaluate=6)
    assert {path for _, path in patched.calls} == ({"fused"} if "unpatching" not in action else set())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_lost_row_is_noticed(compare, monkeypatch, trainer):
    rows = RowPlanner.rows
    monkeypatch.setattr(RowPlanner, "rows", lambda self, run: [*rows(self, run)[:-1], rows(self, run)[0]])
    with pytest.raises(AssertionError):
        compare(trainer)


def _no_KL_term(monkeypatch):
    monkeypatch.setattr(kto_line, "kl_term", lambda *args: 0.0)


def _one_KL_term_for_all_batches(monkeypatch):
    monkeypatch.setattr(kto_line, "kl_term", lambda *args: 0.8788)


def _weights_of_micro_batches(monkeypatch):
    def weighing(self, trainer, batches, joined, rows):
        return weighed(self, trainer, [{"label": joined["label"]}], joined, rows)

    weighed = kto_line.KTOLine.weighing
    monkeypatch.setattr(kto_line.KTOLine, "weighing", weighing)


@pytest.mark.parametrize("sabotage", [_no_KL_term, _one_KL_term_for_all_batches, _weights_of_micro_batches])
def test_a_wrong_loss_of_kto_is_noticed(compare, monkeypatch, sabotage):
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        compare(KTO)


class OwnLoss(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


class OwnKL(KTOTrainer):
    def _compute_kl_logps(self, model, batch):
        return super()._compute_kl_logps(model, batch)


def without_loss_arguments(model):
    model.accepts_loss_kwargs = False
    return model


class OwnSteps(KTOTrainer):
    def training_step(self, *args, **kwargs):
        return torch.zeros(())


REFUSED = {
    "loss": (SFT, dict(trainer_class=OwnLoss), "OwnLoss, which overrides the loss or the steps of SFTTrainer"),
    "KL term": (KTO, dict(trainer_class=OwnKL), "OwnKL, which overrides the loss or the steps of KTOTrainer"),
    "steps": (KTO, dict(trainer_class=OwnSteps), "OwnSteps, which overrides the loss or the steps of KTOTrainer"),
    "another mean": (SFT, dict(prepare=without_loss_arguments), "models whose loss does not take num_items_in_batch"),
    "rotary embeddings": (
        SFT,
        dict(tiny=dict(rope_parameters=DYNAMIC, max_position_embeddings=16)),
        "batches of up to [0-9]+ tokens, since .*; truncate by max_length",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    trainer, options, message = REFUSED[case]
    fastdpo.patch(trainer, max_tokens=MAX_TOKENS)
    with pytest.raises(NotImplementedError, match=f"^patch: max_tokens does not support {message}"):
        trained(tmp_path, trainer, **options)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_router_loss_is_refused(tmp_path, trainer):
    fastdpo.patch(trainer, max_tokens=MAX_TOKENS)
    model = tiny_model("mixtral", **FUSED["mixtral"][1])
    train = {SFT: sft.train_sft, KTO: kto.train_kto}[trainer]
    with pytest.raises(NotImplementedError, match="does not support the auxiliary loss of routers"):
        train(tmp_path, model, tiny_model("mixtral", **FUSED["mixtral"][1]), router_aux_loss_coef=0.5)


def test_batches_with_other_entries_are_refused():
    batch = dict(input_ids=torch.ones(1, 2), attention_mask=torch.ones(1, 2), pixel_values=torch.ones(1, 3))
    with pytest.raises(NotImplementedError, match="does not support batches with pixel_values"):
        SFTLine(SFT, ("trl.trainer.sft_trainer",)).joined(None, [batch])
