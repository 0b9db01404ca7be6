"""The width of the batches that a collator of TRL's DPOTrainer makes."""

from __future__ import annotations

from typing import Any

import numpy as np


def widest_batch(collator: Any, lengths: np.ndarray) -> int:
    """The width of the widest batch of rows.

    Args:
        collator: of the trainer.
        lengths: [N], numbers of tokens of rows after truncation.
    """
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    return -(-int(lengths.max(initial=0)) // multiple) * multiple
