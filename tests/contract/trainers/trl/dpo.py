"""TRL's DPOTrainer since version 0.29, which has all losses and options that change it.

Both runs use TRL's code for the loss. The losses differ in their inputs: sums over an answer or a part of it, lengths,
per-token values or token weights, and the order of subtraction. Each option is set alone;
`tests/integrations/trl_dpo/test_pairwise.py` combines them.
"""

import inspect
import re

from accelerate import dispatch_model
from peft import PrefixTuningConfig, PromptTuningConfig
from trl import DPOTrainer
from trl.experimental.bema_for_ref_model import BEMACallback
from trl.experimental.bema_for_ref_model import DPOTrainer as BEMATrainer
from trl.trainer import dpo_trainer

from tests.contract.harness import Harness, sabotaged_by
from tests.support import faults
from tests.support.models.families import FAILS_IN_STOCK, FUSED, STOCK, kind
from tests.support.trl.dpo import DPO, WORDS, adapter, long_pairs, train_both, trained_adapter

FULL, TWO_STEPS = dict(policy=3, reference=3), dict(policy=2, reference=2)

SEAM = "add_fused_lm_head" if hasattr(dpo_trainer, "add_fused_lm_head") else "selective_log_softmax"
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


def checkpointed(reentrant: bool) -> dict:
    return dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def dispatched(model):
    """As with `device_map`: accelerate wraps the forward of all modules and the head."""
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    return dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True)


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
    "precompute_adapter": (
        dict(precompute_ref_log_probs=True, **adapter()),
        dict(policy=3, reference=1),
    ),
    "averaged reference": (dict(trainer_class=Averaged, learning_rate=0.1), FULL),
    # evaluation
    "evaluation": (dict(evaluate=6), dict(policy=3, reference=3 + 2, eval=2)),  # the last batch has 2 of 4 pairs
    "evaluation_alone": (dict(evaluate=6, only_evaluate=True), dict(reference=2, eval=2)),
    "evaluation_first": (dict(evaluate=4, eval_on_start=True), dict(policy=3, reference=3 + 2, eval=2)),
    # batches
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4, reference=4)),
    **{
        f"logged after {n} steps": (
            dict(logging_steps=n, gradient_accumulation_steps=2, max_steps=5, evaluate=7, eval_strategy="epoch"),
            dict(policy=10, reference=10 + 8, eval=8),  # evaluated in each epoch, and at the end
        )
        for n in (2, 5)
    },
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),  # one pair: rows 0 and 1 share the prompt
    "last_batch_is_partial": (dict(per_device_train_batch_size=6, max_steps=3), FULL),  # 6, 6, 4 pairs
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


def fallbacks(**reference: int) -> dict[tuple[str, str], int]:
    """The calls of three steps whose policy falls back, with those of the reference by path."""
    return {("policy", "stock"): 3} | {("reference", path): n for path, n in reference.items()}


BEGINS_WITH_W2 = [dict(prompt="w1 w2 ", chosen=f"w{i} w7", rejected=f"w{i + 1} w8 w9") for i in range(10, 26)]
NOISE = dict(neftune_noise_alpha=5.0, evaluate=4)
FALLBACKS = {
    "attention dropout": (dict(tiny=dict(attention_dropout=0.1)), fallbacks(stock=3), "attention dropout is active"),
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
    # drawn for the padded batch and scaled by its width
    "noise on embeddings": (NOISE, fallbacks(fused=4) | {("eval", "fused"): 1}, "NEFTune"),
    "noise on embeddings of the reference, too": (
        dict(**NOISE, **adapter()),
        fallbacks(stock=3, fused=1) | {("eval", "fused"): 1},
        "NEFTune",
    ),
}


HARNESSES = [
    Harness(
        **DPO.for_harness(),
        both=train_both,
        seams=(f"trl.trainer.dpo_trainer.{SEAM}",),
        options=OPTIONS,
        families={name: dict(kind=kind(name), tiny=FUSED[name][1]) for name in FUSED},
        fallbacks=FALLBACKS
        | {
            name: (
                dict(kind=kind(name), tiny=tiny, max_steps=2),
                {("policy", "stock"): 2, ("reference", "stock"): 2},
                reason,
            )
            for name, (reason, tiny) in STOCK.items()
            if name not in FAILS_IN_STOCK
        },
        sabotages=sabotaged_by(
            faults.late_positions, faults.no_prefix, faults.leak, faults.wrong_target, faults.wrong_scale
        ),
        ranks=(dict(evaluate=4), dict(policy=3, reference=3 + 1, eval=1)),
    )
]
