"""The trainings on several ranks: engines, models and batches.

Unless a case says otherwise, it trains one epoch on `PAIRS` pairs and evaluates 12. Both divide
evenly among 2 and among 3 ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from datasets import Dataset, load_from_disk
from rank_reasons import AGREED, AROUND_CALLS, add_images, change_each_call, change_types, drop_attention
from rank_trainers import ChangesModel, LastRaises, MainLogs, MainReads, Unpatches, with_callback
from torch import Tensor
from transformers import PreTrainedModel
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from fastdpo.models import calls
from fastdpo.models.running import compiled
from tests.support import faults
from tests.support.comparison import double
from tests.support.kernels import recorder
from tests.support.models.families import HYBRID as FAMILIES
from tests.support.models.multimodal import CLIP, tiny_multimodal
from tests.support.models.watching import change
from tests.support.stand_ins.device_memory import DeviceMemory
from tests.support.trl import kto, sft
from tests.support.trl.dpo import dataset, pairs, tiny_model
from tests.support.trl.groups import prompts
from tests.support.trl.online import writer
from tests.support.trl.reward import reward_model
from tests.support.workers.budgets import shuffled

PAIRS = 24

OPTIONS = dict(
    max_steps=-1,
    num_train_epochs=1,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    evaluate=12,
)


@dataclass(frozen=True)
class Case:
    """A training that is run once for each kind, from the same initial weights.

    Attributes:
        options: arguments of `trl.dpo.train`.
        model: arguments of `make_model`, for policy and reference.
        make_model: makes a model of these and a seed.
        lora: whether to train an adapter; the reference is the model without it.
        tensor_parallel: whether the ranks shard each layer of both models and get equal batches.
        in_two_halves: whether each half of the ranks does so, and FSDP2 shards what they have.
        ranks: the number of ranks if the case needs one.
        kinds: any of "stock", "patched" and "sabotaged". Sabotaged is patched, with one label removed on the last rank.
        patch: options of `fastdpo.patch`.
        change: applied to the second batch of each rank selected by `changed_on`.
        prepare: applied to policy and reference on each rank selected by `changed_on`.
        changed_on: a predicate of the rank and the number of ranks.
        data: creates the training data, from a directory that all ranks share and the kind.
        trainer_class: the class of the trainer.
        trainer: the trainer of TRL, by its name in `rank_worker.TRAINERS`.
    """

    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    make_model: Callable[..., PreTrainedModel] = tiny_model
    lora: bool = False
    tensor_parallel: bool = False
    in_two_halves: bool = False
    ranks: int | None = None
    kinds: tuple[str, ...] = ("stock", "patched")
    patch: dict[str, Any] = field(default_factory=dict)
    change: Callable[[dict[str, Tensor]], None] | None = None
    prepare: Callable[[PreTrainedModel], None] | None = None
    changed_on: Callable[[int, int], bool] = lambda rank, ranks: True
    data: Callable[[Path, str], Any] = lambda directory, kind: pairs(PAIRS)
    trainer_class: type[DPOTrainer] = DPOTrainer
    trainer: str = "DPO"


@dataclass(kw_only=True)
class Collator(DataCollatorForPreference):
    """TRL's collator with a change applied to the second batch."""

    change: Callable[[dict[str, Tensor]], None]
    batches: int = 0

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        self.batches += 1
        if self.batches == 2:
            self.change(batch)
        return batch


