"""The text and the plot of docs/scaling.md, from the predictions and the check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import plots, scaling_check
from benchmarks import scaling_model as m

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scaling.md"
TEMPLATE = Path(__file__).with_suffix(".md")
PLOT = ROOT / "docs" / "plots" / "scaling_model.svg"
GB = 1e9
TERMS = {
    "compute": "compute",
    "waiting": "slowest rank",
    "collectives": "collectives",
    "activations": "tensor parallelism",
    "optimizer": "optimizer",
}

Result = dict[str, Any]


def read_step(case: Result) -> m.Step:
    return m.Step(**case["seconds"])


def read_memory(case: Result) -> m.Memory:
    return m.Memory(**case["bytes"])


def by_side(result: Result, **keys: Any) -> dict[str, Result]:
    return {case["side"]: case for case in result["predictions"] if keys.items() <= case.items()}


def predictions_table(result: Result, model: str) -> str:
    """Time, bound and memory of each side, by engine and number of GPUs."""
    rows = []
    for engine in m.ENGINES:
        for ranks in m.RANKS:
            row: list[Any] = [engine, f"{ranks:,}"]
            for case in by_side(result, model=model, engine=engine, ranks=ranks).values():
                needed = read_memory(case).total
                fits = needed <= m.H100.memory
                row.append(f"{read_step(case).total:.2f}" if fits else "-")
                row.append(f"{needed / GB:.0f}")
            rows.append(row)
    sides = [column for side in m.SIDES for column in (f"{side}, s", "GB")]
    return tabulate(
        rows, ["engine", "GPUs", *sides], "github", colalign=("left", *["right"] * 7), disable_numparse=True
    )


def terms_table(result: Result, ranks: int) -> str:
    """Seconds of each term, and the two largest terms."""
    rows = []
    for model in m.SIZES:
        for engine in m.ENGINES:
            for side, case in by_side(result, model=model, engine=engine, ranks=ranks).items():
                step = read_step(case)
                first, second, *_ = (TERMS[name] for name in step.by_size)
                rows.append([model, engine, side, *(f"{x:.2f}" for x in step), f"{first}, {second}"])
    headers = ["model", "engine", "side", *TERMS.values(), "largest terms"]
    alignment = ("left", "left", "left", *["right"] * 5, "left")
    return tabulate(rows, headers, "github", colalign=alignment, disable_numparse=True)


def waiting_table(result: Result) -> str:
    rows = [
        [dataset, *(f"+{100 * (ratio - 1):.0f} %" for ratio in sides.values())]
        for dataset, sides in result["waiting"].items()
    ]
    return tabulate(rows, ["dataset", *m.SIDES], "github", colalign=("left", *["right"] * 3), disable_numparse=True)


def pretraining_table() -> str:
    """Tokens a second of a published training, and of the model."""
    cluster, model = m.h100(), m.Model.of_size(m.SIZES["8B"])
    rows = []
    for ranks, published in m.PRETRAINING.tokens_per_second.items():
        guess = m.PRETRAINING.predict(cluster, model, ranks)
        rows.append([ranks, f"{guess:,.0f}", f"{published:,}", f"{guess / published - 1:+.1%}"])
    return tabulate(
        rows, ["GPUs", "model", "published", "difference"], "github", colalign=["right"] * 4, disable_numparse=True
    )


def draw(result: Result) -> None:
    """Time of a step by number of GPUs under FSDP2."""
    plt = plots.plt
    with plt.rc_context(plots.STYLE):
        _, panels = plt.subplots(1, len(m.SIZES), figsize=(3.4 * len(m.SIZES), 2.8), layout="constrained")
        for axes, model in zip(panels, m.SIZES, strict=True):
            lines: dict[str, list[tuple[float, float]]] = {side: [] for side in m.SIDES}
            for ranks in m.RANKS:
                for side, case in by_side(result, model=model, engine="FSDP2", ranks=ranks).items():
                    if read_memory(case).total <= m.H100.memory:
                        lines[side].append((ranks, read_step(case).total))
            plots.draw_lines(axes, lines, f"{model}, FSDP2: GPUs", "seconds a step, modelled")
            axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        plt.savefig(PLOT, metadata={"Date": None})
        plt.close()


def page(result: Result, check: Result) -> str:
    return TEMPLATE.read_text().format(
        rate=m.h100().rate / 1e12,
        pairs=m.PAIRS,
        dataset=m.DATASET,
        predictions="\n\n".join(f"### {model}\n\n{predictions_table(result, model)}" for model in m.SIZES),
        terms=terms_table(result, 128),
        waiting=waiting_table(result),
        pretraining=pretraining_table(),
        check=scaling_check.table(check),
        cpu=check["machine"]["cpu"],
        versions=", ".join(f"{name} {version}" for name, version in check["versions"].items()),
    )


def write() -> None:
    result, check = (json.loads(path.read_text()) for path in (m.PREDICTIONS, scaling_check.RESULTS))
    PAGE.write_text(page(result, check))
    draw(result)
