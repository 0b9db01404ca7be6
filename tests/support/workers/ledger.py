"""One rank whose deferred metrics are shown before they are reduced over ranks."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from fastdpo.integrations.ledger import Gathered, Ledger


def show_and_settle(directory: Path) -> None:
    """Records two steps, shows the first one before the second, and writes the values to a file."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ledger, values = Ledger(), []
    for step, value in enumerate((1.0 + rank, 5.0 + rank)):
        values.append(Gathered(ledger, torch.tensor([value])).sum())
        ledger.take({"x": values})
        if step == 0:
            ledger.show()
            shown = list(values)
    ledger.settle()
    (directory / f"rank{rank}.json").write_text(json.dumps({"shown": shown, "settled": values}))