def collator(case: Case, kind: str) -> Collator | None:
    """Creates the collator of this rank, or returns None to use TRL's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    change = case.change if case.changed_on(rank, ranks) else None
    if kind == "sabotaged" and rank == ranks - 1:
        change = lose_a_label
    return None if change is None else Collator(pad_token_id=0, max_length=1024, change=change)


def shared(directory: Path, kind: str) -> Dataset:
    """Loads a dataset on disk that all ranks share.

    TRL's precomputing fails if each of several ranks has a separate copy.
    """
    if dist.get_rank() == 0:
        dataset(PAIRS, directory / "train")
    dist.barrier()
    return load_from_disk(directory / "train")


def patched_in_memory(directory: Path, kind: str) -> Dataset:
    """A dataset on disk for stock, and in memory for patched."""
    return shared(directory, kind) if kind == "stock" else Dataset.from_list(pairs(PAIRS))


def on_last(rank: int, ranks: int) -> bool:
    return rank == ranks - 1


def on_first(rank: int, ranks: int) -> bool:
    return rank == 0


def lose_a_label(batch: dict[str, Tensor]) -> None:
    row, column = batch["completion_mask"].nonzero()[0]
    batch["completion_mask"][row, column] = 0


def lose_all_labels(batch: dict[str, Tensor]) -> None:
    """Removes all labels, as truncation does when prompts fill `max_length`."""
    batch["completion_mask"][:] = 0


def make_a_hole(batch: dict[str, Tensor]) -> None:
    batch["attention_mask"][:, 1] = 0


def compile_eagerly(model: PreTrainedModel) -> None:
    """Makes compiled layers run their graphs without generated code."""
    compiled.BACKEND = "aot_eager"


stand_in = pytest.MonkeyPatch()
"""That for graphs, undone before the next training."""


def record_graphs(model: PreTrainedModel) -> None:
    recorder.install(stand_in)


UNSEEN_BY_STOCK = compile_eagerly, record_graphs
"""What prepares only the calls that fastdpo makes."""


def spoil_packed(model: PreTrainedModel) -> None:
    """Makes a model return wrong hidden states for packed batches, whose masks are int32."""

    def spoil(output, attention_mask, **kwargs):
        if attention_mask.dtype == torch.int32:
            output.last_hidden_state = 2 * output.last_hidden_state
        return output

    change(model.model, spoil)


def disqualify(model: PreTrainedModel) -> None:
    """Sets a configuration entry that disables the packed path and that Llama does not read."""
    model.config.alibi = True


def scale_gradients(model: PreTrainedModel) -> None:
    """Plants wrong gradients for the rest of the process."""
    faults.scaled_gradients(pytest.MonkeyPatch())


def plant_memory(model: PreTrainedModel) -> None:
    """Plants a device for the rest of the training, whose memory is that of a rank: the last one has least."""
    DeviceMemory(pytest.MonkeyPatch(), 2600 if dist.get_rank() == dist.get_world_size() - 1 else 10**6)


def watch_gradients(model: PreTrainedModel) -> None:
    """Adds a hook that sees each micro-batch."""
    next(model.parameters()).register_hook(lambda gradient: None)


def run_out_of_memory(model: PreTrainedModel) -> None:
    """Has the first forward with gradients run out of memory."""
    patch, count = pytest.MonkeyPatch(), calls.count_tokens

    def counting(*args: Any) -> None:
        count(*args)
        if torch.is_grad_enabled():
            patch.undo()
            raise torch.OutOfMemoryError

    patch.setattr(calls, "count_tokens", counting)


def with_frozen_tower(**options: Any) -> PreTrainedModel:
    """A multimodal model. FSDP2 does not reduce gradients of a tower that only some ranks run, with or without
    fastdpo.
    """
    model = tiny_multimodal(**options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("language_model" in name or "lm_head" in name)
    return model


def in_float64(**options: Any) -> PreTrainedModel:
    return double(tiny_model(**options))


HYBRID = dict(kind="falcon_h1", **FAMILIES["falcon_h1"][1])
"""A model of recurrences and attention, whose states are shared."""


MULTIMODAL = dict(name="llava", tie_word_embeddings=False)

TIED_MULTIMODAL = dict(name="llava", tie_word_embeddings=True, vision_config=dict(CLIP, image_size=8))
"""Images are 4 tokens, and the head is no unit of FSDP2: TRL does not average the gradient of one that is."""


def fsdp2(layer: str = "LlamaDecoderLayer", **config: Any) -> dict[str, Any]:
    return dict(fsdp=True, fsdp_config=dict(transformer_layer_cls_to_wrap=[layer], **config))


def zero(stage: int) -> dict[str, Any]:
    """Training arguments for DeepSpeed's ZeRO.

    The thresholds below which ZeRO-3 keeps parameters whole are 0: the defaults would leave a tiny
    model unsharded. Gradient clipping follows the trainer, which does not clip: DeepSpeed's default
    clips to a norm of 1, which would hide wrong gradient norms.
    """
    thresholds = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    return dict(
        deepspeed={
            "zero_optimization": {"stage": stage, **{f"stage3_{name}": 0 for name in thresholds}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
        }
    )


SIX_HEADS = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=6)
"""A number of heads that divides evenly among 2 and among 3 ranks."""

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
"""The number of ranks in the process of one. pytest's process reads only `Case.ranks`."""

CONTEXT_PARALLEL = dict(parallelism_config=ParallelismConfig(cp_size=RANKS))

