"""The workload of a DPO step: a small model, and pairs of given lengths with random token ids."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

PAD, EOS, FIRST_REGULAR_TOKEN = 0, 1, 5
POLICY, REFERENCE, ADAPTERS = 0, 1, 2  # seeds
MAX_COMPARED = 20_000_000  # elements of a gradient
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of a layer

COMPLETIONS = 8  # of each prompt, in `GroupWorkload`

Lengths = tuple[int, ...]
"""Number of tokens of a prompt and of its completions: the chosen and the rejected one, except for groups."""


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a model, named as those of a Llama."""

    layers: int = 6
    hidden: int = 256
    mlp: int = 768
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 32_000

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def _repeated(size: ModelSize, *types: str) -> dict[str, Any]:
    return {"layer_types": [types[i % len(types)] for i in range(size.layers)]}


def _qwen3_5(size: ModelSize) -> dict[str, Any]:
    linear = "linear_attention"
    heads = {"linear_num_key_heads": size.heads, "linear_num_value_heads": 2 * size.heads}
    head_dims = {"linear_key_head_dim": size.head_dim, "linear_value_head_dim": size.head_dim}
    return {**_repeated(size, linear, linear, linear, "full_attention"), **heads, **head_dims}


def _falcon_h1(size: ModelSize) -> dict[str, Any]:
    state_space = {"mamba_d_ssm": 2 * size.hidden, "mamba_n_heads": 2 * size.heads, "mamba_d_head": size.head_dim}
    return {**state_space, "mamba_d_state": size.head_dim, "mamba_n_groups": 1, "mamba_chunk_size": 128}


def _lfm2(size: ModelSize) -> dict[str, Any]:
    return {**_repeated(size, "conv", "conv", "full_attention"), "block_auto_adjust_ff_dim": False}


ARCHITECTURES: dict[str, tuple[str, Callable[[ModelSize], dict[str, Any]]]] = {
    "Llama": ("llama", lambda size: {}),
    "Qwen3.5": ("qwen3_5_text", _qwen3_5),
    "Falcon-H1": ("falcon_h1", _falcon_h1),
    "LFM2": ("lfm2", _lfm2),
}
"""Model types of transformers, and the entries of their configurations that a Llama does not have."""


@dataclass(frozen=True)
class Workload:
    """Model, batches and precision of a step.

    Attributes:
        batches: lengths of the pairs of each batch.
        lora: whether to train LoRA adapters of rank 16 on all attention and MLP projections, with
            the model without adapters as the reference. Otherwise full fine-tuning.
        bf16: whether to run under autocast to bfloat16, as with `DPOConfig(bf16=True)`.
        weights: dtype of the model.
        quantized: whether the projections hold 4-bit codes of such weights, in the nf4 of bitsandbytes, as in QLoRA.
        checkpointing: whether to use gradient checkpointing in every layer.
        size: size of the model.
        max_length: maximum number of tokens of a row; longer rows are truncated.
        architecture: one of `ARCHITECTURES`.
        pairs_of_prompt: number of successive pairs of a batch that have the same prompt.
        accumulation: number of batches that the rows of a step are cut into.
    """

    batches: tuple[tuple[Lengths, ...], ...]
    lora: bool = False
    bf16: bool = False
    weights: str = "float32"
    quantized: bool = False
    checkpointing: bool = False
    size: ModelSize = field(default_factory=ModelSize)
    max_length: int = 3072
    architecture: str = "Llama"
    pairs_of_prompt: int = 1
    accumulation: int = 1

    @property
    def dtype(self) -> str:
        weights = f"nf4 of {self.weights}" if self.quantized else self.weights
        return f"{weights} weights, bfloat16 autocast" if self.bf16 else weights

    def examples(self, batch: int) -> list[dict[str, list[int]]]:
        """The pairs of a batch in the format of TRL's collator."""
        generator = torch.Generator().manual_seed(batch)

        def ids(n: int) -> list[int]:
            return torch.randint(FIRST_REGULAR_TOKEN, self.size.vocabulary, (n,), generator=generator).tolist()

        pairs = []
        for i, (p, c, r) in enumerate(self.batches[batch]):
            prompt = pairs[-1]["prompt_ids"] if i % self.pairs_of_prompt else ids(p)
            pairs.append({"prompt_ids": prompt, "chosen_ids": ids(c), "rejected_ids": ids(r)})
        return pairs


