"""TRL's SFTTrainer."""

import torch
from trl import SFTTrainer

from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.models.families import FUSED, kind
from tests.support.trl.dpo import adapter, mean_logit
from tests.support.trl.sft import SFT, rows, train_both_sft

FULL = dict(policy=3)
ADAPTER = {name: x for name, x in adapter().items() if name != "reference"}
WITHOUT_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def texts(n: int, seed: int = 0) -> list[dict[str, str]]:
    return [{"text": row["prompt"] + row["completion"]} for row in rows(n, seed)]


def accurate(n: int, seed: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"w{i} w2 ", "completion": "w7 w7 w7"} for i in range(n)]


class Scaled(SFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


class Shortened(SFTTrainer):
    """Changes labels that come from the collator, by a write that raises no version."""

    def training_step(self, model, inputs, *args, **kwargs):
        inputs["labels"].data[:, -3:] = -100
        return super().training_step(model, inputs, *args, **kwargs)


# option: (changed arguments, number of calls of each kind)
OPTIONS = {
    "completions": (dict(), FULL),
    "everything": (dict(completion_only_loss=False), FULL),
    "texts": (dict(data=texts), FULL),
    "accurate tokens": (dict(data=accurate, learning_rate=0.2), FULL),
    "dft": (dict(loss_type="dft"), FULL),
    "evaluation": (dict(evaluate=6), dict(policy=3, eval=2)),
    "metrics of logits": (dict(evaluate=4, compute_metrics=mean_logit), dict(policy=3, eval=1)),
    "router loss": (dict(kind="mixtral", tiny=FUSED["mixtral"][1], router_aux_loss_coef=0.5), FULL),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4)),
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),
    "truncated": (dict(max_length=8), FULL),  # some rows keep no completion
    "keep_end": (dict(max_length=8, truncation_mode="keep_end"), FULL),
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),
    "tokens_of_a_rank": (dict(average_tokens_across_devices=False), FULL),
    "dft_ignores_label_smoothing": (dict(loss_type="dft", label_smoothing_factor=0.1), FULL),
    "adapter": (dict(evaluate=4, **ADAPTER), dict(policy=3, eval=1)),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "checkpointing_adapter": (dict(gradient_checkpointing=True, **ADAPTER), FULL),
    "scaled loss": (dict(trainer_class=Scaled), FULL),
    "labels written to unseen": (dict(trainer_class=Shortened), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1)),
}


def loss_of_logits(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


DISABLED = {
    "packing": (dict(packing=True, max_length=32), "TRL packs its batches itself (packing=True)"),
    "wrapped": (
        dict(packing=True, packing_strategy="wrapped", max_length=32),
        "TRL packs its batches itself (packing=True)",
    ),
    "padding_free": (dict(padding_free=True, max_length=None), "TRL packs its batches itself (padding_free=True)"),
    "label_smoothing": (dict(label_smoothing_factor=0.1), "label smoothing needs the logits"),
    "compute_loss_func": (dict(compute_loss_func=loss_of_logits), "compute_loss_func needs the logits"),
}


class Own(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


HARNESSES = [
    Harness(
        **SFT.for_harness(),
        both=train_both_sft,
        options=OPTIONS,
        families={
            name: dict(kind=kind(name), tiny=FUSED[name][1] | (WITHOUT_DROPOUT if name == "gpt2" else {}))
            for name in ("gemma2", "gpt2", "mixtral")
        },
        fallbacks=with_dropout({("policy", "stock"): 3}),
        bypassing={
            **{name: (dict(max_steps=2, **options), reason) for name, (options, reason) in DISABLED.items()},
            **bypassed(Own, "compute_loss"),
        },
        strict=(dict(padding_free=True, max_length=None), "TRL packs its batches itself"),
        sabotages=sabotaged_by(faults.labels_a_token_late, faults.late_positions),
        verified={"as it is": (dict(max_steps=2), 1)},
        ranks=(dict(evaluate=4), dict(policy=3, eval=1)),
    )
]
