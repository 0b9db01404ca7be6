"""DPOTrainer of TRL < 0.29. Its logs round losses to four digits; gradients are compared to seven digits."""

from tests.contract.harness import Harness
from tests.support import faults
from tests.support.models.altered_heads import ALTERED
from tests.support.models.families import HYBRID
from tests.support.trl.dpo import DPO, adapter, assert_same, long_pairs, train_both

LOSSES = (
    *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_pair", "apo_zero", "apo_down"),
    *("discopop", "sft"),
)
ROUTED = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1)
FULL = dict(policy=3, reference=3)
LONG = long_pairs(((1, 9, 8), (11, 1, 3), (5, 3, 2), (14, 7, 6), (30, 4, 9), (2, 7, 1), (10, 8, 9), (8, 4, 3)))
CHECKPOINTED = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


# option: (changed arguments, number of calls of each kind)
OPTIONS = {
    **{loss: (dict(loss_type=loss, max_steps=2), dict(policy=2, reference=2)) for loss in LOSSES},
    "router loss": (dict(kind="mixtral", tiny=ROUTED), FULL),
    "two_losses": (dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]), FULL),
    "exo_pair": (dict(loss_type="exo_pair", label_smoothing=1e-3), FULL),
    "robust": (dict(loss_type="robust", label_smoothing=0.1), FULL),
    "label_smoothing": (dict(label_smoothing=0.2), FULL),
    "rpo": (dict(rpo_alpha=0.7), FULL),
    "rpo_ipo": (dict(rpo_alpha=0.7, loss_type="ipo"), FULL),
    "ld": (dict(ld_alpha=0.5), FULL),
    "wpo": (dict(use_weighting=True), FULL),
    "wpo_ld_rpo": (dict(use_weighting=True, ld_alpha=0.5, rpo_alpha=0.3), FULL),
    "js_divergence": (dict(f_divergence_type="js_divergence"), FULL),
    "alpha_divergence": (dict(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7), FULL),
    "reference_free": (dict(reference_free=True), FULL),
    "logits_to_keep": (dict(use_logits_to_keep=True), FULL),
    "logits_to_keep_ld": (dict(use_logits_to_keep=True, ld_alpha=0.5, use_weighting=True), FULL),
    "keep_start": (dict(max_length=12, truncation_mode="keep_start", data=LONG), FULL),
    "keep_end": (dict(max_length=12, truncation_mode="keep_end", data=LONG), FULL),
    "max_prompt_length": (dict(max_prompt_length=6, max_completion_length=4, data=LONG), FULL),
    "precompute": (dict(precompute_ref_log_probs=True, evaluate=4), dict(policy=3, eval=1, reference=4 + 1)),
    "precompute_batch": (
        dict(precompute_ref_log_probs=True, precompute_ref_batch_size=6, evaluate=4),
        dict(policy=3, eval=1, reference=3 + 1),
    ),
    "precompute_adapter": (dict(precompute_ref_log_probs=True, **adapter()), dict(policy=3, reference=4)),
    "evaluation": (dict(evaluate=6), dict(policy=3, reference=3 + 2, eval=2)),
    "evaluation_alone": (dict(evaluate=6, only_evaluate=True), dict(reference=2, eval=2)),
    "evaluation_with_metrics": (
        dict(evaluate=6, compute_metrics=lambda prediction: {"mean": float(prediction.predictions.mean())}),
        dict(policy=3, reference=3 + 2, eval=2),
    ),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4, reference=4)),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=3, reference=3 + 1, eval=1)),
    "adapter_everywhere": (adapter(target_modules="all-linear"), FULL),
    "checkpointing": (CHECKPOINTED, FULL),
    "checkpointing_reentrant": (
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
        FULL,
    ),
    "checkpointed_adapter": (dict(**CHECKPOINTED, **adapter()), FULL),
    "sync_ref_model": (dict(sync_ref_model=True, ref_model_sync_steps=1), FULL),
    "tied": (dict(tiny=dict(tie_word_embeddings=True)), FULL),
    "eager": (dict(tiny=dict(attn_implementation="eager")), FULL),
}
BLOOM = dict(without=("head_dim", "num_key_value_heads", "intermediate_size", "max_position_embeddings"), n_layer=2)
STOCK_CALLS = {("policy", "stock"): 3, ("reference", "stock"): 3}
CUT = dict(max_length=12, truncation_mode="keep_end")
NO_PROMPT = "truncation has left nothing of a prompt"


def cut_away(*lengths: int) -> list[dict[str, str]]:
    return [dict(prompt="w1 w2 ", chosen="w3 " * 20, rejected="w4 " * n) for n in lengths]


HARNESSES = [
    Harness(
        **DPO.for_harness(),
        both=train_both,
        assert_same_bits=assert_same,
        options=OPTIONS,
        families={
            **{
                kind: dict(kind=kind, tiny=dict(without=("head_dim",) if kind in ("qwen2", "phi3") else ()))
                for kind in ("qwen2", "qwen3", "mistral", "gemma", "phi3", "cohere", "olmo2")
            },
            # the mixers of transformers 4 choose their functions when they are created, and run on whole rows
            **{
                kind: dict(kind=kind, tiny=HYBRID[kind][1])
                for kind in ("qwen3_next", "falcon_h1", "bamba", "mamba2", "lfm2")
            },
        },
        fallbacks={
            "an unsupported model": (
                dict(kind="bloom", tiny=BLOOM, evaluate=4),
                {("policy", "stock"): 3, ("reference", "stock"): 4, ("eval", "stock"): 1},
                "",
            ),
            "a prompt that is truncated entirely": (
                dict(**CUT, data=cut_away(3, 25, 7, 9), max_steps=1),
                {("policy", "stock"): 1, ("reference", "stock"): 1},
                NO_PROMPT,
            ),
            **{alter.__name__: (dict(prepare=alter), STOCK_CALLS, reason) for alter, reason in ALTERED.items()},
        },
        strict=(dict(**CUT, data=cut_away(9) * 4), NO_PROMPT),
        sabotages={
            f"a missing token, {loss}": (faults.without_a_result, dict(loss_type=loss)) for loss in ("sigmoid", "ipo")
        },
        verified={"as it is": ({}, 2)},
    )
]
