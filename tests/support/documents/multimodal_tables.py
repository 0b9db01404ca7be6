"""Generates the table of docs/multimodal.md from the families that the tests train.

Usage: `python -m tests.support.documents.multimodal_tables`, or `make docs`.
"""

from __future__ import annotations

import warnings

import torch

from fastdpo.models.parts import language_model
from tests.support import ROOT
from tests.support.documents.support_tables import reason_of, table
from tests.support.models.multimodal import FUSED, STOCK, tiny_multimodal
from tests.support.trl.vision import FAMILIES

PAGE = ROOT / "docs" / "multimodal.md"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"


def family_rows() -> list[list[str]]:
    rows = []
    for name, family in (FUSED | STOCK).items():
        model = tiny_multimodal(name)
        reason = reason_of(model) or ""
        text = f"`{type(language_model(model)).__name__}`"
        features = family.features if name in FUSED else ""
        rows.append([name, text, features, *["no" if reason else "yes"] * 3, images_of(name), reason])
    return rows


def images_of(name: str) -> str:
    """What becomes of a family's images, if the tests train it on any."""
    if name not in FAMILIES:
        return ""
    where = FAMILIES[name].islands
    return f"once; both directions in {where}" if where else "once"


def page() -> str:
    """The page with its table of families as the tests have them."""
    headers = ["family", "language model", "special features", "packed", "shared", "fused", "images", "reason"]
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table(headers, family_rows())}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    PAGE.write_text(page())
