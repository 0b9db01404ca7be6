"""The dtypes that the ops take, and the dtype in which they sum."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
