"""TRL's DPOTrainer since version 0.29, which has all losses and options that change it.

Both runs use TRL's code for the loss. The losses differ in their inputs: sums over an answer or a part of it, lengths,
per-token values or token weights, and the order of subtraction. Each option is set alone;
`tests/integrations/trl_dpo/test_pairwise.py` combines them.
"""

import inspect
import re

import torch
from accelerate import dispatch_model
from datasets import Dataset
from peft import PrefixTuningConfig, PromptTuningConfig
from trl import DPOTrainer
from trl.experimental.bema_for_ref_model import BEMACallback
from trl.experimental.bema_for_ref_model import DPOTrainer as BEMATrainer
from trl.trainer import dpo_trainer

from fastdpo.models.parts import language_model
from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.models import multimodal
from tests.support.models.altered_heads import ALTERED, forward_of_the_model
from tests.support.models.families import FAILS_IN_STOCK, FUSED, STOCK, kind
from tests.support.models.multimodal import tiny_multimodal
from tests.support.trl.dpo import DPO, WORDS, adapter, long_pairs, mean_logit, pairs, train_both, trained_adapter

FULL, TWO_STEPS = dict(policy=3, reference=3), dict(policy=2, reference=2)

FUSES_A_HEAD = hasattr(dpo_trainer, "add_fused_lm_head")
SEAM = "add_fused_lm_head" if FUSES_A_HEAD else "selective_log_softmax"
"""What `patch` replaces of its module, in TRL since 1.15 and before."""

LOSSES = {
    "sigmoid": dict(),  # one difference of sums
    "hinge": dict(),  # a kink: flat for some pairs
    "ipo": dict(),  # divides by the lengths of completion masks
    "exo_pair": dict(label_smoothing=1e-3),  # TRL requires label smoothing
    "nca_pair": dict(),  # each answer on its own
    "robust": dict(label_smoothing=0.1),  # divides by 1 - 2 * smoothing
    "bco_pair": dict(),  # each answer on its own
    "sppo_hard": dict(),  # squares of some 50 nats
    "aot": dict(label_smoothing=0.1),  # sorts the pairs of a batch, and smooths
    "aot_unpaired": dict(),  # sorts chosen and rejected separately
    "apo_zero": dict(),  # saturates
    "apo_down": dict(),  # saturates in the other directions
    "discopop": dict(),  # exponentials at the default temperature
    "sft": dict(),  # per-token values of chosen answers alone
    "sigmoid_norm": dict(),  # divides by lengths
}

OF_TRL = re.findall(r'loss_type == "(\w+)"', inspect.getsource(DPOTrainer._compute_loss))

MODIFIERS = {
    "two_losses": dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),  # sums and per-token values
    "three_losses": dict(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),  # TRL's MPO
    "losses_without_weights": dict(loss_type=["hinge", "ipo"]),
    "forward_kl": dict(f_divergence_type="forward_kl"),
    "js_divergence": dict(f_divergence_type="js_divergence"),
    "alpha_divergence": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7),
    "alpha_divergence_limit": dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0),
    "wpo": dict(use_weighting=True),  # reads log_sum_sq_probs
    "wpo_of_losses": dict(use_weighting=True, loss_type=["ipo", "sigmoid"], loss_weights=[0.5, 1.0]),
    "ld": dict(ld_alpha=0.5),  # splits each answer where the shorter one of its pair ends
    "ld_masks": dict(ld_alpha=0.0),  # ignores tokens beyond the shared length
    "wpo_ld": dict(use_weighting=True, ld_alpha=0.5),
    "discopop_tau": dict(loss_type=["discopop"], discopop_tau=0.5),
    "beta": dict(beta=0.5),
}


