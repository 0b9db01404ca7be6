"""Tables in markdown, made of a run's JSON. A side that was not measured shows why in place of a number."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.cases import SUBJECT
from benchmarks.suites.step import FLOOR, LABELLED, REMEMBERED, STOCK
from benchmarks.summary import mean_over
from benchmarks.turns import NOT_EQUAL

Result = dict[str, Any]
MIB = 1 << 20


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def times(estimate: dict[str, Any] | None, inverse: bool = False) -> str:
    """A ratio with its interval."""
    if estimate is None:
        return ""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if inverse:
        value, low, high = 1 / value, high and 1 / high, low and 1 / low
    interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
    return f"{value:.2f}x{interval}"


def cell(case: Result, side: str, measured: dict[str, Any], show: Any) -> str:
    """What was measured of a side, or why nothing was."""
    if side in measured:
        return show(measured[side])
    record = case["sides"].get(side)
    if record is None:
        return ""
    return f"not equal: {record['reason']}" if record["status"] == NOT_EQUAL else record["status"]


def render(rows: list[list[str]], headers: list[str]) -> str:
    """Of columns that hold anything but blanks."""
    kept = [i for i, _ in enumerate(headers) if i == 0 or any(row[i] for row in rows)]
    body = [[row[i] for i in kept] for row in rows]
    align = ("left", *["right"] * (len(kept) - 1))
    return tabulate(body, [headers[i] for i in kept], tablefmt="github", colalign=align, disable_numparse=True)


def step(result: Result) -> str:
    """One row a case, then the geometric means of each group."""
    summary, rows = result["summary"], []
    for case in result["cases"]:
        of_case = summary["cases"][case["name"]]
        ratios = of_case["times_fastdpo"]
        facts = {name: side.get("facts", {}) for name, side in case["sides"].items()}
        tokens = [facts[name].get("tokens") for name in (STOCK, SUBJECT)]
        peaks = [of_case["peak_bytes"].get(name) for name in (STOCK, LABELLED, SUBJECT)]
        rows.append(
            [
                case["name"],
                *(cell(case, side, of_case["seconds"], _median) for side in (STOCK, LABELLED, SUBJECT, REMEMBERED)),
                times(ratios.get(STOCK)),
                times(ratios.get(LABELLED)),
                times(ratios.get(FLOOR), inverse=True),
                "" if None in tokens else f"{tokens[0]:,.0f} / {tokens[1]:,.0f}",
                " / ".join("-" if peak is None else f"{peak / MIB:,.0f}" for peak in peaks),
            ]
        )
    for group, others in summary["groups"].items():
        means = times(others.get(STOCK)), times(others.get(LABELLED)), times(others.get(FLOOR), inverse=True)
        count = max(other["cases"] for other in others.values())
        rows.append([f"{group}, geometric mean of {count}", "", "", "", "", *means, "", ""])
    headers = [
        "",
        STOCK,
        LABELLED,
        SUBJECT,
        REMEMBERED,
        "faster than shipped",
        "faster than labelled only",
        "over the floor",
    ]
    text = render(rows, [*headers, "tokens, TRL / fastdpo", "peak MiB, shipped / labelled / fastdpo"])
    return f"{text}\n\n{STEP_NOTE}"


STEP_NOTE = (
    "Medians; in brackets 95 % bootstrap intervals of the ratios. With the reference remembered, its log-probabilities "
    "are known from an earlier pass over the data (`reference_memory=True`). Tokens are those that went through a "
    "backbone in a step, padding included. Memory is each process's own peak above the loaded models. The floor is the "
    "model's own layers on the distinct tokens and the head's bare matrix products: less work than any step can do "
    "(`benchmarks/sides/floor.py`)."
)


def _median(estimate: dict[str, Any]) -> str:
    return seconds(estimate["value"])


def sides(result: Result) -> str:
    """One row a case; of each side the time, how many times fastdpo's that is, and its peak."""
    names = list(dict.fromkeys(name for case in result["cases"] for name in case["sides"]))
    rows = []
    for case in result["cases"]:
        of_case = result["summary"]["cases"][case["name"]]

        def show(estimate: dict[str, Any], name: str, of_case: Result = of_case) -> str:
            ratio = of_case["times_fastdpo"].get(name)
            peak = f"{of_case['peak_bytes'][name] / MIB:,.0f} MiB"
            parts = [seconds(estimate["value"]), *([f"{ratio['value']:.2f}x"] if ratio else []), peak]
            return ", ".join(parts)

        cells = [cell(case, n, of_case["seconds"], lambda estimate, n=n: show(estimate, n)) for n in names]
        rows.append([case["name"], *cells])
    for group, others in result["summary"]["groups"].items():
        count = max(other["cases"] for other in others.values())
        rows.append([f"{group}, geometric mean of {count}", *(times(others.get(name)) for name in names)])
    return f"{render(rows, ['', *names])}\n\nMedian time, how many times fastdpo's that is, and peak memory."


