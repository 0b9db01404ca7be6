"""Tiny random multimodal models of many families: a language model next to image, video or audio towers.

Families whose tower is a model of the package `timm` (Gemma 3n, Perception LM, FastVLM) cannot be
built without it, and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoModelForMultimodalLM, PreTrainedModel

from tests.support.comparison import drawn, sizes_of
from tests.support.models.families import CONVOLUTION, EACH_LAYER, EXPERTS, GATED_DELTA, SLIDING, WINDOW
from tests.support.trl.dpo import WORDS

IMAGE = len(WORDS) - 1
"""The id of the placeholder that stands for a part of an image. The last word of the vocabulary."""

TOWER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
TOWER |= dict(patch_size=4, image_size=16)
CLIP = dict(TOWER, model_type="clip_vision_model", projection_dim=16)
SIGLIP = dict(TOWER, model_type="siglip_vision_model")
NAFLEX = dict(TOWER, model_type="siglip2_vision_model", num_patches=16)
PIXTRAL = dict(TOWER, model_type="pixtral", head_dim=8)
QWEN = dict(hidden_size=16, intermediate_size=24, depth=1, num_heads=2, patch_size=4, out_hidden_size=32)
DEEPSTACK = dict(QWEN, deepstack_visual_indexes=[0], num_position_embeddings=64)
GLM = dict(QWEN, image_size=16)
SAM = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4, mlp_dim=24)
SAM |= dict(output_channels=8, window_size=2, global_attn_indexes=[0])
PERCEIVER = dict(hidden_size=32, resampler_n_latents=2, resampler_depth=1, resampler_n_heads=2, resampler_head_dim=8)
PERCEIVER |= dict(num_key_value_heads=1)

THREE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
"""Positions in three dimensions: time, rows and columns."""
WHOLE_HEAD = dict(rope_parameters=dict(**THREE["rope_parameters"], partial_rotary_factor=1.0))
GROUPS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
GROUPS |= dict(first_k_dense_replace=1)


@dataclass(frozen=True)
class Family:
    """A family by its configuration.

    Attributes:
        features: what is special about its language model, or part of the logged reason if it is
            not supported.
        text: the configuration of the language model, next to `SIZES`.
        vision: the configuration of the image tower, if it has one.
        rest: the rest of the configuration.
    """

    features: str
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None
    rest: dict[str, Any] = field(default_factory=dict)


def _llama(vision: dict, **rest) -> Family:
    return Family("", dict(model_type="llama"), vision, rest)


def _mistral(vision: dict, **rest) -> Family:
    return Family("a window in every layer", dict(model_type="mistral", sliding_window=WINDOW), vision, rest)


def _qwen(vision: dict | None, **rest) -> Family:
    return Family("biases in q, k, v", dict(model_type="qwen2"), vision, rest)


def _cohere(**rest) -> Family:
    return Family("layers without positions, alternating windows", dict(model_type="cohere2", **SLIDING), SIGLIP, rest)


FUSED: dict[str, Family] = {
    "gemma3": Family("two rotary bases, alternating windows", SLIDING, TOWER, dict(mm_tokens_per_image=4)),
    "gemma4": Family(
        "inputs of each layer, different heads in full attention",
        dict(**SLIDING, **EACH_LAYER, global_head_dim=8, use_bidirectional_attention="vision"),
        dict(TOWER, num_key_value_heads=2, head_dim=8, position_embedding_size=64, pooling_kernel_size=2),
    ),
    "qwen2_vl": Family("three positions", THREE, dict(QWEN, embed_dim=16, hidden_size=32)),
    "qwen2_5_vl": Family("three positions", THREE, QWEN),
    "qwen3_vl": Family("three positions, features added to several layers", THREE, DEEPSTACK),
    "qwen3_vl_moe": Family("three positions, experts", THREE | EXPERTS, DEEPSTACK),
    "qwen3_5": Family("gated delta rule, three positions", WHOLE_HEAD | GATED_DELTA, DEEPSTACK),
    "lfm2_vl": Family(
        "gated convolutions",
        dict(model_type="lfm2", **CONVOLUTION, block_multiple_of=8),
        NAFLEX,
        dict(projector_hidden_size=16),
    ),
    "glm4v": Family("three positions", THREE, GLM),
    "glm4v_moe": Family("three positions, experts in groups", WHOLE_HEAD | GROUPS, GLM),
    "glm46v": Family("three positions", WHOLE_HEAD, GLM),
    "paddleocr_vl": Family("three positions", THREE, TOWER),
    "ernie4_5_vl_moe": Family(
        "three positions, experts of text and of images",
        dict(THREE, moe_num_experts=4, moe_k=2, moe_intermediate_size=[16, 16]),
        QWEN,
    ),
    "mistral3": _mistral(PIXTRAL),
    "idefics2": _mistral(TOWER, perceiver_config=PERCEIVER),
    "llava_next": _mistral(CLIP, image_grid_pinpoints=[[16, 16]]),
    "smolvlm": _llama(TOWER, scale_factor=2),
    "idefics3": _llama(TOWER, scale_factor=2),
    "llava": _llama(CLIP),
    "vipllava": _llama(CLIP, vision_feature_layers=[-1]),
    "llava_next_video": _llama(CLIP, image_grid_pinpoints=[[16, 16]]),
    "video_llava": _llama(CLIP),
    "deepseek_vl": _llama(SIGLIP),
    "internvl": _qwen(dict(TOWER, image_size=[16, 16], patch_size=[4, 4])),
    "llava_onevision": _qwen(SIGLIP, image_grid_pinpoints=[[16, 16]]),
    "got_ocr2": _qwen(SAM),
    "ovis2": _qwen(dict(TOWER, vocab_size=32), hidden_size=32),
    "video_llama_3": _qwen(TOWER),
    "qwen2_audio": _qwen(None, audio_config=dict(d_model=16, encoder_layers=1, encoder_attention_heads=2)),
    "aya_vision": _cohere(),
    "cohere2_vision": _cohere(alignment_intermediate_size=24),
    "lighton_ocr": Family("norms of q and k", dict(model_type="qwen3"), PIXTRAL),
    "aria": Family(
        "experts",
        dict(moe_num_experts=4, moe_topk=2),
        dict(TOWER, model_type="idefics3_vision"),
        dict(projector_patch_to_query_dict={16: 4}),
    ),
    "fuyu": Family("image patches without a tower", dict(model_type="persimmon")),
}
"""Maps a model type to the family."""

STOCK: dict[str, Family] = {
    "mllama": Family(
        "MllamaTextModel attends to images by cross-attention",
        dict(cross_attention_layers=[1], rope_parameters=dict(rope_type="default", rope_theta=1e4), bos_token_id=2),
        dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_global_layers=1, attention_heads=2)
        | dict(patch_size=4, image_size=16, vision_output_dim=32, intermediate_layers_indices=[0]),
    ),
    "paligemma": Family(
        "GemmaModel attends in both directions", dict(model_type="gemma"), TOWER, dict(projection_dim=32)
    ),
    "llama4": Family(
        "layers of type chunked_attention",
        dict(attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0])
        | dict(num_local_experts=2, intermediate_size_mlp=48),
        dict(TOWER, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16),
    ),
}
"""Maps the model type of an unsupported family to the family."""

FAILS_IN_STOCK = {"llama4": AttributeError}
"""Maps the families on which TRL's own fused head fails, with or without fastdpo, to its error."""


def tiny_multimodal(name: str, seed: int = 0, **rest) -> PreTrainedModel:
    """A model of a family with the vocabulary of `trl.dpo.WORDS`."""
    family = (FUSED | STOCK)[name]
    parts = dict(text_config=sizes_of(len(WORDS)) | family.text, image_token_id=IMAGE)
    if family.vision is not None:
        parts["vision_config"] = dict(family.vision)
    return drawn(AutoModelForMultimodalLM, name, seed, **{**parts, **family.rest, **rest})