TWO_GROUPS = dict(parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=max(RANKS // 2, 1)))

IN_TWO_GROUPS = dict(per_device_train_batch_size=4, per_device_eval_batch_size=4)
"""In one process, the batches of both groups."""

SEQUENCE_PARALLEL = dict(
    parallelism_config=ParallelismConfig(
        sp_size=RANKS, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    )
)

CHECKPOINTED = dict(gradient_checkpointing=True)

REENTRANT = dict(CHECKPOINTED, gradient_checkpointing_kwargs=dict(use_reentrant=True))

WHOLE_STEPS = dict(gradient_accumulation_steps=1, per_device_train_batch_size=4)

PRECOMPUTED = dict(precompute_ref_log_probs=True, evaluate=0)


FEW_STEPS = dict(gradient_accumulation_steps=1, max_steps=2)

LOGGED = dict(gradient_accumulation_steps=1, logging_steps=2, num_train_epochs=2)

UNEVEN = pairs(13, seed=14)
"""A number of pairs that leaves one pair for the last batches of 2 or 3 ranks.

The last batches are filled with the first pairs of the epoch.
"""

SEQUENTIAL = dict(train_sampling_strategy="sequential", gradient_accumulation_steps=1, num_train_epochs=2, evaluate=0)


def rows_of_sft(directory: Path, kind: str) -> Callable[..., list[dict]]:
    return lambda n, seed=0: shuffled(sft.rows, PAIRS, seed)


def rows_of_kto(directory: Path, kind: str) -> list[dict]:
    return shuffled(kto.rows, PAIRS)


def of_prompts(directory: Path, kind: str) -> list[dict]:
    return prompts(8)


COMPLETIONS = dict(per_device_train_batch_size=4, steps_per_generation=2, num_generations=4, evaluate=0)


def uneven(directory: Path, kind: str) -> list[dict[str, str]]:
    return UNEVEN


def in_one_process(ranks: int, **case: Any) -> Case:
    """The training of `UNEVEN` on `ranks` ranks, reproduced in one process by stock.

    Its batches are the concatenated batches of the ranks, with the last ones filled in the same
    way.
    """
    filled = UNEVEN + UNEVEN[: 2 * ranks - 1]
    options = dict(SEQUENTIAL, per_device_train_batch_size=2 * ranks)
    return Case(options, data=lambda directory, kind: filled, ranks=1, kinds=("stock",), **case)


def shared_by_ranks(
    what: str, options: dict[str, Any] | None = None, groups: int = 1, alone: str = "stock", **case: Any
) -> dict[str, Case]:
    """A training whose ranks, in one group or in two of two ranks, share each batch, and the same in one process."""
    parallel, size = (CONTEXT_PARALLEL, {}) if groups == 1 else (TWO_GROUPS, IN_TWO_GROUPS)
    options = options or {}
    return {
        f"context parallel {what}": Case(
            fsdp2() | parallel | options, ranks=2 * groups if size else None, **PATCHED, **case
        ),
        f"context parallel {what} in one process": Case(size | options, ranks=1, kinds=(alone,), **case),
    }


SABOTAGED = dict(kinds=("stock", "patched", "sabotaged"))
PATCHED = dict(kinds=("patched",))

BUDGET = dict(patch=dict(max_tokens=45))
"""Two or three micro-batches for each rank in a step of 4 pairs a rank."""

ACCUMULATED = dict(per_device_train_batch_size=1, gradient_accumulation_steps=6, num_train_epochs=2, evaluate=0)
ACCUMULATED_ROWS = dict(
    COMPLETIONS, per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=4
)
WATCHED = dict(prepare=watch_gradients, changed_on=on_first)
"""The first rank keeps the batches of TRL, and the others do not."""

LEARNED = dict(patch=dict(max_tokens="auto"), prepare=plant_memory)
COMPILED = dict(patch=dict(compile=True), prepare=compile_eagerly)
GRAPHS = dict(prepare=record_graphs)
VERIFIED = dict(patch=dict(verify=True))

REWARD = dict(make_model=reward_model, trainer="Reward")
SFT = dict(data=rows_of_sft, trainer="SFT")
KTO = dict(data=rows_of_kto, trainer="KTO")
GRPO = dict(options=COMPLETIONS, make_model=writer, data=of_prompts, trainer="GRPO")

IMAGES = dict(model=MULTIMODAL, make_model=tiny_multimodal)
TIED_IMAGES = dict(options=FEW_STEPS, model=TIED_MULTIMODAL, make_model=with_frozen_tower)
TENSOR_PARALLEL = dict(model=SIX_HEADS, tensor_parallel=True)
TIED = dict(tie_word_embeddings=True)

ENGINES = dict(ddp={}, fsdp2=fsdp2(), zero2=zero(2), zero3=zero(3))


def on(engines: str, what: str = "", options: dict[str, Any] | None = None, **case: Any) -> dict[str, Case]:
    """The cases of one training on several engines, by the names of both."""
    return {f"{name} {what}".rstrip(): Case(ENGINES[name] | (options or {}), **case) for name in engines.split()}


CASES = {
    **on("ddp fsdp2 zero2 zero3", **SABOTAGED),
    **on("ddp fsdp2 zero3", "lora", lora=True),
    **on("ddp", "without accumulation", WHOLE_STEPS),
    **on("ddp zero2 zero3", "precomputed", PRECOMPUTED, data=shared),
    **on("zero2 zero3", "precomputed lora", PRECOMPUTED, data=shared, lora=True),
    **on("ddp", "precomputed in memory", PRECOMPUTED, data=patched_in_memory),
    **on("fsdp2 zero2 zero3", "bf16", dict(bf16=True)),
    **on("fsdp2 zero2 zero3", "bf16 lora", dict(bf16=True), lora=True),
    **on("fsdp2 zero3", "tied", model=TIED),
    **on("fsdp2", "checkpointing", CHECKPOINTED),
    **on("fsdp2", "reentrant checkpointing", REENTRANT),
    "fsdp2 activation checkpointing": Case(fsdp2(activation_checkpointing=True)),
    "fsdp2 hybrid": Case(fsdp2("FalconH1DecoderLayer"), HYBRID),
    **on("zero3", "hybrid", model=HYBRID),
    **on("ddp fsdp2 zero2 zero3", "compiled", dict(gradient_checkpointing=False), **COMPILED),
    **on("ddp fsdp2 zero2 zero3", "graphs", dict(gradient_checkpointing=False), **GRAPHS),
    **on("ddp fsdp2 zero2 zero3", "compiled, lora", CHECKPOINTED, lora=True, **COMPILED),
    **on("ddp fsdp2 zero2 zero3", "graphs, lora", CHECKPOINTED, lora=True, **GRAPHS),
    **on("ddp fsdp2 zero2 zero3", "reward", **REWARD),
    **on("ddp fsdp2 zero2 zero3", "reward lora", lora=True, **REWARD),
    **on("ddp", "multimodal", FEW_STEPS, kinds=("stock",), **IMAGES),
    **on("fsdp2", "multimodal", FEW_STEPS, **IMAGES),
    # Ends of epochs, logs and errors
    **on("ddp", "uneven end", SEQUENTIAL, data=uneven),
    **on("ddp", "reward token budget uneven end", SEQUENTIAL, data=uneven, **REWARD, **BUDGET),
    **{f"uneven end of {n} ranks in one process": in_one_process(n) for n in (2, 3)},
    **{f"reward uneven end of {n} ranks in one process": in_one_process(n, **REWARD) for n in (2, 3)},
    **on("ddp", "main logs", LOGGED, trainer_class=with_callback(MainLogs)),
    **on("ddp", "main reads", LOGGED, trainer_class=with_callback(MainReads)),
    **on("ddp", "unpatched", LOGGED, trainer_class=with_callback(Unpatches)),
    **on("ddp", "stock raises", LOGGED, kinds=("stock",), trainer_class=LastRaises),
    **on("ddp", "patched raises", LOGGED, trainer_class=LastRaises, **PATCHED),
    # Steps of a number of tokens
    **on("ddp fsdp2 zero2 zero3", "token budget", WHOLE_STEPS, **BUDGET),
    **on(
        "ddp",
        "token budget grouped by length",
        dict(WHOLE_STEPS, train_sampling_strategy="group_by_length", remove_unused_columns=False, evaluate=0),
        data=lambda directory, kind: [{**row, "length": len(row["chosen"])} for row in pairs(PAIRS)],
        **BUDGET,
    ),
    **on("ddp", "token budget uneven end", dict(WHOLE_STEPS, num_train_epochs=2, evaluate=0), data=uneven, **BUDGET),
    **on("ddp fsdp2 zero3", "reward token budget", WHOLE_STEPS, **REWARD, **BUDGET),
    **on("fsdp2 zero2 zero3", "SFT token budget", dict(evaluate=0), **SFT, **BUDGET),
    **on("fsdp2 zero2 zero3", "KTO token budget", dict(evaluate=0), **KTO, **BUDGET),
    **on("fsdp2 zero2 zero3", "GRPO token budget", **GRPO, **BUDGET),
    **on("ddp fsdp2 zero2", "own", ACCUMULATED),
    **on("ddp", "own, watched", ACCUMULATED, **WATCHED),
    **on("ddp", "reward own, watched", ACCUMULATED, **REWARD, **WATCHED),
    **on("ddp", "SFT own, watched", ACCUMULATED, **SFT, **WATCHED),
    **on("ddp", "GRPO own, watched", **(GRPO | dict(options=ACCUMULATED_ROWS)), **WATCHED),
    **on("ddp", "KTO own", ACCUMULATED | dict(per_device_train_batch_size=2, gradient_accumulation_steps=3), **KTO),
    **on("ddp", "own, out of memory", ACCUMULATED, prepare=run_out_of_memory, changed_on=on_last),
    **on("ddp fsdp2", "learned tokens", dict(num_train_epochs=3, evaluate=0), **LEARNED),
    **on("ddp", "learned tokens of rows", dict(num_train_epochs=3, evaluate=0), **SFT, **LEARNED),
    # Gradients that are verified
    **on("ddp fsdp2 zero2 zero3", "verified", **VERIFIED),
    **on(
        "ddp", "verified, wrong on the last rank", **(PATCHED | VERIFIED), prepare=scale_gradients, changed_on=on_last
    ),
    # Batches and models that one rank or none can pack
    **on("ddp fsdp2 zero3", "holes", change=make_a_hole),
    **on("ddp fsdp2 zero3", "holes on the last rank", change=make_a_hole, changed_on=on_last),
    **on("ddp fsdp2 zero3", "no labels on the last rank", change=lose_all_labels, changed_on=on_last),
    **on("fsdp2 zero3", "fails the probe on the last rank", prepare=spoil_packed, changed_on=on_last),
    **on("fsdp2 zero3", "not qualified on the last rank", prepare=disqualify, changed_on=on_last),
    **on("fsdp2 zero3", "each call of the first rank", prepare=change_each_call, changed_on=on_first),
    **on(
        "fsdp2 zero3",
        "model changes on the first rank",
        dict(gradient_accumulation_steps=1),
        trainer_class=with_callback(ChangesModel),
    ),
    **on("fsdp2", "images on the first rank", prepare=add_images, changed_on=on_first, **TIED_IMAGES),
    **on("fsdp2 zero3", "image-arguments on the first rank", prepare=change_types, changed_on=on_first, **TIED_IMAGES),
    # Layers and sequences that ranks share
    "tensor parallel": Case(**TENSOR_PARALLEL),
    "tensor parallel tied": Case(**(TENSOR_PARALLEL | dict(model=SIX_HEADS | TIED))),
    "fsdp2 of tensor parallel": Case(dict(evaluate=0), in_two_halves=True, ranks=4, **TENSOR_PARALLEL),
    **shared_by_ranks("with checkpoints", CHECKPOINTED),
    **shared_by_ranks("lora", CHECKPOINTED, lora=True),
    **shared_by_ranks("precomputed", PRECOMPUTED, data=shared),
    **shared_by_ranks("of uneven ends", SEQUENTIAL | dict(evaluate=5), data=uneven),
    **shared_by_ranks("in two groups", groups=2),
    **shared_by_ranks("in float64", CHECKPOINTED, make_model=in_float64, alone="patched"),
    "context parallel compiled": Case(fsdp2() | CONTEXT_PARALLEL, **PATCHED, **COMPILED),
    "context parallel token budget": Case(fsdp2() | CONTEXT_PARALLEL | WHOLE_STEPS, **PATCHED, **BUDGET),
    **{
        f"{parallelism} {kind}": Case(options, SIX_HEADS, kinds=(kind,))
        for parallelism, options in {
            "context parallel": dict(fsdp2(), **CONTEXT_PARALLEL),
            "sequence parallel": dict(zero(2), **SEQUENCE_PARALLEL),
        }.items()
        for kind in ("stock", "patched")
    },
}

for reason, prepare in (AGREED | AROUND_CALLS | {"attention-dropout": drop_attention}).items():
    CASES |= on("fsdp2 zero3", f"{reason} on the first rank", FEW_STEPS, prepare=prepare, changed_on=on_first)
