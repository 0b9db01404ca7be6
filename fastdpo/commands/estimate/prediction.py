"""Predicts tokens and memory of a training.

The dataset is tokenized by TRL. No weights are loaded: the memory is that of a simulated step
(`simulation`) on real batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from tqdm.auto import tqdm

from ... import checks
from ...batching import Kinship, kinship_of
from ...data.columns import COLUMNS
from ...data.files import load_preferences
from ...lengths import pair_lengths
from ..model_names import is_reward_model
from .batches import LAYOUTS, PADDING, Batches, prepared, prepared_rows
from .fitting import largest_fitting
from .simulation import Setup, StepMemory, returns_router_logits, simulate

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig

OP = "estimate"
SIDES = {"stock": "padded", "patched": "shared"}
"""TRL without and with fastdpo, and the layouts of their batches."""


@dataclass(frozen=True)
class Estimate:
    """Result of `estimate`.

    Attributes:
        pairs: number of pairs of the dataset.
        batch: number of pairs of a batch.
        tokens: by "median" and "largest", the tokens of a batch by their layout: "padded" (TRL),
            "packed" (`share_prompts=False`) and "shared". The median is that of the batches of a
            shuffled epoch; the largest batch holds the largest pairs of the dataset, so that no
            batch has more tokens.
        epoch: the tokens of all batches of a shuffled epoch (see `Batches.epoch`).
        memory: by "median" and "largest", the memory of a step by side: "stock" and "patched".
        limit: bytes of the device, or None.
        fits: by side, the largest number of pairs of which any fit into `limit` as a batch.
    """

    pairs: int
    batch: int
    tokens: dict[str, dict[str, int]]
    epoch: dict[str, int]
    memory: dict[str, dict[str, StepMemory]]
    limit: int | None
    fits: dict[str, int]


def estimate(
    model: str,
    dataset: str,
    batch: int,
    *,
    setup: Callable[[PretrainedConfig], Setup] = Setup,
    limit: int | None = None,
    max_length: int | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimates the tokens and the memory of a training's steps.

    Args:
        model: path of a model, of which only the configuration and the tokenizer are read.
        dataset: path of preference pairs (see `check.data`).
        batch: number of pairs of a batch on each device.
        setup: returns the training's `Setup` for the model's configuration.
        limit: bytes of a device, of which the largest batch that fits is looked for.
        max_length: as in `DPOConfig`.
        progress: show progress bars.

    Raises:
        OSError, ValueError: the model or the dataset cannot be read, an argument is malformed, or
            fastdpo does not support the model.
    """
    from transformers import AutoConfig

    checks.require_positive_integer(OP, "batch", batch)
    config = AutoConfig.from_pretrained(model)
    training = replace(setup(config), rewards=is_reward_model(OP, model))
    if training.rewards and training.precomputed_reference:
        rule = "be False for a reward model, which has no reference"
        raise ValueError(f"{OP}: precomputed_reference must {rule}; got True")
    batches, kinship = _batches(model, load_preferences(Path(dataset)), max_length, training, progress)
    checks.require(batch <= len(batches), OP, "batch", "be at most the {} pairs of the dataset", batch, len(batches))
    of = {"median": batches.median, "largest": batches.largest}
    tokens = {size: {x: int(batches.tokens(x, choose(x, batch))) for x in LAYOUTS} for size, choose in of.items()}
    with tqdm(desc="Simulating steps", disable=not progress) as bar:

        def memory(side: str, size: str, n: int) -> StepMemory:
            step = simulate(training, batches.collate(of[size](SIDES[side], n)), patched=side == "patched")
            bar.update()
            return step

        found = {size: {side: memory(side, size, batch) for side in SIDES} for size in of}
        fits = {}
        for side in SIDES if limit is not None else ():
            known = {batch: found["largest"][side].total}

            def total(n: int, side: str = side, known: dict[int, int] = known) -> int:
                return known[n] if n in known else memory(side, "largest", n).total

            fits[side] = largest_fitting(total, cast(int, limit), batch, len(batches))
    return Estimate(len(batches), batch, tokens, batches.epoch(kinship, batch), found, limit, fits)


def _batches(
    model: str, pairs: Dataset, max_length: int | None, training: Setup, progress: bool
) -> tuple[Batches, Kinship]:
    from transformers import AutoTokenizer
    from trl.trainer import dpo_trainer, reward_trainer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.reward_config import RewardConfig

    tokenizer, kind = AutoTokenizer.from_pretrained(model), RewardConfig if training.rewards else DPOConfig
    with TemporaryDirectory() as directory:
        config: Any = kind(output_dir=directory, max_length=max_length, use_cpu=True, report_to="none")
    if training.rewards:
        rows = prepared_rows(pairs, tokenizer, config)
        lengths = pair_lengths(rows, rewards=True, op=OP, progress=progress)
        collator = reward_trainer.DataCollatorForPreference(pad_token_id=PADDING)
        return Batches(rows, lengths, collator), kinship_of(rows, COLUMNS[1:2], op=OP)
    dataset = prepared(pairs, tokenizer, config)
    lengths = pair_lengths(dataset, max_length, config.truncation_mode, op=OP, progress=progress)
    truncation = {name: getattr(config, name) for name in ("max_length", "truncation_mode")}
    collator = dpo_trainer.DataCollatorForPreference(pad_token_id=PADDING, **truncation)
    batches = Batches(dataset, lengths, collator, returns_router_logits(training.config))
    return batches, kinship_of(dataset, op=OP)
