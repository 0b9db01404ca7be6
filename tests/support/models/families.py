"""Tiny random models of many families, each with its special features enabled."""

from __future__ import annotations

import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.trl.dpo import tiny_model

WINDOW = 6  # shorter than most of the rows
CHUNK = 4  # of scans: small, so that states of short rows are shared
SLIDING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LATENT = {  # keys of size 12 and values of size 8
    **dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, head_dim=4),
    **dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1),
    **dict(n_group=1, topk_group=1, num_key_value_heads=4),
}
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)
EACH_LAYER = dict(vocab_size_per_layer_input=97, hidden_size_per_layer_input=8, num_kv_shared_layers=0)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}

LINEAR = dict(layer_types=["linear_attention", "full_attention"])
GATED_DELTA = dict(
    **dict(**LINEAR, linear_num_value_heads=4, linear_num_key_heads=2),
    **dict(linear_key_head_dim=8, linear_value_head_dim=8),
)
CHANNELS = {  # a decay for each channel, and latent attention
    **dict(**LINEAR, linear_num_heads=4, linear_head_dim=8, num_mtp_layers=0, without=("head_dim",)),
    **{name: x for name, x in LATENT.items() if name not in ("head_dim", "n_routed_experts", "first_k_dense_replace")},
    **dict(num_experts=4, num_local_experts=4),
}
STATE_SPACE = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=CHUNK, mamba_n_groups=1)
CONVOLUTION = dict(layer_types=["conv", "full_attention"])

HYBRID: dict[str, tuple[str, dict]] = {
    "qwen3_5_text": ("gated delta rule", GATED_DELTA),
    "qwen3_5_moe_text": (
        "gated delta rule, experts and their router's loss",
        GATED_DELTA | EXPERTS | dict(shared_expert_intermediate_size=16),
    ),
    "qwen3_next": (
        "gated delta rule, experts and their router's loss",
        GATED_DELTA | EXPERTS | dict(shared_expert_intermediate_size=16),
    ),
    "olmo_hybrid": ("gated delta rule, as many heads of keys as of values", GATED_DELTA | dict(linear_num_key_heads=4)),
    "kimi_linear": ("delta rule that decays each channel, latent attention, experts", CHANNELS),
    "bailing_hybrid": (
        "delta rule that decays each channel, latent attention, experts",
        CHANNELS | dict(head_dim=8, without=()),
    ),
    "mamba2": ("Mamba 2 in every layer", dict(state_size=8, num_heads=8, n_groups=1, chunk_size=CHUNK)),
    "bamba": ("Mamba 2 or attention", STATE_SPACE | dict(attn_layer_indices=[1])),
    "falcon_h1": ("Mamba 2 and attention side by side, scaled logits", STATE_SPACE | dict(mamba_d_ssm=64)),
    "granitemoehybrid": (
        "Mamba 2 or attention, experts and their router's loss",
        dict(
            **dict(**STATE_SPACE, **LOCAL_EXPERTS, layer_types=["mamba", "attention"], shared_intermediate_size=32),
            **dict(num_experts=4),  # which TRL reads; the model reads num_local_experts
        ),
    ),
    "nemotron_h": (
        "Mamba 2, attention or an MLP",
        dict(
            **dict(layers_block_type=["mamba", "mlp", "attention"], num_hidden_layers=3, mamba_num_heads=8),
            **dict(mamba_head_dim=8, ssm_state_size=8, chunk_size=CHUNK, n_groups=1),
        ),
    ),
    "zamba2": (
        "Mamba 2 in every layer, attention blocks with adapters that layers share",
        dict(
            **dict(layers_block_type=["mamba", "hybrid"], num_mem_blocks=1, mamba_d_state=8, mamba_headdim=8),
            **dict(chunk_size=CHUNK, n_mamba_heads=8, mamba_ngroups=1, attention_head_dim=16, adapter_rank=4),
            **dict(use_mem_rope=True),
        ),
    ),
    "lfm2": ("gated convolutions", CONVOLUTION | dict(block_multiple_of=8)),
    "lfm2_moe": ("gated convolutions, experts", CONVOLUTION | EXPERTS | dict(num_dense_layers=1)),
    "lfm3": ("gated convolutions", CONVOLUTION),
    "mamba": ("Mamba 1 in every layer, whose scan takes no initial state", dict(state_size=4)),
    "falcon_mamba": ("Mamba 1 with norms in every layer", dict(state_size=4)),
    "jamba": (
        "Mamba 1 or attention, experts and their router's loss",
        dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4),
    ),
    "zamba": (
        "Mamba 1 in every layer, attention blocks that layers share",
        dict(layers_block_type=["mamba", "hybrid"], n_mamba_heads=2, mamba_d_state=4, attention_head_dim=16),
    ),
}
"""Families whose layers mix tokens by other means than attention as well, as in `FUSED`."""

WHOLE_ROWS: dict[str, tuple[str, dict]] = {
    "minimax": (
        "linear attention on whole rows, experts and their router's loss",
        dict(**LINEAR, **LOCAL_EXPERTS, block_size=16),
    ),
    "recurrent_gemma": (
        "gated linear recurrences on whole rows",
        dict(lru_width=32, attention_window_size=64, block_types=["recurrent", "attention"]),
    ),
    "zaya": (
        "convolutions before attention on whole rows, experts",
        EXPERTS | dict(num_experts_per_tok=1, router_hidden_size=16),
    ),
}
"""Families with mixers whose functions are not known."""

