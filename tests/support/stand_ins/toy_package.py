"""The package of the toy trainer, and the line for it that docs/trainers.md shows as one of another package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fastdpo
from fastdpo.integrations import lines
from fastdpo.packing import IGNORE_INDEX
from tests.support import ROOT
from tests.support.documents.markdown_blocks import blocks_of

TRAINER = (ROOT / "tests" / "support" / "stand_ins" / "toy_trainer.py").read_text()
(LINE,) = [block.code for block in blocks_of(ROOT / "docs/trainers.md") if block.language == "python"]
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"


@contextmanager
def installed(directory: Path, version: str = "1.3", line: bool = False) -> Iterator[Path]:
    """Installs it in a directory. `version` is its own, `line` is whether it has entry points."""
    for name, text in {"toy/__init__.py": "", "toy/trainer.py": TRAINER, "toy_line.py": LINE}.items():
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        (directory / name).write_text(text)
    metadata = directory / f"toy-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA.format("toy", version))
    if line:
        group = f"[{lines.ENTRY_POINTS}]\ntoy = toy_line:PairTrainerLine\n"
        (metadata / "entry_points.txt").write_text(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "registered", {})
        patch.syspath_prepend(directory)
        try:
            yield directory
        finally:
            fastdpo.unpatch()
            for name in ("toy", "toy.trainer", "toy_line"):
                sys.modules.pop(name, None)


def batches() -> list[dict[str, torch.Tensor]]:
    """Batches of two pairs with shared prompts, of rows of different lengths."""
    made = []
    for seed in range(3):
        ids = torch.randint(3, 97, (4, 11), generator=torch.Generator().manual_seed(seed))
        ids[2:, :5] = ids[:2, :5]
        mask = torch.ones_like(ids)
        mask[1, 9:] = mask[2, 8:] = 0
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        labels[:, :5] = IGNORE_INDEX
        made.append(dict(input_ids=ids, attention_mask=mask, labels=labels))
    return made
