"""Draws docs/layout.svg, the same two pairs padded and as fastdpo packs them, and docs/memory.svg, who spends
the memory of a device.

    python docs/draw_layout.py

The blocks of the first are those of the `Layout` that `pack_pairs` returns for the batch, and those of the second are
`SPENDERS`, so the pictures cannot disagree with the code.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from fastdpo.ops.memory import SPENDERS
from fastdpo.packing import IGNORE_INDEX, Layout, pack_pairs

PAIRS = [(9, 6, 4), (5, 4, 8)]  # tokens of prompt, chosen completion, rejected completion
COLORS = {"P": "#3b6fb6", "C": "#2e8b57", "R": "#c8553d", "pad": "#d5d9de"}
INK, FAINT = "#24292f", "#57606a"

CELL, ROW, GAP = 17, 24, 5  # pixels: a token's width, a row's height, the space between rows
LEFT, WIDTH = 122, 692
FONT = "font-family='-apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and labels [2B, L] of the pairs: chosen rows first, right-padded."""
    rows = []
    for completion in (1, 2):
        for pair, lengths in enumerate(PAIRS):
            prompt = [1 + pair] * lengths[0]
            rows.append((len(prompt), prompt + [10 * completion + pair] * lengths[completion]))
    length = max(len(ids) for _, ids in rows)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for _, ids in rows])
    labels = ids.masked_fill(ids == 0, IGNORE_INDEX)
    for row, (prompt, _) in enumerate(rows):
        labels[row, :prompt] = IGNORE_INDEX
    return ids, (ids != 0).long(), labels


def block(x: float, y: float, tokens: int, color: str, label: str = "") -> str:
    """A run of tokens: one rectangle with a tick between tokens."""
    width = tokens * CELL
    parts = [f"<rect x='{x}' y='{y}' width='{width}' height='{ROW}' rx='3' fill='{COLORS[color]}'/>"]
    ticks = "".join(f"M{x + i * CELL} {y}v{ROW}" for i in range(1, tokens))
    if ticks:
        parts.append(f"<path d='{ticks}' stroke='#fff' stroke-opacity='.45'/>")
    if label:
        parts.append(text(x + width / 2, y + ROW - 6, label, "#fff", anchor="middle", weight="bold"))
    return "".join(parts)


def text(x: float, y: float, content: str, color: str = INK, anchor: str = "start", weight: str = "normal") -> str:
    style = f"fill='{color}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{content}</text>"


def padded_rows(y: float, length: int) -> tuple[list[str], float]:
    """The padded batch, and where the next thing may be drawn."""
    parts = []
    for completion, name in ((1, "chosen"), (2, "rejected")):
        for pair, lengths in enumerate(PAIRS):
            own, prompt, label = lengths[completion], lengths[0], "_CR"[completion]
            at = LEFT + prompt * CELL
            parts += [
                text(LEFT - 10, y + ROW - 6, f"{name} {pair + 1}", FAINT, anchor="end"),
                block(LEFT, y, prompt, "P", f"P{pair + 1}"),
                block(at, y, own, label, f"{label}{pair + 1}"),
            ]
            if length > prompt + own:
                parts.append(block(at + own * CELL, y, length - prompt - own, "pad"))
            y += ROW + GAP
    return parts, y


def packed_row(y: float, layout: Layout) -> list[str]:
    """The packed buffer, and below it the tokens that each completion attends to."""
    parts = [text(LEFT - 10, y + ROW - 6, "buffer", FAINT, anchor="end")]
    for i, name in enumerate(("C attends to", "R attends to")):
        parts.append(text(LEFT - 10, y + ROW + 26 + 22 * i, name, FAINT, anchor="end"))
    for pair, (chosen, rejected) in enumerate(zip(layout.rows[::2].tolist(), layout.rows[1::2].tolist(), strict=True)):
        prefix_start, prefix, rejected_start, rejected_length = rejected
        starts = [prefix_start, prefix_start + prefix, rejected_start, rejected_start + rejected_length]
        for label, (start, end) in zip("PCR", pairwise(starts), strict=True):
            parts.append(block(LEFT + start * CELL, y, end - start, label, f"{label}{pair + 1}"))
        chosen_end = chosen[2] + chosen[3]
        seen = {"C": [(prefix_start, chosen_end)], "R": [(prefix_start, prefix_start + prefix), (starts[2], starts[3])]}
        for i, (label, spans) in enumerate(seen.items()):
            at = y + ROW + 20 + 22 * i
            for start, end in spans:
                line = f"M{LEFT + start * CELL + 5} {at}H{LEFT + end * CELL - 5}"
                parts.append(f"<path d='{line}' stroke='{COLORS[label]}' stroke-width='6' stroke-linecap='round'/>")
    return parts