def memory(result: Result) -> str:
    """Two tables: peaks as something grows, and peaks by budget."""
    text = []
    for group in dict.fromkeys(case["group"] for case in result["cases"]):
        cases = [case for case in result["cases"] if case["group"] == group]
        sides = list(dict.fromkeys(name for case in cases for name in case["sides"]))
        rows = []
        for case in cases:
            peaks = result["summary"]["cases"][case["name"]]["peak_bytes"]
            cells = [cell(case, side, peaks, lambda peak: f"{peak / MIB:,.0f} MiB") for side in sides]
            rows.append([case["name"] if group == "knob" else f"{case['facts']['x']:,}", *cells])
        corner = "`memory_budget`" if group == "knob" else f"{group}, {cases[0]['facts']['x_name']}"
        text.append(render(rows, [corner, *sides]))
    return "\n\n".join(text)


def scaling(result: Result) -> str:
    """One row an axis."""
    rows = []
    for case in result["cases"]:
        medians = result["summary"]["cases"][case["name"]]["seconds"]
        points = [f"{x} {cell(case, x, medians, _median)}" for x in case["sides"]]
        fit = result["summary"]["exponents"].get(case["name"])
        power = ""
        if fit is not None:
            interval = "" if fit["low"] is None else f" ({fit['low']:.2f} to {fit['high']:.2f})"
            power = f"{fit['value']:.2f}{interval}"
        rows.append([case["name"], case["facts"]["x_name"], power, ", ".join(points)])
    note = "Least squares on logarithms of medians; in brackets 95 % intervals of the slope."
    return f"{render(rows, ['axis', 'x', 'time grows as x to the power of', 'x and median time'])}\n\n{note}"


TABLES = {"step": step, "bf16": step, "memory": memory, "scaling": scaling}
"""Of suites that are not shown as `sides`."""

WORK = {
    "step": "a training step",
    "bf16": "a training step in bfloat16, emulated",
    "evaluation": "an evaluation step",
    "precompute": "precomputing the reference",
    "online": "an online training step, generation apart",
}
"""What the suites of whole trainers measure."""


def table(result: Result) -> str:
    """That of its suite. On a GPU a step has other sides than the table of steps shows."""
    on_gpu = result["suite"] == "step" and "accelerator" in result["machine"]
    return sides(result) if on_gpu else TABLES.get(result["suite"], sides)(result)


def overview(results: dict[str, Result]) -> str:
    """One row a group of cases of whole trainers; then heads by themselves. Geometric means."""
    rows = []
    for name, work in WORK.items():
        rows += _groups(work, results[name]["cases"]) if name in results else []
    headers = ["", "datasets", "faster than TRL as shipped", "faster than labelled only", "over the floor"]
    text = [render(rows, headers)] if rows else []
    if "head" in results:
        groups = results["head"]["summary"]["groups"]
        peers = list(dict.fromkeys(peer for others in groups.values() for peer in others))
        rows = [[f"head, {group}", *(times(others.get(peer)) for peer in peers)] for group, others in groups.items()]
        text.append(render(rows, ["fastdpo is faster than", *peers]))
    return "\n\n".join(text)


def _groups(work: str, cases: list[Result]) -> list[list[str]]:
    rows = []
    for group in dict.fromkeys(case["group"] for case in cases):
        of_group = [case for case in cases if case["group"] == group and case["sides"][STOCK].get("samples")]
        title = work if group == "all" else f"{work}, {group}"
        for subject, what in ((SUBJECT, title), (REMEMBERED, f"{title}, the reference remembered")):
            means = {other: mean_over(of_group, other, subject) for other in (STOCK, LABELLED, FLOOR)}
            if means[STOCK] is not None:
                over_floor = times(means[FLOOR], inverse=True) if subject == SUBJECT else ""
                rows.append([what, str(len(of_group)), times(means[STOCK]), times(means[LABELLED]), over_floor])
    return rows


def where(result: Result) -> str:
    """One line: machine, versions, precision, command and commit."""
    described = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    packages = ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v != "not installed")
    command = f"python -m benchmarks.run --suite {result['suite']} --rounds {result['rounds']}"
    return f"`{command}` on {described}; {packages}; {result['date'][:10]}, commit {result['commit'][:7]}."
