"""A training step of TRL's `DPOTrainer` without the optimizer, at the lengths of six datasets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.machine import on_gpu
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths

STOCK, LABELLED, FLOOR = "TRL as shipped", "TRL, labelled positions only", "floor"
STOCK_FLASH = {name: f"TRL, {name}" for name in ("flash_attention_2", "flash_attention_4")}
STOCK_COMPILED = "TRL, compiled"
STOCK_LIGER, LIGER = "TRL, Liger's layers", "fastdpo, Liger's layers"
LAYERS_COMPILED = "fastdpo, compiled layers"
GRAPHS, GRAPHS_OF_COMPILED = "fastdpo, CUDA graphs", "fastdpo, CUDA graphs of compiled layers"
AUTO = "fastdpo, patch() alone"
UNSHARED = "fastdpo, prompts not shared"
BUDGET = "fastdpo, half the tokens at a time"
TRAINER = "benchmarks.sides.trainer:TrainerStep"

DESCRIPTIONS = {
    STOCK: "the trainer with its defaults. Gradient checkpointing is off, on every side, unless the name of the case "
    "says otherwise. On a CPU its head scores every position.",
    LABELLED: "the same trainer, with its head switched to what it does on CUDA: only labelled positions are scored.",
    **{side: f'TRL as shipped with `attn_implementation="{name}"`.' for name, side in STOCK_FLASH.items()},
    STOCK_COMPILED: "TRL as shipped with `torch_compile=True`. Tokens are counted before models are compiled: torch "
    "would compile a model again whenever the number that a hook counts has changed.",
    STOCK_LIGER: "TRL as shipped with `use_liger_kernel=True`, which replaces RMSNorm, SwiGLU and rotary embeddings.",
    LIGER: "fastdpo with the same option.",
    SUBJECT: "the trainer after `fastdpo.patch(compile=False)`.",
    LAYERS_COMPILED: "with `compile=True`, and without graphs.",
    GRAPHS: "with CUDA graphs of the layers as they are, once all batches are replayed.",
    GRAPHS_OF_COMPILED: "with CUDA graphs of compiled layers.",
    AUTO: "the trainer after `fastdpo.patch()`, which decides about layers and graphs by itself: in a training of as "
    "many steps as three epochs of UltraFeedback have, after its first 110, in which the batches of a case take turns.",
    UNSHARED: "with `share_prompts=False`.",
    BUDGET: "with a `max_tokens` of half of the distinct tokens of the batch.",
    FLOOR: "the model's own layers on the distinct tokens and the bare matrix products of the head, without softmax, "
    "loss or trainer (`benchmarks/sides/floor.py`). Its numbers have no meaning and are not compared.",
}


class LengthProfile(NamedTuple):
    """Median length of a row in tokens, and ratio of prompt to completion length."""

    median: float
    ratio: float


PROFILES = {
    "Capybara": LengthProfile(1160, 1.59),
    "HH": LengthProfile(186, 2.15),
    "MetaMath": LengthProfile(872, 3.91),
    "TL;DR": LengthProfile(416, 11.14),
    "HelpSteer": LengthProfile(775, 6.34),
    "UltraFeedback": LengthProfile(409, 0.42),
}
SHORT = "HH", "TL;DR", "UltraFeedback"
"""The datasets of most suites. Their rows are short enough for logits that `OnlineDPOTrainer` stores several times."""
SPREAD = 0.6  # standard deviation of the logarithm of a length
LONGEST, LONGEST_STORED = 1536, 768  # tokens of a prompt or completion; where logits of all positions are stored
BOUNDS = 2, LONGEST
PAIRS, GPU_PAIRS = 6, 8  # on a GPU, TRL's default

GPU_SIZE = ModelSize(24, 896, 4864, 14, 2, 151_936)  # Qwen2.5-0.5B
GPU_LARGE = ModelSize(36, 4096, 12_288, 32, 8, 151_936)  # Qwen3-8B
LORA, CHECKPOINTING = {"lora": True}, {"checkpointing": True}
GPU_MODELS: dict[str, tuple[ModelSize, dict[str, bool], Iterable[str]]] = {  # size, options, datasets
    "0.5B, full": (GPU_SIZE, {}, PROFILES),
    "0.5B, full, checkpointing": (GPU_SIZE, CHECKPOINTING, PROFILES),
    "1.5B, full, checkpointing": (ModelSize(28, 1536, 8960, 12, 2, 151_936), CHECKPOINTING, SHORT),  # Qwen2.5
    "8B, LoRA, checkpointing": (GPU_LARGE, LORA | CHECKPOINTING, SHORT),
    "8B, LoRA": (GPU_LARGE, LORA, SHORT),
    "8B, QLoRA, checkpointing": (GPU_LARGE, LORA | CHECKPOINTING | {"quantized": True}, ["UltraFeedback"]),
}
QUICK_SIZE = ModelSize(layers=2, hidden=32, mlp=48, heads=4, kv_heads=2, vocabulary=500)
QUICK_PROFILES = {"HH": LengthProfile(40, 2.15)}


def profiles(quick: bool, datasets: Iterable[str] = SHORT) -> dict[str, LengthProfile]:
    return QUICK_PROFILES if quick else {name: PROFILES[name] for name in datasets}


def workload(
    profile: LengthProfile,
    quick: bool,
    pairs: int = PAIRS,
    batches: int = 1,
    longest: int = LONGEST,
    **options: Any,
) -> Workload:
    pairs, batches, size = (pairs // 2, 2, QUICK_SIZE) if quick else (pairs, batches, ModelSize())
    lengths = [draw_lengths(*profile, pairs, seed, spread=SPREAD, bounds=(2, longest)) for seed in range(batches)]
    return Workload(tuple(lengths), size=size, **options)


def case_of(name: str, group: str, profile: LengthProfile, sides: tuple[Side, ...]) -> Case:
    facts = {"dtype": sides[0].workload.dtype, "median": profile.median, "ratio": profile.ratio}
    return Case(name, group, sides, facts)


def case_of_batches(name: str, group: str, of_batches: dict[str, LengthProfile], sides: tuple[Side, ...]) -> Case:
    """A case with a batch for each dataset."""
    facts = {name: x._asdict() for name, x in of_batches.items()}
    return Case(name, group, sides, {"dtype": sides[0].workload.dtype}, facts)


def without_and_with(build: str, work: Workload, stock: str = LABELLED, mode: str = "labelled") -> tuple[Side, Side]:
    """A trainer's step without fastdpo, as `mode` of its side says, and with it."""
    return Side(stock, build, work, {"mode": mode}), Side(SUBJECT, build, work, {"mode": "fastdpo"})


