"""The reasons for which something is not fused, by their names in `reasons.toml`.

A reason is logged with its name, under which docs/troubleshooting.md says what can be done.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import NamedTuple


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
        return _restored(name, kinds()[name].text.format(**details))

    def __reduce__(self) -> tuple:
        return _restored, (self.name, str(self))

    @property
    def named(self) -> str:
        """The reason with its name, as it is logged."""
        return f"{self} [{self.name}]"


class ReasonKind(NamedTuple):
    """A kind of reasons.

    Attributes:
        section: the title of its section in docs/troubleshooting.md.
        text: with details in braces.
        advice: what the user can do, in Markdown.
    """

    section: str
    text: str
    advice: str


@functools.cache
def kinds() -> dict[str, ReasonKind]:
    """All kinds of reasons by their names."""
    sections = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: ReasonKind(section["title"], *(" ".join(kind[field].split()) for field in ("text", "advice")))
        for section in sections.values()
        for name, kind in section.items()
        if name != "title"
    }


def _restored(name: str, text: str) -> Reason:
    reason = str.__new__(Reason, text)
    reason.name = name
    return reason