HYBRID |= WHOLE_ROWS

FUSED: dict[str, tuple[str, dict]] = {
    "llama": ("untied head", {}),
    "llama-tied": ("the head is tied to the embedding, whose gradient has two parts", dict(tie_word_embeddings=True)),
    "llama-eager": ("attention is implemented in the model's file", dict(attn_implementation="eager")),
    "llama-dynamic": (
        "rotary frequencies depend on the longest batch",
        dict(rope_parameters=DYNAMIC, max_position_embeddings=16),
    ),
    "qwen2": ("biases in q, k, v", {}),
    "qwen2-window": (
        "a window in some layers",
        dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "qwen3": ("norms of q and k", {}),
    "mistral": ("a window in every layer", dict(sliding_window=WINDOW)),
    "starcoder2": ("a window, biases, layer norms", dict(sliding_window=WINDOW)),
    "gemma": ("scaled embeddings", {}),
    "gemma2": (
        "softcaps of attention and logits, alternating windows",
        dict(
            **dict(sliding_window=WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
            **dict(query_pre_attn_scalar=8, attn_implementation="eager"),
        ),
    ),
    "gemma3_text": ("two rotary bases, alternating windows", SLIDING),
    "gemma3n_text": (
        "inputs of each layer, alternate updates",
        dict(**SLIDING, **EACH_LAYER, altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0, 0.0]),
    ),
    "gemma4_text": ("inputs of each layer, different heads in full attention", dict(**SLIDING, **EACH_LAYER)),
    "phi": ("a head with a bias, partial rotary embeddings", {}),
    "phi3": ("a window, q, k and v in one matrix", dict(sliding_window=WINDOW)),
    "phi3-longrope": (
        "batches on both sides of the switch to long rotary factors",
        dict(rope_parameters=LONGROPE, original_max_position_embeddings=16),  # Phi3Config writes it over LONGROPE's
    ),
    "granite": (
        "multipliers of embeddings, attention, residuals and logits",
        dict(attention_multiplier=0.2, logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=2.0),
    ),
    "cohere2": ("scaled logits, layers without positions, alternating windows", SLIDING),
    "olmo3": ("norms after attention, alternating windows", SLIDING),
    "exaone4": ("layers without positions, alternating windows", dict(**SLIDING, sliding_window_pattern=2)),
    "smollm3": ("a layer without positions", dict(no_rope_layers=[1, 0])),
    "gpt_oss": ("attention sinks, alternating windows, experts", dict(**LOCAL_EXPERTS, **SLIDING)),
    "qwen3_moe": ("experts and their router's loss", EXPERTS),
    "mixtral": ("experts and their router's loss", LOCAL_EXPERTS),
    "deepseek_v3": ("latent attention: keys and values of different sizes; experts in groups", LATENT),
    "diffllama": ("attention called twice a layer", {}),
    "gpt2": ("learned positions, layers that drop keyword arguments", GPT),
    "opt": ("learned positions counted from the mask", dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)),
    "gpt_neox": ("attention and MLP in parallel, partial rotary embeddings", {}),
    "stablelm": ("layers that drop keyword arguments", {}),
    "nemotron": ("layers that drop keyword arguments, norms around 1", {}),
    **HYBRID,
}
"""Maps a name to special features and a configuration. The name up to "-" is the model type."""

STOCK: dict[str, tuple[str, dict]] = {
    "bloom": ("does not let its attention implementation be set", dict(n_layer=2, n_head=4)),
    "falcon-alibi": ("ALiBi", dict(alibi=True, num_kv_heads=4, without=("head_dim", "num_key_value_heads"))),
    "phimoe": ("draws random numbers", dict(num_local_experts=4, sliding_window=WINDOW, output_router_logits=False)),
    "llama4_text": (
        "layers of type chunked_attention",
        dict(
            **dict(attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"]),
            **dict(num_local_experts=2, intermediate_size_mlp=48, no_rope_layers=[1, 0]),
        ),
    ),
    "doge": ("cannot be run on packed tokens", dict(output_router_logits=False)),
    "gptj": ("does not let its attention implementation be set", dict(**GPT, rotary_dim=4)),
}
"""Maps the name of an unsupported family to a part of the logged reason and its configuration."""

PACKED_SINCE = {"gptj": "5.24"}
"""Maps the families among them that are supported in later versions of transformers to the first of these."""

for _name, _version in PACKED_SINCE.items():
    if Version(transformers.__version__) >= Version(_version):
        FUSED[_name] = ("", STOCK.pop(_name)[1])

FAILS_IN_STOCK = {"phimoe": AttributeError, "llama4_text": AttributeError, "doge": IndexError}
"""Maps the families on which TRL's own fused head fails, with or without fastdpo, to its error."""

GUESSES = [{}, EXPERTS, EXPERTS | LOCAL_EXPERTS, EXPERTS | LATENT]
"""Configurations of families that are not named here. The first one with which a model trains is taken."""


def kind(name: str) -> str:
    """Returns the model type of a family."""
    return name.split("-")[0]


OTHERS = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in {*map(kind, FUSED | STOCK)}]
"""Every other causal LM of the installed transformers."""


def tiny_family(name: str, seed: int = 0, **config) -> PreTrainedModel:
    return tiny_model(kind(name), seed, **(FUSED | STOCK)[name][1] | config)
