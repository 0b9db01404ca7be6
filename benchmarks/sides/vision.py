"""A training step of TRL's `DPOTrainer` on prepared batches of pairs with images.

The pictures are random numbers in the form that the processor of each family returns.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from benchmarks.sides import workload as w
from benchmarks.sides.exact import ExactStep
from benchmarks.sides.trainer import TokenizedTrainer, TrainerStep, build_tokenizer, trainer_options
from benchmarks.sides.workload import MERGED, PATCH, VisionWorkload

IMAGE = w.FIRST_REGULAR_TOKEN - 1  # the placeholder


def build_model(workload: VisionWorkload, seed: int, attention: str = "sdpa") -> PreTrainedModel:
    """A model with random weights that are equal in every process."""
    size, (depth, hidden) = workload.size, workload.tower
    text = w.decoder_entries(workload)
    vision: dict[str, Any] = dict(
        hidden_size=hidden, intermediate_size=3 * hidden, patch_size=PATCH, image_size=workload.side
    )
    of_layers = dict(num_hidden_layers=depth, num_attention_heads=size.heads)
    rest: dict[str, Any] = {}
    if workload.family == "qwen3_vl":
        quarter = size.hidden // size.heads // 8
        sections = [2 * quarter, quarter, quarter]
        text["rope_parameters"] = dict(rope_type="default", rope_theta=1e4, mrope_section=sections)
        vision |= dict(depth=depth, num_heads=size.heads, out_hidden_size=size.hidden, deepstack_visual_indexes=[0])
    elif workload.family == "smolvlm":
        text["model_type"] = "llama"
        vision |= of_layers
        rest = dict(scale_factor=MERGED)
    elif workload.family == "gemma3":
        text["query_pre_attn_scalar"] = size.head_dim
        vision |= of_layers
        rest = dict(mm_tokens_per_image=workload.tokens_of_image)
    else:
        text["model_type"] = "mistral"
        vision |= dict(of_layers, model_type="pixtral", head_dim=hidden // size.heads)
    config = AutoConfig.for_model(
        workload.family, text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False, **rest
    )
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, attn_implementation=attention)


def lora_config() -> LoraConfig:
    """That of other workloads, on the language model only: nothing in the image tower is trained."""
    return replace(w.lora_config(), target_modules=r".*(language_model|text_model)\..*_proj")


def build_policy(workload: VisionWorkload) -> PreTrainedModel | PeftModel:
    """The model to be trained, with adapters if the workload asks for LoRA."""
    model = build_model(workload, w.POLICY)
    return w.with_adapters(model, lora_config()) if workload.lora else model


def examples(workload: VisionWorkload, batch: int) -> list[dict[str, list[int]]]:
    """The pairs of a batch: those of `workload.examples`, with pictures in front of each prompt."""
    image = [w.FIRST_REGULAR_TOKEN, *[IMAGE] * workload.tokens_of_image]
    return [
        {**pair, "prompt_ids": [*image * workload.images, *pair["prompt_ids"]]} for pair in workload.examples(batch)
    ]


def inputs_of_images(workload: VisionWorkload, ids: Tensor) -> dict[str, Tensor]:
    """The arguments of a model for the pictures of rows [R, L]. Rows whose prompts begin with the same
    token, such as those of a pair, have the same pictures.
    """
    side, n = workload.side, workload.images
    after = n * (1 + workload.tokens_of_image)  # the first token of text
    pictures = [torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(int(row[after]))) for row in ids]
    if workload.family == "smolvlm":
        return {"pixel_values": torch.stack(pictures)}
    whole = torch.cat(pictures)
    if workload.family == "gemma3":
        return {"pixel_values": whole, "token_type_ids": (ids == IMAGE).long()}
    if workload.family == "mistral3":
        return {"pixel_values": whole, "image_sizes": torch.full((len(whole), 2), side)}
    across = side // PATCH
    frames = whole[:, :, None].expand(-1, -1, 2, -1, -1)  # two frames of a video
    return {
        "pixel_values": frames.reshape(len(whole) * across**2, -1),
        "image_grid_thw": torch.tensor([[1, across, across]] * len(whole)),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


class PictureCollator(DataCollatorForPreference):
    """TRL's collator of tokens, with the pictures of the rows."""

    def __init__(self, workload: VisionWorkload) -> None:
        super().__init__(pad_token_id=w.PAD, max_length=workload.max_length)
        self.workload = workload

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        return batch | inputs_of_images(self.workload, batch["input_ids"])


class VisionStep(TrainerStep):
    """Policy forward and backward, reference forward, image towers included. No optimizer."""

    def _build(self, workload: VisionWorkload, directory: Path, attention: str) -> DPOTrainer:
        trainer = TokenizedTrainer(
            model=build_model(workload, w.POLICY, attention),
            ref_model=None if workload.lora else build_model(workload, w.REFERENCE, attention),
            args=DPOConfig(**trainer_options(workload, directory)),
            train_dataset=Dataset.from_list(examples(workload, 0)),
            processing_class=build_tokenizer(),
            data_collator=PictureCollator(workload),
            peft_config=lora_config() if workload.lora else None,
        )
        if workload.lora:
            w.fill_adapters(trainer.model)
        return trainer

    def _examples(self, workload: VisionWorkload, batch: int) -> list[dict[str, Any]]:
        return examples(workload, batch)


class ExactVisionStep(ExactStep):
    """The ground truth of `VisionStep`."""

    def _examples(self, batch: int) -> list[dict[str, list[int]]]:
        return examples(self.workload, batch)

    def _build(self, seed: int) -> PreTrainedModel:
        return build_model(self.workload, seed)

    def _build_policy(self) -> PreTrainedModel | PeftModel:
        return build_policy(self.workload)

    def _inputs(self, ids: Tensor, exact: bool) -> dict[str, Tensor]:
        inputs = inputs_of_images(self.workload, ids) | {"attention_mask": torch.ones_like(ids)}
        return {name: x.double() if exact and x.is_floating_point() else x for name, x in inputs.items()}
