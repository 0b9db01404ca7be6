"""Generates docs/troubleshooting.md from fastdpo/reasons.toml.

Usage: `python -m tests.support.documents.reason_sections`, or `make docs`.
"""

from __future__ import annotations

import string
import textwrap
from itertools import groupby

from fastdpo.reasons import Reason, kinds
from tests.support import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"

TEXT = """# Troubleshooting

<!-- Generated from fastdpo/reasons.toml by `make docs`. -->
What fastdpo does not support runs as it would without fastdpo, and the logger `fastdpo` says why, once. The line ends
with the name of the reason in brackets. Names do not change between versions.

```text
{example}
```

- [`fastdpo doctor --model PATH`](check.md#a-machine-or-a-model-fastdpo-doctor) prints the reasons for a model, without
  any data.
- `FASTDPO_STRICT=1` turns every fallback into an error.
- `print(fastdpo.calls)` counts the calls of each model by the path that they took.
- In bfloat16 on a CPU, memory grows for a while because oneDNN keeps compiled products of each shape.
  `ONEDNN_PRIMITIVE_CACHE_CAPACITY=16` limits it, and makes steps slower.

{sections}
"""


def page() -> str:
    sections = []
    for title, entries in groupby(kinds().items(), lambda item: item[1]["section"]):
        sections += [f"## {title}", *(_entry(name, kind) for name, kind in entries)]
    reason = Reason("attention-dropout")
    example = f"fastdpo: trl.DPOTrainer (policy): not fused, {reason.named}"
    return TEXT.format(example=example, sections="\n\n".join(sections))


def _entry(name: str, kind: dict[str, str]) -> str:
    text, advice = _filled(f"*{_without_formats(kind['text'])}*"), _filled(kind["advice"])
    return f"### {name}\n\n{text}\n\n{advice}"


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _without_formats(text: str) -> str:
    """Text whose details are names in angle brackets."""
    parts = string.Formatter().parse(text)
    return "".join(literal + (f"`<{field}>`" if field else "") for literal, field, _, _ in parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
