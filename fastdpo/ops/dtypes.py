"""The dtype in which the ops sum."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