class Averaged(BEMATrainer):
    """Its reference follows an average of the policy in each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(BEMACallback(update_freq=1, update_ref_model=True, ref_model_update_freq=1))


class Elsewhere(DPOTrainer):
    """Computes losses at other weights than those of the model, as sharpness-aware and meta-learning methods do."""

    def _compute_loss(self, model, *args, **kwargs):
        weights = {name: 1.01 * p for name, p in model.named_parameters()}
        return super()._compute_loss(
            lambda *given, **named: torch.func.functional_call(model, weights, given, named), *args, **kwargs
        )


class OwnLoss(DPOTrainer):
    """Computes its loss from logits of its own."""

    def _compute_loss(self, model, inputs, return_outputs):
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss


def checkpointed(reentrant: bool) -> dict:
    return dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def dispatched(model):
    """As with `device_map`: accelerate wraps the forward of all modules and the head."""
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    return dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True)


ACCURATE = [dict(prompt=f"w{i} w2 ", chosen="w7 w7 w7", rejected=f"w{i} w8 w9 w8") for i in range(16)]
SYNCHRONIZED = dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6, max_steps=4)
# option: (changed arguments, number of calls of each kind)
ROUTED = dict(kind="mixtral", tiny=FUSED["mixtral"][1], max_steps=2)
OPTIONS = {
    **{loss: (dict(loss_type=[loss], max_steps=2, **LOSSES[loss]), TWO_STEPS) for loss in LOSSES if loss in OF_TRL},
    **{name: (dict(max_steps=2, **modified), TWO_STEPS) for name, modified in MODIFIERS.items()},
    # truncation
    "keep_start": (dict(max_length=12, data=long_pairs()), FULL),  # cuts answers; drops long prompts
    "keep_end": (dict(max_length=12, truncation_mode="keep_end", data=long_pairs()), FULL),  # cuts entire prompts
    "untruncated": (dict(max_length=None, data=long_pairs()), FULL),
    # padding
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),  # every batch is padded beyond its longest row
    "pad_token_is_eos": (dict(pad_token="<eos>"), FULL),  # padding looks like the end of an answer
    # reference
    # The pass has one batch of 16 pairs and one for the evaluation; training runs no reference.
    "precompute": (dict(precompute_ref_log_probs=True, evaluate=4), dict(policy=3, eval=1, reference=1 + 1)),
    "precompute_ld": (dict(precompute_ref_log_probs=True, ld_alpha=0.5), dict(policy=3, reference=1)),
    "precompute_batch": (  # 16 pairs in batches of 6, unlike in training
        dict(precompute_ref_log_probs=True, precompute_ref_batch_size=6, evaluate=4),
        dict(policy=3, eval=1, reference=3 + 1),
    ),
    "precompute_adapter": (dict(precompute_ref_log_probs=True, **adapter()), dict(policy=3, reference=1)),
    "averaged reference": (dict(trainer_class=Averaged, learning_rate=0.1), FULL),
    "reference follows": (SYNCHRONIZED, dict(policy=4, reference=4)),
    # evaluation
    "evaluation": (dict(evaluate=6), dict(policy=3, reference=3 + 2, eval=2)),  # the last batch has 2 of 4 pairs
    "evaluation_alone": (dict(evaluate=6, only_evaluate=True), dict(reference=2, eval=2)),
    "evaluation_first": (dict(evaluate=4, eval_on_start=True), dict(policy=3, reference=3 + 2, eval=2)),
    # batches
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4, reference=4)),
    **{
        f"logged after {n} steps": (
            dict(
                logging_steps=n,
                gradient_accumulation_steps=2,
                max_steps=5,
                evaluate=7,
                eval_strategy="epoch",
                max_tokens=None,
            ),
            dict(policy=10, reference=10 + 8, eval=8),  # evaluated in each epoch, and at the end
        )
        for n in (2, 5)
    },
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),  # one pair: rows 0 and 1 share the prompt
    "last_batch_is_partial": (dict(per_device_train_batch_size=6, max_steps=3), FULL),  # 6, 6, 4 pairs
    "streaming": (dict(data=Dataset.from_list(pairs(16)).to_iterable_dataset()), FULL),
    "accurate tokens": (dict(data=ACCURATE, loss_type=["sft"], learning_rate=0.2), FULL),
    "worker_processes": (dict(dataloader_num_workers=1, max_steps=2), dict(policy=2, reference=2)),  # shared memory
    # adapters
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=3, reference=3 + 1, eval=1)),
    "dora": (adapter(use_dora=True), FULL),
    "adapter_on_everything": (adapter(target_modules="all-linear"), FULL),  # except the head, which PEFT excludes
    "adapter_on_embeddings": (adapter(target_modules=["embed_tokens", "q_proj"]), FULL),
    "trained_embeddings": (adapter(modules_to_save=["embed_tokens"]), FULL),
    "disabled_dropout": (adapter(lora_dropout=0.3), FULL),  # TRL's default; prompts are then shared
    "trained_adapter": (
        dict(prepare=trained_adapter, reference=False, evaluate=4),
        dict(policy=3, reference=3 + 1, eval=1),
    ),
    # routers
    "router loss": (dict(**ROUTED, router_aux_loss_coef=0.5), TWO_STEPS),
    "router loss in the configuration": (  # the reference model computes it, too
        dict(kind="mixtral", tiny=FUSED["mixtral"][1] | dict(output_router_logits=True), max_steps=2),
        TWO_STEPS,
    ),
    "no router loss": (dict(**ROUTED, router_aux_loss_coef=0.0), TWO_STEPS),  # router logits are not stored
    # memory
    "checkpointing": (checkpointed(reentrant=False), FULL),
    "checkpointing_reentrant": (checkpointed(reentrant=True), FULL),
    "checkpointing_adapter": (dict(**checkpointed(reentrant=False), **adapter()), FULL),
    "checkpointing_reentrant_adapter": (dict(**checkpointed(reentrant=True), **adapter()), FULL),
    # TrainingArguments that DPOTrainer does not read: TRL computes its own loss
    "label_smoothing_factor": (dict(label_smoothing_factor=0.1), FULL),
    "average_tokens": (dict(average_tokens_across_devices=False), FULL),
    "unused_columns": (dict(remove_unused_columns=False), FULL),
    "use_cache": (dict(use_cache=True), FULL),
    # others
    "padding_free": (dict(padding_free=True), FULL),
    "torch_compile": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=2), TWO_STEPS),
    "dispatched": (dict(prepare=dispatched), FULL),
}
if FUSES_A_HEAD:
    OPTIONS |= {
        "metrics of logits": (dict(evaluate=4, compute_metrics=mean_logit), dict(policy=3, reference=3 + 1, eval=1)),
        "weights elsewhere": (dict(trainer_class=Elsewhere), FULL),
        "weights elsewhere, adapter": (dict(trainer_class=Elsewhere, **adapter()), FULL),
        "forward of a user": (dict(prepare=forward_of_the_model), FULL),  # which TRL replaces
    }


def fallbacks(**reference: int) -> dict[tuple[str, str], int]:
    """The calls of three steps whose policy falls back, with those of the reference by path."""
    return {("policy", "stock"): 3} | {("reference", path): n for path, n in reference.items()}


BEGINS_WITH_W2 = [dict(prompt="w1 w2 ", chosen=f"w{i} w7", rejected=f"w{i + 1} w8 w9") for i in range(10, 26)]
NOISE = dict(neftune_noise_alpha=5.0, evaluate=4)
FALLBACKS = {
    **with_dropout(fallbacks(stock=3)),
    "dropout of gpt2": (  # TRL keeps the reference in training mode
        dict(kind="gpt2", tiny=FUSED["gpt2"][1], disable_dropout=False),
        fallbacks(stock=3),
        "attention dropout is active",
    ),
    "prompt tuning": (  # passes embeddings of its prompt
        dict(reference=False, peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        fallbacks(fused=3),
        "without input_ids",
    ),
    "prefix tuning": (  # prepends keys and values to those of the batch
        dict(reference=False, peft_config=PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        fallbacks(fused=3),
        "past_key_values",
    ),
    "an adapter that begins within rows": (
        dict(data=BEGINS_WITH_W2, **adapter(task_type="CAUSAL_LM", alora_invocation_tokens=[WORDS.index("w2")])),
        fallbacks(fused=3),
        "the adapter default is an activated LoRA, which begins at a token",
    ),
    "a head that PEFT trains": (adapter(modules_to_save=["lm_head"]), fallbacks(stock=3), "ModulesToSaveWrapper"),
    **{x.__name__: (dict(prepare=x), fallbacks(stock=3), ALTERED[x]) for x in ALTERED if x is not forward_of_the_model},
    # drawn for the padded batch and scaled by its width
    "noise on embeddings": (NOISE, fallbacks(fused=4) | {("eval", "fused"): 1}, "NEFTune"),
    "noise on embeddings of the reference, too": (
        dict(**NOISE, **adapter()),
        fallbacks(stock=3, fused=1) | {("eval", "fused"): 1},
        "NEFTune",
    ),
}


def with_another_config(model):
    text = language_model(model)
    text.config = type(text.config)(**text.config.to_dict())
    return model


ON_TEXT = {  # models with towers for images, on pairs of text
    name: dict(kind=name, build=tiny_multimodal)
    for name in (*multimodal.FUSED, *multimodal.STOCK)
    if name not in multimodal.FAILS_IN_STOCK
}
ROUTER_LOSSES = ("qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "jamba", "qwen3_vl_moe")
FAMILIES = {name: dict(kind=kind(name), tiny=FUSED[name][1]) for name in FUSED}
FAMILIES |= {name: ON_TEXT[name] for name in multimodal.FUSED}
for name in ROUTER_LOSSES:
    FAMILIES[name] = FAMILIES[name] | dict(router_aux_loss_coef=0.5)
FAMILIES["glm4v_moe"] |= dict(router_aux_loss_coef=0.0)  # which TRL does not compute for `n_routed_experts`
UNSUPPORTED = {
    **{name: (reason, dict(kind=kind(name), tiny=tiny)) for name, (reason, tiny) in STOCK.items()},
    **{name: (x.features, ON_TEXT[name]) for name, x in multimodal.STOCK.items() if name in ON_TEXT},
    "no language model": (
        "LlavaForConditionalGeneration has no language model with its text configuration",
        ON_TEXT["llava"] | dict(prepare=with_another_config),
    ),
}
UNNOTICED = {  # where rounding is largest, and positions have three dimensions
    **{name: (faults.without_a_result, dict(loss_type=[name])) for name in ("ipo", "sppo_hard")},
    "gemma4_text": (faults.without_a_result, FAMILIES["gemma4_text"]),
    "qwen3_vl": (faults.late_positions, FAMILIES["qwen3_vl"]),
}


HARNESSES = [
    Harness(
        **DPO.for_harness(),
        both=train_both,
        seams=(f"trl.trainer.dpo_trainer.{SEAM}",),
        options=OPTIONS,
        families=FAMILIES,
        fallbacks=FALLBACKS
        | {
            name: (dict(max_steps=2, **options), {("policy", "stock"): 2, ("reference", "stock"): 2}, reason)
            for name, (reason, options) in UNSUPPORTED.items()
            if name not in FAILS_IN_STOCK
        },
        bypassing=bypassed(OwnLoss, "_compute_loss"),
        strict=(dict(neftune_noise_alpha=5.0), "NEFTune"),
        sabotages=sabotaged_by(
            faults.late_positions, faults.no_prefix, faults.leak, faults.wrong_target, faults.wrong_scale
        )
        | UNNOTICED,
        ranks=(dict(evaluate=4), dict(policy=3, reference=3 + 1, eval=1)),
    )
]