@dataclass(frozen=True)
class AccumulatedWorkload(Workload):
    """One step, in which the rows of a prompt are as far apart as they can be.

    Attributes:
        trainer: "DPO", "Reward" or "KTO".
    """

    trainer: str = "DPO"

    def examples(self, batch: int) -> list[dict[str, list[int]]]:
        pairs, n = super().examples(batch), self.pairs_of_prompt
        return [pair for first in range(n) for pair in pairs[first::n]]


@dataclass(frozen=True)
class GroupWorkload(Workload):
    """Batches of prompts with `COMPLETIONS` completions each.

    Attributes:
        batches: of each batch and prompt, the lengths of the prompt and of its completions.
        trainer: "GRPO" or "RLOO", which shuffles the completions of a step before it cuts them into batches.
    """

    trainer: str = "GRPO"


PATCH = 16  # pixels of an image, in each direction
MERGED = 2  # patches of a token, in each direction


@dataclass(frozen=True)
class VisionWorkload(Workload):
    """Pairs with pictures in their prompts.

    Attributes:
        family: the model type.
        images: number of pictures of each pair.
        side: width and height of a picture in pixels.
        tower: layers and hidden size of the image tower.
    """

    family: str = "qwen3_vl"
    images: int = 1
    side: int = 256
    tower: tuple[int, int] = (6, 192)

    @property
    def tokens_of_image(self) -> int:
        return (self.side // PATCH // MERGED) ** 2


def draw_lengths(
    median: float,
    ratio: float,
    prompts: int,
    seed: int,
    *,
    spread: float,
    bounds: tuple[int, int],
    completions: int = 2,
) -> tuple[Lengths, ...]:
    """Draws lognormal lengths, given the median row length and prompt-to-completion ratio."""
    generator = random.Random(seed)
    completion = median / (1 + ratio)

    def draw(typical: float) -> int:
        return max(bounds[0], min(bounds[1], int(typical * math.exp(generator.gauss(0, spread)))))

    typical = (median - completion, *[completion] * completions)
    return tuple(tuple(map(draw, typical)) for _ in range(prompts))


def device() -> torch.device:
    """The accelerator, or else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def decoder_entries(workload: Workload) -> dict[str, Any]:
    """The entries of a decoder's configuration that all architectures have."""
    size = workload.size
    return dict(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=workload.max_length,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        use_cache=False,
    )


def build_model(workload: Workload, seed: int, attention: str = "sdpa") -> PreTrainedModel:
    """Builds a model with random weights that are equal in every process."""
    kind, entries = ARCHITECTURES[workload.architecture]
    config = AutoConfig.for_model(kind, **decoder_entries(workload), **entries(workload.size))
    torch.manual_seed(seed)
    with device():  # generating billions of random numbers takes minutes on a CPU
        dtype = getattr(torch, workload.weights)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return in_four_bits(model) if workload.quantized else model


def in_four_bits(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model as it is loaded for QLoRA. At 8B, both together need 22 GB.

    Raises:
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    import bitsandbytes  # noqa: F401

    kind = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        dtype=model.dtype,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, **kind),
    )


def lora_config() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS, task_type="CAUSAL_LM")


def fill_adapters(model: torch.nn.Module) -> None:
    """Sets adapters to non-zero values.

    Fresh adapters add nothing, and half of them get no gradient.
    """
    generator = torch.Generator().manual_seed(ADAPTERS)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.copy_(values.bfloat16())  # equal in every dtype that a trainer may choose


def build_policy(workload: Workload) -> PreTrainedModel | PeftModel:
    """The model to be trained, with adapters if the workload asks for LoRA."""
    model = build_model(workload, POLICY)
    return with_adapters(model, lora_config()) if workload.lora else model


def with_adapters(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """The model with adapters that are not zero."""
    adapted = get_peft_model(model, config)
    fill_adapters(adapted)
    return adapted


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """Gradients of all trainable parameters as one vector; if too long, every k-th element."""
    trainable = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in trainable])
    return gradient[:: -(-len(gradient) // MAX_COMPARED)].to("cpu", torch.promote_types(gradient.dtype, torch.float32))
