"""One rank that gathers rows, of which each rank has another number."""

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator

from fastdpo.integrations.trl.gathering import rows_of_all_ranks


def gather_rows(directory: Path) -> None:
    """Writes the gathered values of rank 0, which has 2 rows, 0 rows and 1, and of rank 1, which has 1, 2 and 1."""
    rank, accelerator = int(os.environ["RANK"]), Accelerator(cpu=True)
    rows = [torch.full((n,), 1.0 + rank) for n in [(2, 0), (1, 2)][rank]]
    rows.append(torch.tensor([1 + rank]))
    gathered = [rows_of_all_ranks(accelerator.gather, x).tolist() for x in rows]
    (directory / f"rank{rank}.json").write_text(json.dumps(gathered))