def picture() -> str:
    """The two pairs."""
    ids, mask, labels = batch()
    layout = pack_pairs(ids, mask, labels)
    tokens = len(layout.token_index)
    parts = [
        text(16, 34, "Padded batch", weight="bold"),
        text(WIDTH - 16, 34, f"{ids.numel()} positions", FAINT, anchor="end"),
    ]
    rows, y = padded_rows(50, ids.shape[1])
    right = LEFT + ids.shape[1] * CELL + 24
    for i, (color, name) in enumerate((("P", "prompt"), ("C", "chosen"), ("R", "rejected"), ("pad", "padding"))):
        at = 50 + i * (ROW + GAP)
        parts += [block(right, at, 1, color), text(right + CELL + 10, at + ROW - 6, name)]
    y += 30
    parts += [
        text(16, y, "Packed by fastdpo", weight="bold"),
        text(WIDTH - 16, y, f"{tokens} tokens", FAINT, anchor="end"),
        *packed_row(y + 16, layout),
    ]
    described = f"Two pairs take {ids.numel()} positions as a padded batch and {tokens} tokens packed as [P | C | R]."
    return framed([*rows, *parts], y + 16 + ROW + 66, described)


def memory_picture() -> str:
    """The memory of a device: what is in use anyway, the spenders in the order of precedence, and what stays free."""
    held = [("others", "pad", 3), ("model and optimizer", "P", 6)]
    shown = [*held, *((name, "C", 6) for name in SPENDERS), ("free", "pad", 6)]
    parts, x, y = [text(16, 34, "Memory of a device", weight="bold")], 16.0, 74
    for i, (name, color, cells) in enumerate(shown):
        parts.append(block(x, y, cells, color))
        at = y + ROW + 26 + 26 * (i % 2)
        tick = x + (cells * CELL / 2 if name in SPENDERS else 8)
        label = text(tick, at, name, anchor="middle") if name in SPENDERS else text(x + 2, at, name)
        parts += [f"<path d='M{tick:g} {y + ROW}V{at - 14}' stroke='{FAINT}'/>", label]
        x += cells * CELL
        if name == "free":
            parts.append(text(x - cells * CELL, y - 10, "one fifth", FAINT))
    start, end = (16 + CELL * sum(cells for *_, cells in part) for part in (held, shown[:-1]))
    parts += [
        text(start, y - 10, "spends first", FAINT),
        text(end - 8, y - 10, "gives back first", FAINT, anchor="end"),
        f"<path d='M{start + 110} {y - 16}H{end - 150}m-7 -5l7 5l-7 5' stroke='{FAINT}' fill='none'/>",
    ]
    return framed(parts, y + ROW + 72, f"Spenders of memory in the order of precedence: {', '.join(SPENDERS)}.")


def framed(parts: list[str], height: float, described: str) -> str:
    """The whole SVG. Its background is white, so that it is legible on light and on dark pages."""
    frame = f"<rect x='.5' y='.5' width='{WIDTH - 1}' height='{height - 1:g}' rx='8' fill='#fff' stroke='#d0d7de'/>"
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' {FONT} font-size='18'"
    return "\n".join([f"{opening} role='img' aria-label='{described}'>", frame, *parts, "</svg>"]) + "\n"


PICTURES = {"layout.svg": picture, "memory.svg": memory_picture}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw())
