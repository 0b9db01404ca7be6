"""TRL's TPOTrainer: three rows of a prompt, of which the last one is learned as in SFT."""

import functools

from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.models.families import FUSED
from tests.support.trl.dpo import adapter, mean_logit, train_both, trained_adapter
from tests.support.trl.tpo import TPO, triples

FULL = dict(policy=3)
ADAPTER = {name: x for name, x in adapter().items() if name != "reference"}
LONG = [{**row, "chosen": " ".join([row["chosen"]] * 3), "prompt": row["prompt"] * 2} for row in triples(16)]
OPTIONS = {
    "as it is": (dict(), FULL),
    "without references": (dict(tpo_alpha=0.0), FULL),  # batches of two rows
    "alpha": (dict(tpo_alpha=0.3), FULL),
    **{name: (dict(loss_type=name), FULL) for name in ("hinge", "ipo", "tpo-l")},
    "label_smoothing": (dict(label_smoothing=0.1), FULL),
    "label_smoothing of tpo-l": (dict(loss_type="tpo-l", label_smoothing=0.1, tpo_l_gamma=0.2), FULL),
    "beta": (dict(beta=0.5), FULL),
    # truncation and padding
    "keep_start": (dict(max_length=24, data=LONG), FULL),
    "keep_end": (dict(max_length=24, truncation_mode="keep_end", data=LONG), FULL),
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),
    # batches
    "evaluation": (dict(evaluate=6), dict(policy=3, eval=2)),
    "evaluation alone": (dict(evaluate=6, only_evaluate=True), dict(eval=2)),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4)),
    "batch of one": (dict(per_device_train_batch_size=1), FULL),
    "worker processes": (dict(dataloader_num_workers=1), FULL),
    # memory and adapters
    "adapter": (dict(evaluate=4, **ADAPTER), dict(policy=3, eval=1)),
    "loaded adapter": (dict(prepare=trained_adapter), FULL),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1)),
    # between the head and the logits
    "softcap": (dict(kind="gemma2", tiny=FUSED["gemma2"][1]), FULL),
    "scaled logits": (dict(kind="granite", tiny=dict(logits_scaling=4.0)), FULL),
}


class OwnLoss(TPO.trainer_class):
    """Computes its loss without TRL's."""

    def _compute_loss(self, model, inputs, return_outputs):
        return model(inputs["input_ids"], labels=inputs["input_ids"]).loss


HARNESSES = [
    Harness(
        **TPO.for_harness(),
        both=functools.partial(train_both, reference=False, trainer="trl.TPOTrainer", train=TPO.train),
        seams=("trl.experimental.tpo.tpo_trainer.selective_log_softmax_and_entropy",),
        options=OPTIONS,
        families={name: dict(kind=name, tiny=FUSED[name][1]) for name in ("gpt2", "mixtral")},
        fallbacks={
            "logits that a caller wants": (
                dict(evaluate=6, compute_metrics=mean_logit),
                {("policy", "fused"): 3, ("eval", "stock"): 2},
                "the caller of compute_loss wants the model's output",
            ),
            **with_dropout({("policy", "stock"): 3}, disable_dropout=False),
        },
        bypassing=bypassed(OwnLoss, "_compute_loss"),
        strict=(dict(evaluate=6, compute_metrics=mean_logit), "wants the model's output"),
        sabotages=sabotaged_by(faults.labels_a_token_late, faults.no_prefix, faults.late_positions, faults.wrong_scale),
        verified={"as it is": (dict(max_steps=2), 1)},
        ranks=(dict(evaluate=4), dict(policy=3, eval=1)),
    )
]
