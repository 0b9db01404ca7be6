"""Tiny random models of many families, each with its special features enabled."""

from __future__ import annotations

from transformers import PreTrainedModel
from trl_runs import tiny_model

WINDOW = 6  # shorter than most of the rows
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
    "phi3-longrope": ("batches on both sides of the switch to long rotary factors", dict(rope_parameters=LONGROPE)),
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
}
"""Maps a name to special features and a configuration. The name up to "-" is the model type."""

STOCK: dict[str, tuple[str, dict]] = {
    "bloom": ("does not let its attention implementation be set", dict(n_layer=2, n_head=4)),
    "falcon-alibi": ("ALiBi", dict(alibi=True, num_kv_heads=4, without=("head_dim", "num_key_value_heads"))),
    "lfm2": (
        "mixes tokens by other means",
        dict(layer_types=["conv", "full_attention"], block_ff_dim=32, block_multiple_of=8),
    ),
    "qwen3_next": (
        "mixes tokens by other means",
        dict(
            **dict(layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=16, **EXPERTS),
            **dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
        ),
    ),
    "falcon_mamba": ("mixes tokens by other means", dict(state_size=4)),
    "phimoe": (
        "differ from its padded ones",
        dict(num_local_experts=4, sliding_window=WINDOW, output_router_logits=False),
    ),
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

FAILS_IN_STOCK = {"phimoe": AttributeError, "llama4_text": AttributeError, "doge": IndexError}
"""Maps the families on which TRL's own fused head fails, with or without fastdpo, to its error."""


def kind(name: str) -> str:
    """Returns the model type of a family."""
    return name.split("-")[0]


def tiny_family(name: str, seed: int = 0, **config) -> PreTrainedModel:
    return tiny_model(kind(name), seed, **(FUSED | STOCK)[name][1] | config)
