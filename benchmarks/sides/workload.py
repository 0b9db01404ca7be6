"""What a DPO step computes: a small Llama, pairs of given lengths with random token ids, full or LoRA fine-tuning."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PAD, EOS, FIRST_WORD = 0, 1, 5
POLICY, REFERENCE, ADAPTERS = 0, 1, 2  # seeds
MOST = 20_000_000  # numbers of a gradient that are compared

Lengths = tuple[int, int, int]
"""Tokens of a prompt and of its chosen and rejected answer."""


@dataclass(frozen=True)
class ModelSize:
    layers: int = 6
    hidden: int = 256
    mlp: int = 768
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 32_000


@dataclass(frozen=True)
class Workload:
    """Attributes:
    batches: the lengths of each batch's pairs.
    lora: rank 16 on all projections of attention and MLP, the reference by disabling them; else full fine-tuning.
    bf16: under autocast to bfloat16, as `DPOConfig(bf16=True)` sets it up.
    weights: the dtype of the model.
    checkpointing: of gradients, in every layer.
    max_length: tokens of a row, what is over is cut off.
    """

    batches: tuple[tuple[Lengths, ...], ...]
    lora: bool = False
    bf16: bool = False
    weights: str = "float32"
    checkpointing: bool = False
    size: ModelSize = field(default_factory=ModelSize)
    max_length: int = 3072

    @property
    def dtype(self) -> str:
        return f"{self.weights} weights, bfloat16 autocast" if self.bf16 else self.weights


def draw_lengths(median: float, ratio: float, pairs: int, seed: int, *, spread: float, bounds: tuple[int, int]):
    """Lengths of pairs whose rows have this median length and this ratio of prompt to answer, each part lognormal."""
    generator = random.Random(seed)
    answer = median / (1 + ratio)

    def draw(typical: float) -> int:
        return max(bounds[0], min(bounds[1], int(typical * math.exp(generator.gauss(0, spread)))))

    return tuple((draw(median - answer), draw(answer), draw(answer)) for _ in range(pairs))


def examples(workload: Workload, batch: int) -> list[dict[str, list[int]]]:
    """The pairs of a batch as TRL's collator takes them: ids of prompt, chosen and rejected."""
    generator = torch.Generator().manual_seed(batch)

    def ids(n: int) -> list[int]:
        return torch.randint(FIRST_WORD, workload.size.vocabulary, (n,), generator=generator).tolist()

    return [{"prompt_ids": ids(p), "chosen_ids": ids(c), "rejected_ids": ids(r)} for p, c, r in workload.batches[batch]]


def device() -> torch.device:
    """Where everything runs."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def build_model(workload: Workload, seed: int, attention: str = "sdpa") -> LlamaForCausalLM:
    """The same random weights in every process."""
    size = workload.size
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=workload.max_length,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(seed)
    with device():  # where billions of random numbers take no minutes
        dtype = getattr(torch, workload.weights)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def lora_config() -> LoraConfig:
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=projections, task_type="CAUSAL_LM")


def start_adapters(model: torch.nn.Module) -> None:
    """Gives adapters weights as they have after some training. Fresh ones add nothing, and half of them no gradient."""
    generator = torch.Generator().manual_seed(ADAPTERS)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.copy_(values.bfloat16())  # the same, whichever dtype a trainer gives them


def build_policy(workload: Workload) -> LlamaForCausalLM | PeftModel:
    model = build_model(workload, POLICY)
    if not workload.lora:
        return model
    adapted = get_peft_model(model, lora_config())
    start_adapters(adapted)
    return adapted


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """The gradients of all trainable parameters in one vector, in the order of their names; of many every k-th."""
    trainable = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in trainable])
    return gradient[:: -(-len(gradient) // MOST)].to("cpu", torch.promote_types(gradient.dtype, torch.float32))
