"""Reference log-probabilities of a preference data set: computed once, kept on disk, and continued after a kill.

    from fastdpo import ref_logps

    logps = ref_logps.precompute(model, dataset, cache_dir="cache")  # .chosen, .rejected: float32 [N], nats
    dataset = ref_logps.with_ref_logps(dataset, logps)  # + columns ref_chosen_logps, ref_rejected_logps

`fastdpo.patch()` has TRL's `precompute_ref_log_probs=True` done by it. Needs transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..models import forward
from . import keys, passes, ranks, scoring
from .pairs import Pairs, positive
from .passes import TOKENS_PER_BATCH, RefLogps
from .shards import Shards

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["RefLogps", "precompute", "with_ref_logps"]

OUTPUTS = ("ref_chosen_logps", "ref_rejected_logps")


def precompute(
    model: nn.Module,
    dataset: Dataset | Sequence[Mapping],
    *,
    cache_dir: str | os.PathLike | None = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
    adapter: str | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> RefLogps:
    """Log-probabilities of every chosen and rejected completion, as TRL's DPOTrainer takes them of its reference.

    One pass without gradients, in evaluation mode, packed, with shared prompts and a fused head: longest pairs first,
    so that a lack of memory shows at once. A model that can't be packed is run by its own forward, one pair at a time,
    and the reason is logged (`FASTDPO_STRICT=1`: raised). Under autocast it runs under autocast.

    With `cache_dir`, computed values are stored about every 30 seconds under a hash of everything that they depend on:
    the model's modules, tensors and configuration, its active adapter, the token ids, truncation, ld_alpha and the
    precision. A process that was killed is continued by the next one; SIGTERM stores computed values before it ends
    the process, unless the program handles it. Two processes that compute the same values wait for each other.

    Values are not cached, and one warning says why, if the directory is not writable, or if the model runs hooks,
    forwards or other functions that don't come from an installed package: the hash can't tell them apart.

    With torch.distributed initialised every rank calls it with the same arguments, computes its part and returns all
    of it, whether or not ranks see one another's disks. Not for tensor parallelism.

    Memory: the activations of `tokens_per_batch` tokens in one layer, and tiles of logits. Without packing, the logits
    of one pair, or of one batch of a model in which only running it shows that it can't be packed.

    Args:
        model: a causal LM of transformers, or that in PEFT, DDP or FSDP2.
        dataset: N rows with the ids of tokens in `prompt_ids`, `chosen_ids` and `rejected_ids`, as TRL makes them
            (`DPOTrainer.train_dataset`): a `datasets.Dataset` or a sequence of mappings.
        cache_dir: where values are kept. None: nowhere.
        max_length: tokens of prompt and completion that are kept, or None: all.
        truncation_mode: which ones: "keep_start" or "keep_end".
        ld_alpha: in [0, 1], LD-DPO's weight of what a completion has beyond the length of its pair's other. None: 1.
        adapter: of a PeftModel, the adapter that is part of the reference. None: all adapters are off.
        tokens_per_batch: packed tokens in one call of the model. A longer pair is a batch of its own.

    Returns:
        `RefLogps`, float32 [N] each, in the order of the data set. 0 where truncation has left no completion.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; or a stored file is not what it should be: it is named,
            and nothing of it is used. A log-probability is not finite.
        NotImplementedError: parameters that can't be read for the cache's key.
        NotFused: with `FASTDPO_STRICT=1`, a model can't be packed, or values can't be cached.
    """
    if ld_alpha is not None:
        if isinstance(ld_alpha, bool) or not isinstance(ld_alpha, Real) or not 0 <= ld_alpha <= 1:
            raise ValueError(f"precompute: ld_alpha must lie in [0, 1] or be None; got {ld_alpha!r}")
        ld_alpha = float(ld_alpha)
    tokens_per_batch = positive("tokens_per_batch", tokens_per_batch)
    base = scoring.base_of(model)
    pairs = Pairs(dataset, max_length, truncation_mode, scoring.vocabulary_of(base))
    device = scoring.device_of(base)
    with (
        scoring.evaluating(model),
        scoring.with_adapter(model, adapter),
        scoring.scoring(model, pairs, ld_alpha) as score,
    ):
        bounds = passes.Bounds(tokens_per_batch, None if forward.is_fused(base) else 1)
        options = (pairs.max_length, truncation_mode, ld_alpha, bounds)
        ranks.require_equal_work(pairs.digest, *options, cache_dir is None)
        shards = None
        if cache_dir is not None and not ranks.cache_disabled(keys.uncacheable_reason(model)):
            key = keys.key(pairs, keys.model_digest(base), _precision(device), ld_alpha)
            ranks.require_equal_work(key)
            shards = Shards(Path(cache_dir) / key, key, len(pairs))
        return passes.run(score, pairs, shards, bounds, device)


def with_ref_logps(dataset: Any, logps: RefLogps) -> Any:
    """The data set with the columns `ref_chosen_logps` and `ref_rejected_logps`, float32.

    They are columns of TRL's signature: `remove_unused_columns` leaves them, and its collator makes [B] tensors of
    them. A patched DPOTrainer with `precompute_ref_log_probs=True` takes them as they are instead of computing them.

    Args:
        dataset: N rows: a `datasets.Dataset`, or a sequence of mappings, of which a list of dicts is made.
        logps: of the same N rows.

    Raises:
        ValueError: the numbers of rows differ, or the columns are there already.
    """
    if len(dataset) != len(logps.chosen):
        raise ValueError(f"with_ref_logps: logps must be of the {len(dataset)} rows; got {len(logps.chosen)}")
    columns = dict(zip(OUTPUTS, (x.to("cpu", torch.float32).numpy() for x in logps), strict=True))
    if hasattr(dataset, "add_column"):
        names, result = set(dataset.column_names), dataset
        for name, column in columns.items() if names.isdisjoint(OUTPUTS) else ():
            result = result.add_column(name, column)
    else:
        names = set().union(*dataset)
        result = [{**row, **{name: float(x[i]) for name, x in columns.items()}} for i, row in enumerate(dataset)]
    if not names.isdisjoint(OUTPUTS):
        raise ValueError(f"with_ref_logps: dataset must not have {' and '.join(OUTPUTS)} yet; got {sorted(names)}")
    return result


def _precision(device: torch.device) -> str:
    if not torch.is_autocast_enabled(device.type):
        return "none"
    return str(torch.get_autocast_dtype(device.type))