def sides(work: Workload) -> tuple[Side, ...]:
    """The sides on a CPU but TRL as shipped. Its head is not the one of a GPU there, and takes most of the time."""
    return (
        *without_and_with(TRAINER, work),
        Side(BUDGET, "benchmarks.sides.budget:BudgetStep", work),
        Side(FLOOR, "benchmarks.sides.floor:FloorStep", work, compared=False),
    )


def stock_side(work: Workload) -> Side:
    return Side(STOCK, TRAINER, work, {"mode": "stock"})


def sides_on_gpu(work: Workload) -> tuple[Side, ...]:
    return (
        stock_side(work),
        *(Side(side, TRAINER, work, {"mode": "stock", "attention": name}) for name, side in STOCK_FLASH.items()),
        Side(STOCK_COMPILED, TRAINER, work, {"mode": "stock", "compiled": True}),
        Side(STOCK_LIGER, TRAINER, work, {"mode": "stock", "liger": True}),
        Side(LIGER, TRAINER, work, {"mode": "fastdpo", "liger": True}),
        Side(UNSHARED, TRAINER, work, {"mode": "fastdpo", "share_prompts": False}),
        Side(SUBJECT, TRAINER, work, {"mode": "fastdpo"}),
        Side(LAYERS_COMPILED, TRAINER, work, {"mode": "fastdpo", "layers_compiled": True}),
        Side(GRAPHS, TRAINER, work, {"mode": "fastdpo", "graphs": True}),
        Side(GRAPHS_OF_COMPILED, TRAINER, work, {"mode": "fastdpo", "layers_compiled": True, "graphs": True}),
        Side(AUTO, TRAINER, work, {"mode": "fastdpo", "decides": True}),
    )


def build_gpu_cases(quick: bool) -> list[Case]:
    """A case for each model, with a batch for each dataset."""
    cases = []
    for group, (size, options, datasets) in GPU_MODELS.items():
        of_group = profiles(quick, datasets)
        work = gpu_workload(size, of_group, quick, **options)
        cases.append(case_of_batches(group, group, of_group, sides_on_gpu(work)))
    return cases


def gpu_workload(size: ModelSize, of_batches: dict[str, LengthProfile], quick: bool, **options: bool) -> Workload:
    """A batch for each profile, of a model in bfloat16."""
    pairs = 2 if quick else GPU_PAIRS
    batches = tuple(draw_lengths(*x, pairs, 0, spread=SPREAD, bounds=BOUNDS) for x in of_batches.values())
    return Workload(batches, **options, bf16=True, weights="bfloat16", size=QUICK_SIZE if quick else size)


def one_gpu_case(build: str, quick: bool) -> Case:
    """Another trainer's step of the smallest model, stock and patched, at the lengths of one dataset."""
    ((name, profile),) = profiles(quick, ["UltraFeedback"]).items()
    work = gpu_workload(GPU_SIZE, {name: profile}, quick)
    return case_of(f"0.5B, full/{name}", "0.5B, full", profile, without_and_with(build, work, STOCK, "stock"))


def build_cases(quick: bool) -> list[Case]:
    if on_gpu():
        return build_gpu_cases(quick)
    cases = []
    for group, lora in (("full", False), ("LoRA", True)):
        for name, profile in profiles(quick, PROFILES).items():
            work = workload(profile, quick, lora=lora)
            stock = () if lora else (stock_side(work),)
            cases.append(case_of(f"{group}/{name}", group, profile, stock + sides(work)))
    return cases


SUITE = Suite(
    name="step",
    title="DPO training step in TRL: policy forward and backward, reference forward",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
