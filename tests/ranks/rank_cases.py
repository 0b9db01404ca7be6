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
from rank_trainers import (
    BecomesStrict,
    ChangesModel,
    ChangesShard,
    Forgets,
    LastRaises,
    MainLogs,
    MainReads,
    Unpatches,
    with_callback,
)
from torch import Tensor
from transformers import PreTrainedModel
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from fastdpo.models import compiled
from tests.support import faults
from tests.support.kernels import recorder
from tests.support.models.families import HYBRID as FAMILIES
from tests.support.models.multimodal import CLIP, tiny_multimodal
from tests.support.models.trained_effects import EFFECTS
from tests.support.stand_ins.device_memory import DeviceMemory
from tests.support.trl import kto, sft
from tests.support.trl.dpo import dataset, long_pairs, pairs, tiny_model
from tests.support.trl.groups import prompts
from tests.support.trl.online import writer
from tests.support.trl.reward import reward_model
from tests.support.workers.row_budgets import shuffled

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
        kinds: any of "stock", "patched", "again" and "sabotaged". Again is patched. Sabotaged is
            patched, with one label removed on the last rank.
        patch: options of `fastdpo.patch`.
        in_directory: whether the reference memory is kept in a directory that all kinds share.
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
    in_directory: bool = False
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


def record_graphs(model: PreTrainedModel) -> None:
    recorder.install(pytest.MonkeyPatch())


def spoil_packed(model: PreTrainedModel) -> None:
    """Makes a model return wrong hidden states for packed batches, whose masks are int32."""

    def spoil(module, args, kwargs, output):
        if kwargs["attention_mask"].dtype == torch.int32:
            output.last_hidden_state = 2 * output.last_hidden_state
        return output

    model.model.register_forward_hook(spoil, with_kwargs=True)


def disqualify(model: PreTrainedModel) -> None:
    """Sets a configuration entry that disables the packed path and that Llama does not read."""
    model.config.alibi = True


def scale_gradients(model: PreTrainedModel) -> None:
    """Plants wrong gradients for the rest of the process."""
    faults.scaled_gradients(pytest.MonkeyPatch())


def plant_memory(model: PreTrainedModel) -> None:
    """Plants a device for the rest of the training, whose memory is that of a rank: the last one has least."""
    DeviceMemory(pytest.MonkeyPatch(), 2600 if dist.get_rank() == dist.get_world_size() - 1 else 10**6)


def with_frozen_tower(**options: Any) -> PreTrainedModel:
    """A multimodal model. FSDP2 does not reduce gradients of a tower that only some ranks run, with or without
    fastdpo.
    """
    model = tiny_multimodal(**options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("language_model" in name or "lm_head" in name)
    return model


SABOTAGED = ("stock", "patched", "sabotaged")


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

SEQUENCE_PARALLEL = dict(
    parallelism_config=ParallelismConfig(
        sp_size=RANKS,
        sp_backend="deepspeed",
        sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa"),
    )
)

REENTRANT = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True))

WHOLE_STEPS = dict(gradient_accumulation_steps=1, per_device_train_batch_size=4)

BUDGET = dict(max_tokens=45)
"""Two or three micro-batches for each rank in a step of 4 pairs a rank."""

VERIFIED = dict(verify=True)

REMEMBERED = dict(reference_memory=True)

TWO_EPOCHS = dict(num_train_epochs=2, eval_strategy="epoch")

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

PROMPTS = 6


def of_few_prompts(directory: Path, kind: str) -> list[dict[str, str]]:
    """Pairs of which every sixth has the same prompt. For stock, those of a prompt stand together."""
    prompts = [row["prompt"] for row in long_pairs(((12, 1, 1),) * PROMPTS)]
    rows = [{**row, "prompt": prompts[i % PROMPTS]} for i, row in enumerate(pairs(PAIRS))]
    return sorted(rows, key=lambda row: prompts.index(row["prompt"])) if kind == "stock" else rows


def in_one_process(ranks: int) -> Case:
    """The training of `UNEVEN` on `ranks` ranks, reproduced in one process.

    Its batches are the concatenated batches of the ranks, with the last ones filled in the same
    way.
    """
    filled = UNEVEN + UNEVEN[: 2 * ranks - 1]
    return Case(dict(SEQUENTIAL, per_device_train_batch_size=2 * ranks), data=lambda directory, kind: filled)


