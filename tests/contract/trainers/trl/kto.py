"""TRL's KTOTrainer."""

from peft import PromptTuningConfig
from trl import KTOTrainer
from trl.experimental.kto import KTOTrainer as Experimental

from fastdpo.integrations.scored_rows import merged
from fastdpo.integrations.trl import kto
from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.models.families import FUSED, kind
from tests.support.trl.dpo import adapter, mean_logit, trained_adapter
from tests.support.trl.kto import KTO, rows, train_both_kto
from tests.support.workers.budgets import shuffled

FULL = dict(policy=2 * 3, reference=3)
"""Calls of three steps: the policy for completions and for the KL term, the reference for both at once."""


def long_rows() -> list[dict]:
    """Rows shorter and longer than 12 tokens."""
    return [
        {**row, "completion": " ".join([row["completion"]] * (1 + i % 3)), "prompt": row["prompt"] * (1 + i % 2)}
        for i, row in enumerate(rows(20, seed=3))
    ]


class ScaledKL(KTOTrainer):
    """Scales the log-probabilities of the KL term, for policy and reference, in calls of their own."""

    def _compute_kl_logps(self, model, batch):
        logps = super()._compute_kl_logps(model, batch)
        return None if logps is None else 2 * logps


# option: (changed arguments, number of calls of each kind)
OPTIONS = {
    "KL terms above zero": (dict(), FULL),
    # losses
    "apo_zero_unpaired": (dict(loss_type="apo_zero_unpaired", evaluate=4), dict(policy=3, reference=3 + 1, eval=1)),
    "weights": (dict(beta=0.5, desirable_weight=1.3, undesirable_weight=0.7), FULL),
    # truncation and padding
    "truncated": (dict(max_length=12, data=long_rows()), FULL),
    "untruncated": (dict(max_length=None, data=long_rows()), FULL),
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),
    # reference
    "sync_ref_model": (dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6), FULL),
    "precompute": (dict(precompute_ref_log_probs=True, evaluate=4), dict(policy=6, reference=4 + 1, eval=2)),
    "precompute_batch": (dict(precompute_ref_log_probs=True, precompute_ref_batch_size=6), dict(policy=6, reference=3)),
    "precompute_apo": (dict(precompute_ref_log_probs=True, loss_type="apo_zero_unpaired"), dict(policy=3, reference=4)),
    "precompute_adapter": (dict(precompute_ref_log_probs=True, **adapter()), dict(policy=6, reference=4)),
    # evaluation
    "evaluation": (dict(evaluate=6), dict(policy=6, reference=3 + 2, eval=4)),  # the last batch has 2 of 4 rows
    "evaluation_alone": (dict(evaluate=6, only_evaluate=True), dict(reference=2, eval=4)),
    "metrics of logits": (dict(evaluate=4, compute_metrics=mean_logit), dict(policy=6, reference=3 + 1, eval=2)),
    # batches
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=8, reference=4)),
    "batch_of_two": (dict(per_device_train_batch_size=2), FULL),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),  # 6, 6, 4 rows
    # adapters
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=6, reference=3 + 1, eval=2)),
    "dora": (adapter(use_dora=True), FULL),
    "trained_adapter": (  # TRL copies it
        dict(prepare=trained_adapter, reference=False, learning_rate=0.1, evaluate=4),
        dict(policy=6, reference=3 + 1, eval=2),
    ),
    "router loss": (dict(kind="mixtral", tiny=FUSED["mixtral"][1], router_aux_loss_coef=0.5), FULL),
    # memory
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "checkpointing_adapter": (dict(gradient_checkpointing=True, **adapter()), FULL),
    "scaled KL term": (dict(trainer_class=ScaledKL), dict(policy=6, reference=6)),
    "experimental name": (dict(trainer_class=Experimental), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=2, reference=1)),
}


def loaded(model):
    """As from_pretrained returns it; TRL sets the policy to training mode."""
    return model.eval()


TUNING = dict(reference=False, peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
DROPOUT = dict(tiny=dict(attention_dropout=0.1), disable_dropout=False)
REFERENCE_FUSED = {("policy", "stock"): 6, ("reference", "fused"): 3}
ALL_STOCK = {("policy", "stock"): 6, ("reference", "stock"): 6}
"""The reference keeps its two calls."""


def with_alibi(model):
    model.config.alibi = True
    return model


class OwnLoss(KTOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss


def _reference_of_other_rows(monkeypatch):
    monkeypatch.setattr(kto, "merged", lambda completions, of_KL: merged(of_KL, completions))


HARNESSES = [
    Harness(
        **KTO.for_harness() | dict(calls=dict(policy=2, reference=1)),
        both=train_both_kto,
        options=OPTIONS,
        families={
            name: dict(kind=kind(name), tiny=FUSED[name][1], prepare=loaded)
            for name in ("gemma2", "gpt2", "mistral", "mixtral", "phi")
        },
        fallbacks={
            **with_dropout(REFERENCE_FUSED, disable_dropout=False, prepare=loaded),
            "prompt tuning": (TUNING, REFERENCE_FUSED, "the model was called without input_ids"),
            "a reference with dropout": (dict(**DROPOUT, **adapter()), ALL_STOCK, "attention dropout is active"),
            "an unsupported model": (dict(prepare=with_alibi), ALL_STOCK, "ALiBi"),
        },
        bypassing=bypassed(OwnLoss, "_compute_loss"),
        strict=(dict(peft_config=TUNING["peft_config"]), "without input_ids"),
        sabotages=sabotaged_by(faults.labels_a_token_late, faults.no_prefix, _reference_of_other_rows),
        verified={"as it is": (dict(max_steps=2), 3)},
        # one rank has batches of desirable rows only
        ranks=(dict(evaluate=4, data=shuffled(rows, 16)), dict(policy=6, reference=3 + 1, eval=2)),
    )
]
