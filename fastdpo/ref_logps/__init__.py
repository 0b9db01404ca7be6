"""Reference log-probabilities of a preference dataset: computed once, cached on disk, and
resumable.

    from fastdpo import ref_logps

    logps = ref_logps.precompute(model, dataset, cache_dir="cache")  # .chosen, .rejected: float32 [N], nats
    dataset = ref_logps.with_ref_logps(dataset, logps)  # + columns ref_chosen_logps, ref_rejected_logps

After `fastdpo.patch()`, TRL's `precompute_ref_log_probs=True` uses it. Requires transformers.

In the order of a run:

    pairs.py         the pairs, their truncation, and the batches that they are run in
    keys.py          whether and under which key values are stored, with module_state.py (what a model's
                     outputs depend on) and digests.py (hashes of configurations and tensors)
    lengths.py       the lengths of pairs, and how many tokens they cost
    shards.py        the files of a key
    scorer.py        a model that scores pairs
    filling.py       one pass over the pairs that are not stored yet
    ranks.py         agreement between the ranks that share it
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import checks
from ..data.columns import REFERENCE_COLUMNS, columns_of_rows, require_dataset
from ..models import forward, parts
from ..models.adapters import with_adapter
from ..models.examine.comparable import in_evaluation_mode
from ..models.examine.support import rope_reason
from . import filling, keys, scorer
from .filling import TOKENS_PER_BATCH, RefLogps
from .pairs import Pairs

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

__all__ = ["RefLogps", "precompute", "with_ref_logps"]


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
    """Computes the summed log-probability of every chosen and rejected completion, as TRL's
    DPOTrainer does.

    One pass without gradients, in evaluation mode, packed, with shared prompts and a fused head.
    The longest pairs come first, so that a lack of memory shows at once. A model that cannot be
    packed runs its own forward on one pair at a time, and the reason is logged. An active autocast
    applies.

    With `cache_dir`, computed values are stored about every 30 seconds, under a hash of everything
    that they depend on: the model's modules, tensors and configuration, its active adapter, the
    token ids, truncation, `ld_alpha` and the precision. A later process continues after one that
    was killed. Processes that compute the same values at the same time each compute them.

    Values are not cached, with one warning, if the directory is not writable, or if the model runs
    hooks, replaced forwards or other functions, or holds objects, that a hash cannot identify, or has parameters that
    cannot be read, such as those of an offloaded model.

    With torch.distributed initialised, every rank calls this with the same arguments, computes its
    share of the values and returns all of them, whether or not ranks have a common disk. Tensor
    parallelism is not supported.

    Memory: the activations of one layer for `tokens_per_batch` tokens, and tiles of logits. Without
    packing: the logits of one pair, or of one batch if only running the model shows that it cannot
    be packed.

    Args:
        model: a causal LM of transformers, which PEFT, DDP or FSDP2 may have wrapped.
        dataset: N rows with token ids in `prompt_ids`, `chosen_ids` and `rejected_ids`, as in TRL's
            `DPOTrainer.train_dataset`: a `datasets.Dataset` or a sequence of mappings. Pairs with
            images are not supported.
        cache_dir: path of a directory in which values are stored, or None.
        max_length: number of tokens of prompt and completion to keep, or None for all.
        truncation_mode: which tokens to keep: "keep_start" or "keep_end".
        ld_alpha: in [0, 1], the weight of a completion's tokens beyond the length of the pair's
            other completion (LD-DPO, arXiv 2409.06411). None is 1.
        adapter: adapter of a PeftModel that is part of the reference. None disables all adapters.
        tokens_per_batch: number of packed tokens in one call of the model. A longer pair is a batch
            of its own.

    Returns:
        `RefLogps`, float32 [N] each, in nats, in the order of the dataset. 0 where truncation has
        left nothing of a completion.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; a stored file, which the message
            names, is not valid, and nothing of it is used; or a log-probability is not finite.
        NotImplementedError: a row is so long that the model's rotary embeddings depend on the width of its
            batch (LongRoPE, dynamic NTK), so that a pair has no values of its own.
        NotFused: with `FASTDPO_STRICT=1`, the model cannot be packed, or values cannot be cached.
    """
    if ld_alpha is not None:
        if isinstance(ld_alpha, bool) or not isinstance(ld_alpha, Real) or not 0 <= ld_alpha <= 1:
            raise ValueError(f"precompute: ld_alpha must lie in [0, 1] or be None; got {ld_alpha!r}")
        ld_alpha = float(ld_alpha)
    directory = None if cache_dir is None else _directory(cache_dir)
    checks.require_positive_integer("precompute", "tokens_per_batch", tokens_per_batch)
    base = parts.base_of(model, "precompute")
    _require_values(base)
    pairs = Pairs(dataset, max_length, truncation_mode, parts.vocabulary_of(base))
    _require_any_batch(base, pairs)
    device = parts.input_device_of(base)
    with (
        in_evaluation_mode(model),
        with_adapter(model, adapter, "precompute"),
        scorer.scoring(model, pairs, ld_alpha) as score,
    ):
        bounds = (int(tokens_per_batch), None if forward.is_fused(base) else 1)
        shards = keys.shards_of(directory, model, pairs, _precision(device), ld_alpha, bounds)
        return filling.run(score, pairs, shards, bounds, device)


def with_ref_logps(dataset: Any, logps: RefLogps) -> Any:
    """Adds the columns `ref_chosen_logps` and `ref_rejected_logps`, float32, to a dataset.

    TRL's signature contains these columns: `remove_unused_columns` keeps them, and its collator
    makes [B] tensors of them. A patched DPOTrainer with `precompute_ref_log_probs=True` uses them
    as they are.

    Args:
        dataset: N rows: a `datasets.Dataset`, or a sequence of mappings, which gives a list of
            dicts.
        logps: of the same N rows.

    Raises:
        ValueError: the numbers of rows differ, or the dataset already has one of the columns.
    """
    require_dataset("with_ref_logps", dataset)
    if not isinstance(logps, RefLogps):
        raise TypeError(f"with_ref_logps: logps must be RefLogps; got {checks.shown(logps)}")
    for x in logps:
        if x.shape != (len(dataset),):
            got = len(x) if x.dim() == 1 else f"shape {list(x.shape)}"
            raise ValueError(f"with_ref_logps: logps must have {len(dataset)} rows; got {got}")
    columns = dict(zip(REFERENCE_COLUMNS, (x.to("cpu", torch.float32).numpy() for x in logps), strict=True))
    names = columns_of_rows("with_ref_logps", dataset)
    rule = f"not have {' and '.join(REFERENCE_COLUMNS)} yet"
    checks.require(names.isdisjoint(REFERENCE_COLUMNS), "with_ref_logps", "dataset", rule, sorted(names))
    if not hasattr(dataset, "add_column"):
        return [{**row, **{name: float(x[i]) for name, x in columns.items()}} for i, row in enumerate(dataset)]
    for name, column in columns.items():
        dataset = dataset.add_column(name, column)
    return dataset


def _directory(cache_dir: object) -> Path:
    """The directory that a string or an `os.PathLike` names, which need not exist.

    Raises:
        TypeError, ValueError: it names none, is a URL, or is a file.
    """
    op, argument, rule = "precompute", "cache_dir", "be the path of a directory, or None"
    path = os.fspath(cache_dir) if isinstance(cache_dir, os.PathLike) else cache_dir
    if not isinstance(path, str):
        raise TypeError(f"{op}: {argument} must {rule}; got {checks.shown(cache_dir)}")
    checks.require(bool(path.strip()) and "\0" not in path, op, argument, rule, repr(path))
    is_url = isinstance(cache_dir, str) and "://" in path
    advice = f"{path!r}, a URL: mount the storage, or copy its files to a directory"
    checks.require(not is_url, op, argument, rule, advice)
    is_file = os.path.exists(path) and not os.path.isdir(path)
    checks.require(not is_file, op, argument, rule, f"{str(Path(path))!r}, which is a file")
    return Path(path)


def _require_values(base: PreTrainedModel) -> None:
    """Raises a ValueError if parameters have no values, and no hook of accelerate that would load them."""
    placeholder = next((name for name, x in base.named_parameters() if x.is_meta), None)
    is_offloaded = any(hasattr(module, "_hf_hook") for module in base.modules())
    got = f"{placeholder} on the device meta"
    checks.require(placeholder is None or is_offloaded, "precompute", "model", "hold the values of its parameters", got)


def _require_any_batch(base: PreTrainedModel, pairs: Pairs) -> None:
    """Raises NotImplementedError if the values of a pair depend on the batch that it is computed in."""
    longest = pairs.lengths.longest
    reason = rope_reason(base, int(longest.max(initial=0)))
    if reason is not None:
        row = int(longest.argmax())
        raise NotImplementedError(
            f"precompute: dataset must have shorter rows, since {reason}; got {longest[row]} in row {row}. Truncate by "
            "max_length, or run the reference in the batches of the training"
        )


def _precision(device: torch.device) -> str:
    if not torch.is_autocast_enabled(device.type):
        return "none"
    return str(torch.get_autocast_dtype(device.type))
