"""The fenced code blocks of the project's Markdown pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


class CodeBlock(NamedTuple):
    """One fenced block.

    Attributes:
        place: the page and the line number of the opening fence, such as "docs/own-loop.md:6".
        language: the language named after the opening fence.
        code: the lines between the fences.
    """

    place: str
    language: str
    code: str

    @property
    def page(self) -> str:
        return self.place.split(":")[0]


def blocks_of(page: Path) -> list[CodeBlock]:
    """All fenced blocks of a page, in order."""
    text = page.read_text()
    blocks = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(CodeBlock(f"{page.relative_to(ROOT)}:{line}", match[1], match[2]))
    return blocks


def blocks(language: str) -> list[CodeBlock]:
    """The blocks of one language on all pages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language == language]
