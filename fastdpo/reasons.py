"""The reasons for which something is not fused, by their names in `reasons.toml`.

A reason is logged with its name, under which docs/troubleshooting.md says what can be done.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path


class Reason(str):
    """Why something is not fused: text that ends a sentence.

    Args:
        name: of its kind, such as "attention-dropout".
        details: those that the kind's text has in braces.

    Attributes:
        name: of its kind.
    """

    name: str

    def __new__(cls, name: str, /, **details: object) -> Reason:
        return _restored(name, kinds()[name]["text"].format(**details))

    def __reduce__(self) -> tuple:
        return _restored, (self.name, str(self))

    @property
    def named(self) -> str:
        """The reason with its name, as it is logged."""
        return f"{self} [{self.name}]"


@functools.cache
def kinds() -> dict[str, dict[str, str]]:
    """All kinds of reasons by their names, with the title of their `section` in docs/troubleshooting.md, their `text`,
    with details in braces, and `advice`, in Markdown.
    """
    sections = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: {"section": section["title"], **{field: " ".join(text.split()) for field, text in kind.items()}}
        for section in sections.values()
        for name, kind in section.items()
        if name != "title"
    }


def _restored(name: str, text: str) -> Reason:
    reason = str.__new__(Reason, text)
    reason.name = name
    return reason