CASES = {
    "ddp": Case(kinds=SABOTAGED),
    "ddp lora": Case(lora=True),
    "ddp without accumulation": Case(WHOLE_STEPS),
    "ddp token budget": Case(WHOLE_STEPS, patch=BUDGET),
    "ddp token budget grouped by length": Case(
        dict(WHOLE_STEPS, train_sampling_strategy="group_by_length", remove_unused_columns=False, evaluate=0),
        patch=BUDGET,
        data=lambda directory, kind: [{**row, "length": len(row["chosen"])} for row in pairs(PAIRS)],
    ),
    "ddp token budget uneven end": Case(
        dict(WHOLE_STEPS, num_train_epochs=2, evaluate=0), patch=BUDGET, data=lambda directory, kind: UNEVEN
    ),
    "fsdp2 token budget": Case(dict(fsdp2(), **WHOLE_STEPS), patch=BUDGET),
    "zero2 token budget": Case(dict(zero(2), **WHOLE_STEPS), patch=BUDGET),
    "zero3 token budget": Case(dict(zero(3), **WHOLE_STEPS), patch=BUDGET),
    **{
        f"{engine} grouped prompts{' token budget' if budget else ''}": Case(
            dict(options, **SEQUENTIAL | WHOLE_STEPS), data=of_few_prompts, patch=dict(budget, group_prompts=True)
        )
        for engine, options in {"ddp": {}, "fsdp2": fsdp2(), "zero3": zero(3)}.items()
        for budget in ({}, dict(max_tokens=80))
    },
    **{
        f"{engine} learned tokens{' of rows' * (trainer == 'SFT')}": Case(
            dict(options, num_train_epochs=3, evaluate=0),
            prepare=plant_memory,
            patch=dict(max_tokens="auto"),
            **(dict(data=rows_of_sft, trainer="SFT") if trainer == "SFT" else {}),
        )
        for engine, options, trainer in (("ddp", {}, "DPO"), ("fsdp2", fsdp2(), "DPO"), ("ddp", {}, "SFT"))
    },
    "ddp precomputed": Case(dict(precompute_ref_log_probs=True, evaluate=0), data=shared),
    "ddp precomputed in memory": Case(dict(precompute_ref_log_probs=True, evaluate=0), data=patched_in_memory),
    **{
        f"{engine} precomputed{' lora' if lora else ''}": Case(
            dict(options, precompute_ref_log_probs=True, evaluate=0), lora=lora, data=shared
        )
        for engine, options in {"zero2": zero(2), "zero3": zero(3)}.items()
        for lora in (False, True)
    },
    "ddp holes": Case(change=make_a_hole),
    "ddp holes on the last rank": Case(change=make_a_hole, changed_on=on_last),
    "ddp no labels on the last rank": Case(change=lose_all_labels, changed_on=on_last),
    "ddp uneven end": Case(SEQUENTIAL, data=lambda directory, kind: UNEVEN),
    "uneven end of 2 ranks in one process": in_one_process(2),
    "uneven end of 3 ranks in one process": in_one_process(3),
    "ddp main logs": Case(LOGGED, trainer_class=with_callback(MainLogs)),
    "ddp main reads": Case(LOGGED, trainer_class=with_callback(MainReads)),
    "ddp verified": Case(patch=VERIFIED),
    "ddp verified, wrong on the last rank": Case(
        kinds=("patched",), patch=VERIFIED, prepare=scale_gradients, changed_on=on_last
    ),
    **{
        f"{engine} {what}{', lora' if lora else ''}": Case(
            dict(options, gradient_checkpointing=lora), lora=lora, patch=patch, prepare=prepare
        )
        for engine, options in dict(ddp={}, zero2=zero(2), fsdp2=fsdp2(), zero3=zero(3)).items()
        for what, patch, prepare in (
            ("compiled", dict(compile=True), compile_eagerly),
            ("graphs", dict(graphs=True), record_graphs),
        )
        for lora in (False, True)
    },
    "ddp unpatched": Case(LOGGED, trainer_class=with_callback(Unpatches)),
    "ddp stock raises": Case(LOGGED, kinds=("stock",), trainer_class=LastRaises),
    "ddp patched raises": Case(LOGGED, kinds=("patched",), trainer_class=LastRaises),
    "fsdp2": Case(fsdp2(), kinds=SABOTAGED),
    "fsdp2 bf16": Case(dict(fsdp2(), bf16=True)),
    "fsdp2 bf16 lora": Case(dict(fsdp2(), bf16=True), lora=True),
    "fsdp2 verified": Case(fsdp2(), patch=VERIFIED),
    "fsdp2 verified, strict": Case(
        fsdp2(), kinds=("patched",), patch=VERIFIED, trainer_class=with_callback(BecomesStrict)
    ),
    "fsdp2 tied": Case(fsdp2(), dict(tie_word_embeddings=True)),
    "fsdp2 lora": Case(fsdp2(), lora=True),
    "fsdp2 checkpointing": Case(dict(fsdp2(), gradient_checkpointing=True)),
    "fsdp2 reentrant checkpointing": Case(dict(fsdp2(), **REENTRANT)),
    "fsdp2 activation checkpointing": Case(fsdp2(activation_checkpointing=True)),
    "fsdp2 hybrid": Case(fsdp2("FalconH1DecoderLayer"), HYBRID),
    "fsdp2 holes": Case(fsdp2(), change=make_a_hole),
    "fsdp2 holes on the last rank": Case(fsdp2(), change=make_a_hole, changed_on=on_last),
    "fsdp2 fails the probe on the last rank": Case(fsdp2(), prepare=spoil_packed, changed_on=on_last),
    "fsdp2 not qualified on the last rank": Case(fsdp2(), prepare=disqualify, changed_on=on_last),
    "fsdp2 no labels on the last rank": Case(fsdp2(), change=lose_all_labels, changed_on=on_last),
    **{
        f"{engine} reward{' lora' if lora else ''}": Case(options, make_model=reward_model, lora=lora, trainer="Reward")
        for engine, options in {"ddp": {}, "fsdp2": fsdp2(), "zero2": zero(2), "zero3": zero(3)}.items()
        for lora in (False, True)
    },
    **{
        f"{engine} reward token budget": Case(
            dict(options, **WHOLE_STEPS), make_model=reward_model, patch=BUDGET, trainer="Reward"
        )
        for engine, options in {"ddp": {}, "fsdp2": fsdp2(), "zero3": zero(3)}.items()
    },
    **{
        f"{engine} {trainer} token budget": Case(dict(options, evaluate=0), data=data, patch=BUDGET, trainer=trainer)
        for engine, options in {"fsdp2": fsdp2(), "zero2": zero(2), "zero3": zero(3)}.items()
        for trainer, data in {"SFT": rows_of_sft, "KTO": rows_of_kto}.items()
    },
    **{
        f"{engine} GRPO token budget": Case(
            dict(options, **COMPLETIONS), make_model=writer, data=of_prompts, patch=BUDGET, trainer="GRPO"
        )
        for engine, options in {"fsdp2": fsdp2(), "zero2": zero(2), "zero3": zero(3)}.items()
    },
    **{
        f"{engine} {name}": Case(dict(options, **FEW_STEPS), prepare=effect.plant)
        for engine, options in {"fsdp2": fsdp2(), "zero3": zero(3)}.items()
        for name, effect in EFFECTS.items()
    },
    "ddp multimodal": Case(FEW_STEPS, MULTIMODAL, tiny_multimodal, kinds=("stock",)),
    "fsdp2 multimodal": Case(dict(fsdp2(), **FEW_STEPS), MULTIMODAL, tiny_multimodal),
    "zero2": Case(zero(2), kinds=SABOTAGED),
    "zero3": Case(zero(3), kinds=SABOTAGED),
    **{
        f"zero{stage} bf16{' lora' if lora else ''}": Case(dict(zero(stage), bf16=True), lora=lora)
        for stage in (2, 3)
        for lora in (False, True)
    },
    "zero2 verified": Case(zero(2), patch=VERIFIED),
    "zero3 verified": Case(zero(3), patch=VERIFIED),
    "zero3 tied": Case(zero(3), dict(tie_word_embeddings=True)),
    "zero3 lora": Case(zero(3), lora=True),
    "zero3 hybrid": Case(zero(3), HYBRID),
    "zero3 holes": Case(zero(3), change=make_a_hole),
    "zero3 holes on the last rank": Case(zero(3), change=make_a_hole, changed_on=on_last),
    "zero3 fails the probe on the last rank": Case(zero(3), prepare=spoil_packed, changed_on=on_last),
    "zero3 not qualified on the last rank": Case(zero(3), prepare=disqualify, changed_on=on_last),
    "zero3 no labels on the last rank": Case(zero(3), change=lose_all_labels, changed_on=on_last),
    **{
        f"{engine} {reason} on the first rank": Case(dict(options, **FEW_STEPS), prepare=prepare, changed_on=on_first)
        for engine, options in {"fsdp2": fsdp2(), "zero3": zero(3)}.items()
        for reason, prepare in (AGREED | AROUND_CALLS | {"attention-dropout": drop_attention}).items()
    },
    **{
        f"{engine} {what} on the first rank": Case(
            dict(options, **FEW_STEPS), TIED_MULTIMODAL, with_frozen_tower, prepare=prepare, changed_on=on_first
        )
        for engine, options, what, prepare in (
            ("fsdp2", fsdp2(), "images", add_images),
            ("fsdp2", fsdp2(), "image-arguments", change_types),
            ("zero3", zero(3), "image-arguments", change_types),
        )
    },
    **{
        f"{engine} each call of the first rank": Case(options, prepare=change_each_call, changed_on=on_first)
        for engine, options in {"fsdp2": fsdp2(), "zero3": zero(3)}.items()
    },
    **{
        f"{engine} model changes on the first rank": Case(
            dict(options, gradient_accumulation_steps=1), trainer_class=with_callback(ChangesModel)
        )
        for engine, options in {"fsdp2": fsdp2(), "zero3": zero(3)}.items()
    },
    **{
        f"{engine} remembered{' lora' if lora else ''}": Case(dict(options, **TWO_EPOCHS), lora=lora, patch=REMEMBERED)
        for engine, options in {"fsdp2": fsdp2(), "zero2": zero(2), "zero3": zero(3)}.items()
        for lora in (False, True)
    },
    **{
        f"{engine} {what}": Case(dict(options, **TWO_EPOCHS), patch=REMEMBERED, trainer_class=with_callback(callback))
        for engine, options in {"fsdp2": fsdp2(), "zero3": zero(3)}.items()
        for what, callback in {"forgotten on the last rank": Forgets, "changed on the last rank": ChangesShard}.items()
    },
    **{
        f"{engine} remembered in a directory": Case(options, kinds=("stock", "patched", "again"), in_directory=True)
        for engine, options in {"ddp": {}, "fsdp2": fsdp2(), "zero3": zero(3)}.items()
    },
    "tensor parallel": Case(model=SIX_HEADS, tensor_parallel=True),
    "tensor parallel tied": Case(model=dict(SIX_HEADS, tie_word_embeddings=True), tensor_parallel=True),
    "tensor parallel checkpointing": Case(dict(gradient_checkpointing=True), SIX_HEADS, tensor_parallel=True),
    "tensor parallel lora": Case(model=SIX_HEADS, lora=True, tensor_parallel=True),
    "tensor parallel remembered": Case(TWO_EPOCHS, SIX_HEADS, tensor_parallel=True, patch=REMEMBERED),
    "tensor parallel remembered in a directory": Case(
        model=SIX_HEADS, tensor_parallel=True, kinds=("stock", "patched", "again"), in_directory=True
    ),
    **{
        f"fsdp2 of tensor parallel{kind}": Case(
            dict(evaluate=0), model, tensor_parallel=True, in_two_halves=True, ranks=4
        )
        for kind, model in {"": SIX_HEADS, " tied": dict(SIX_HEADS, tie_word_embeddings=True)}.items()
    },
    **{
        f"{parallelism} {kind}": Case(options, SIX_HEADS, kinds=(kind,))
        for parallelism, options in {
            "context parallel": dict(fsdp2(), **CONTEXT_PARALLEL),
            "sequence parallel": dict(zero(2), **SEQUENCE_PARALLEL),
        }.items()
        for kind in ("stock", "patched")
    },
    "tensor parallel head-hooks on the first rank": Case(
        FEW_STEPS, SIX_HEADS, tensor_parallel=True, prepare=AGREED["head-hooks"], changed_on=on_first
    ),
    "tensor parallel holes": Case(model=SIX_HEADS, tensor_parallel=True, change=make_a_hole),
}
