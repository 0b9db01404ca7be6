"""Markdown tables of a run's JSON.

A side without a measurement shows the reason instead of a number.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from tabulate import tabulate

from benchmarks.case_runner import INCORRECT, UNAVAILABLE
from benchmarks.cases import SUBJECT
from benchmarks.suites.step import (
    AUTO,
    BUDGET,
    FLOOR,
    GRAPHS,
    GRAPHS_OF_COMPILED,
    LABELLED,
    LAYERS_COMPILED,
    STOCK,
)
from benchmarks.summary import by_group, mean_ratio

Result = dict[str, Any]
MIB, GIB = 1 << 20, 1 << 30
WIDTH = 100
GROUP_LABELS = {"all": "", "full": "full fine-tuning"}
WORK = {
    "step": "Training step",
    "hybrid": "Training step of a hybrid model",
    "online": "Online DPO step, without generation",
    "kto": "KTO training step",
    "vision": "DPO training step with images",
    "grpo": "Step without generation",
    "reward": "Reward model training step",
}
"""Suites that run a whole trainer, and what they measure."""


def format_seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def format_ratio(estimate: Result | None, inverse: bool = False) -> str:
    """The ratio of one case, with its interval."""
    if estimate is None:
        return ""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if inverse:
        value, low, high = 1 / value, high and 1 / high, low and 1 / low
    interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
    return f"{value:.2f}x{interval}"


def format_mean(mean: Result | None, inverse: bool = False) -> str:
    """A geometric mean with its interval and, if it lacks cases, which ones."""
    return "" if mean is None else f"{format_ratio(mean, inverse)}{coverage(mean)}"


def coverage(mean: Result) -> str:
    """For a mean without one of six cases: ", 5 of 6 (Capybara missing)". Else empty."""
    if not mean["missing"]:
        return ""
    missing = "; ".join(name.rpartition("/")[2] for name in mean["missing"])
    return f", {mean['cases']} of {mean['cases'] + len(mean['missing'])} ({missing} missing)"


def cell(case: Result, side: str, measured: dict[str, Any], show: Callable[[Any], str]) -> str:
    """The measurement of a side, or the reason why there is none."""
    if side in measured:
        return show(measured[side])
    record = case["sides"].get(side)
    if record is None:
        return ""
    return f"{INCORRECT}: {record['reason']}" if record["status"] == INCORRECT else record["status"]


def render(rows: list[list[str]], headers: list[str]) -> str:
    """A table without the columns that are empty in every row."""
    kept = [i for i, _ in enumerate(headers) if i == 0 or any(row[i] for row in rows)]
    body = [[row[i] for i in kept] for row in rows]
    align = ("left", *["right"] * (len(kept) - 1))
    return tabulate(body, [headers[i] for i in kept], tablefmt="github", colalign=align, disable_numparse=True)


def wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def mean_label(group: str, cases: list[Result]) -> str:
    label = GROUP_LABELS.get(group, group)
    count = f"geometric mean of {plural(len(cases), 'case')}"
    return f"{label}, {count}" if label else count


STEP_NOTE = wrap(
    "Times are medians; parentheses hold 95 % bootstrap intervals of the ratios. Tokens are those "
    "that pass through a backbone in a step, including padding. Memory is the peak of each process above its loaded "
    "models. The floor is a lower bound of any step: the model's own layers on the distinct tokens, and the bare "
    "matrix products of the head (`benchmarks/sides/floor.py`)."
)


def step_table(result: Result) -> str:
    """One row per case, then the geometric means of each group."""
    timed = STOCK, LABELLED, SUBJECT, BUDGET
    present = {name for case in result["cases"] for name in case["sides"]}
    of_peaks = {STOCK: "shipped", LABELLED: "labelled", SUBJECT: "fastdpo"}
    of_peaks = {name: label for name, label in of_peaks.items() if name in present}
    rows = []
    for case in result["cases"]:
        summary = result["summary"]["cases"][case["name"]]
        ratios = summary["times_fastdpo"]
        facts = {name: side.get("facts", {}) for name, side in case["sides"].items()}
        of_trl = next((name for name in (STOCK, LABELLED) if name in facts), "")  # as many tokens in both
        tokens = [facts.get(name, {}).get("tokens") for name in (of_trl, SUBJECT)]
        peaks = [summary["peak_bytes"].get(name) for name in of_peaks]
        medians = (cell(case, side, summary["seconds"], _median) for side in timed)
        rows.append(
            [
                case["name"],
                *medians,
                format_ratio(ratios.get(STOCK)),
                format_ratio(ratios.get(LABELLED)),
                format_ratio(ratios.get(FLOOR), inverse=True),
                "" if None in tokens else f"{tokens[0]:,.0f} / {tokens[1]:,.0f}",
                " / ".join("-" if peak is None else f"{peak / MIB:,.0f}" for peak in peaks),
            ]
        )
    for group, cases in by_group(result["cases"]).items():
        means = result["summary"]["groups"].get(group, {})
        speedups = (format_mean(means.get(side)) for side in (STOCK, LABELLED))
        over_floor = format_mean(means.get(FLOOR), inverse=True)
        rows.append([mean_label(group, cases), *("" for _ in timed), *speedups, over_floor, "", ""])
    headers = [
        "",
        *timed,
        "speedup over TRL as shipped",
        "speedup over labelled positions only",
        "time relative to the floor",
        "tokens, TRL / fastdpo",
        f"peak MiB, {' / '.join(of_peaks.values())}",
    ]
    return f"{render(rows, headers)}\n\n{STEP_NOTE}"


def _median(estimate: Result) -> str:
    return format_seconds(estimate["value"])


def sides_table(result: Result) -> str:
    """One row per case: the time of each side, its ratio to fastdpo's, and its peak memory."""
    names = [name for name, reason in reasons_not_measured(result).items() if reason is None]
    rows = []
    for case in result["cases"]:
        summary = result["summary"]["cases"][case["name"]]

        def show(name: str, summary: Result = summary) -> str:
            parts = [format_seconds(summary["seconds"][name]["value"])]
            if name in summary["times_fastdpo"]:
                parts.append(f"{summary['times_fastdpo'][name]['value']:.2f}x")
            if name in summary["peak_bytes"]:
                parts.append(f"{summary['peak_bytes'][name] / MIB:,.0f} MiB")
            return ", ".join(parts)

        rows.append([case["name"], *(cell(case, n, summary["seconds"], lambda _, n=n: show(n)) for n in names)])
    for group, cases in by_group(result["cases"]).items():
        means = result["summary"]["groups"].get(group, {})
        rows.append([mean_label(group, cases), *(format_mean(means.get(name)) for name in names)])
    note = "Median time, that time divided by fastdpo's, and peak memory."
    return f"{render(rows, ['', *names])}\n\n{note}"


def gpu_table(result: Result) -> str:
    """One row per case of the suite `step` on a GPU: TRL as shipped next to fastdpo, as it decides and with each fixed
    choice.
    """
    fixed = SUBJECT, LAYERS_COMPILED, GRAPHS, GRAPHS_OF_COMPILED
    rows = []
    for case in result["cases"]:
        summary = result["summary"]["cases"][case["name"]]
        seconds, of_trl = summary["seconds"], summary["seconds"].get(STOCK)

        def show(x: Result, of_trl: Result | None = of_trl) -> str:
            return _median(x) + (f", {of_trl['value'] / x['value']:.2f}x" if of_trl else "")

        best = min((seconds[name]["value"] for name in fixed if name in seconds), default=0)
        of_best = f"{seconds[AUTO]['value'] / best:.2f}" if best and AUTO in seconds else ""
        cells = [cell(case, AUTO, seconds, show), of_best, *(cell(case, name, seconds, show) for name in fixed)]
        rows.append([case["name"], cell(case, STOCK, seconds, _median), *cells])
    headers = ["step", STOCK, AUTO, "its time / that of the best choice", *fixed]
    on = f"{result['machine']['accelerator']}, torch {result['versions']['torch']}"
    what = "A step without the optimizer, of 8 pairs, in bfloat16, and its speedup over TRL"
    note = f"{what}: {on}, {result['date'][:10]}."
    of_rates, weights = {}, {}
    for name, x in result["summary"]["cases"].items():
        model = name.partition(",")[0]
        weights[model] = max(weights.get(model, 0), x["work"]["weights_bytes"])
        fastest = min(
            x["seconds"].keys() & {AUTO, *fixed}, key=lambda side, of=x["seconds"]: of[side]["value"], default=AUTO
        )
        of_rates[name] = [x], (STOCK, SUBJECT, fastest)
    rates = rates_table(of_rates, (STOCK, SUBJECT, "the fastest choice"))
    held = wrap(f"The weights take {' and '.join(f'{x / GIB:.2f} GiB ({model})' for model, x in weights.items())}.")
    return "\n\n".join([render(rows, headers), wrap(note), rates, held])


def rates_table(rows: Mapping[str, tuple[list[Result], Sequence[str]]], headers: Sequence[str]) -> str:
    """Real tokens a second, model FLOPs utilization and peak memory of sides.

    Args:
        rows: by first column, the summaries of its cases and the sides of its columns.
        headers: of the columns.
    """
    cells = [[label, *(_rates(summaries, side) for side in sides)] for label, (summaries, sides) in rows.items()]
    note = "Real tokens a second, without padding, and with a shared prompt in each of its rows; "
    if any(x["utilization"] for summaries, _ in rows.values() for x in summaries):
        note += "model FLOPs utilization, which shared prompts raise (`model_flops` in `benchmarks/rates.py`); "
    note += "and the largest peak of memory next to the weights."
    return f"{render(cells, ['', *headers])}\n\n{wrap(note)}"


def _rates(summaries: list[Result], side: str) -> str:
    measured = [(x, x["seconds"][side]["value"]) for x in summaries if side in x["seconds"]]
    seconds = sum(time for _, time in measured)
    parts = [f"{sum(x['work']['tokens'] for x, _ in measured) / seconds:,.0f}"] if measured else []
    if shares := [x["utilization"][side] * time / seconds for x, time in measured if side in x["utilization"]]:
        parts.append(f"{sum(shares):.0%}")
    if peaks := [x["peak_bytes"][side] / GIB for x, _ in measured if side in x["peak_bytes"]]:
        parts.append(f"{max(peaks):.2f} GiB")
    return ", ".join(parts)


def host_table(result: Result) -> str:
    """The times of the sides, and for each case where they go."""
    tables = [sides_table(result)]
    for case in result["cases"]:
        seconds = result["summary"]["cases"][case["name"]]["seconds"]
        shares = {name: side["facts"]["profile"] for name, side in case["sides"].items() if name in seconds}
        parts = dict.fromkeys(part for profile in shares.values() for part in profile)
        rows = [
            [part, *(format_seconds(profile.get(part, 0) * seconds[name]["value"]) for name, profile in shares.items())]
            for part in parts
        ]
        tables.append(render(rows, [f"{case['name']}, by whose code runs", *shares]))
    note = wrap(
        "Processor time of a step. It is divided by the shares of Python's profiler, which slows functions of Python "
        "down more than operators. An operator belongs to the part that calls it, those of the backward to torch."
    )
    return "\n\n".join([*tables, note])


TABLES = {
    **dict.fromkeys(("step", "hybrid", "reward"), step_table),
    "host": host_table,
}
"""Suites with a table of their own; the others use `sides_table`."""


def table(result: Result) -> str:
    """The table of a suite. The cases that the suite `step` has on a GPU have other sides than `step_table` shows."""
    of_gpu = result["suite"] == "step" and not any(LABELLED in case["sides"] for case in result["cases"])
    return sides_table(result) if of_gpu else TABLES.get(result["suite"], sides_table)(result)


def overview(results: dict[str, Result]) -> str:
    """Geometric means of every suite: one table of whole trainers, one of LM heads."""
    rows, shown = [], {}
    for suite, work in WORK.items():
        for group, cases in by_group(results[suite]["cases"] if suite in results else []).items():
            label = GROUP_LABELS.get(group, group)
            title = f"{work}, {label}" if label else work
            means = {other: mean_ratio(cases, other) for other in (STOCK, LABELLED, FLOOR)}
            if means[LABELLED] is None and means[STOCK] is None:
                continue
            over_floor = format_mean(means[FLOOR], inverse=True)
            speedups = format_mean(means[LABELLED]), format_mean(means[STOCK])
            rows.append([title, str(len(cases)), *speedups, over_floor])
            shown[title] = results[suite]
    headers = ["speedup of", "datasets", f"over {LABELLED}", f"over {STOCK}", "time relative to the floor"]
    tables = [render(rows, headers)] if rows else []
    if "head" in results:
        groups = results["head"]["summary"]["groups"]
        peers = list(dict.fromkeys(peer for means in groups.values() for peer in means))
        rows = [
            [f"LM head, {group}", *(format_mean(means.get(peer)) for peer in peers)] for group, means in groups.items()
        ]
        tables.append(render(rows, ["speedup over", *peers]))
        shown["LM heads"] = results["head"]
    return "\n\n".join([*tables, wrap(measured_on(shown))])


def reasons_not_measured(result: Result) -> dict[str, str | None]:
    """Of each side the reason why no case could measure it, or None."""
    records: dict[str, list[Result]] = {}
    for case in result["cases"]:
        for name, record in case["sides"].items():
            records.setdefault(name, []).append(record)
    return {
        name: of_side[0]["reason"] if all(record["status"] == UNAVAILABLE for record in of_side) else None
        for name, of_side in records.items()
    }


def sides_list(result: Result, descriptions: Mapping[str, str]) -> str:
    """What each side of a run is, or why it was not measured."""
    lines, missing = [], dict[str, list[str]]()
    for name, reason in reasons_not_measured(result).items():
        if reason is not None:
            missing.setdefault(reason, []).append(name)
        elif name in descriptions:
            lines.append(bullet(f"**{name}**: {descriptions[name]}"))
    lines += [bullet(f"Not measured: {', '.join(names)} ({reason}).") for reason, names in missing.items()]
    return "\n".join(lines)


def bullet(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def machine_of(result: Result) -> str:
    """The processor or accelerator of a run with its settings."""
    facts = result["machine"]
    bfloat16 = f", bfloat16 {facts['bfloat16']}" if "bfloat16" in facts else ""
    return f"{facts.get('accelerator') or facts['cpu']}, {plural(facts['threads'], 'thread')}{bfloat16}"


def commits_of(result: Result) -> list[str]:
    """The commits that a run's own cases were measured at."""
    own = [case.get("commit", result["commit"]) for case in result["cases"]]
    return list(dict.fromkeys(short_commit(commit) for commit in own or [result["commit"]]))


def at_commits(result: Result) -> str:
    """`commits_of`, in words."""
    commits = commits_of(result)
    return f"{'commit' if len(commits) == 1 else 'commits'} {' and '.join(commits)}"


def short_commit(commit: str) -> str:
    """Seven digits. A tree with changes is still named as one."""
    return re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", commit)


def measured_on(results: Mapping[str, Result]) -> str:
    """Where the rows of a table, by their first cells, were measured: they are named if that is not one place."""
    places: dict[str, list[str]] = {}
    for row, result in results.items():
        places.setdefault(f"{machine_of(result)}, {at_commits(result)}", []).append(row)
    if len(places) == 1:
        return f"Measured on {next(iter(places))}."
    return " ".join(f"Measured on {place}: {', '.join(rows)}." for place, rows in places.items())


SPEEDUP_ROWS = (  # suite, group, first column
    ("step", "full", "Training step, full fine-tuning"),
    ("step", "LoRA", "Training step, LoRA"),
    ("online", "all", "Online DPO step, without generation"),
    ("kto", "all", "KTO training step"),
    ("grpo", "GRPO", "GRPO step, without generation"),
    ("reward", "all", "Reward model training step"),
)


def speedups_table(results: dict[str, Result]) -> str:
    """At most six rows of speedups, and one paragraph that says what they are."""
    rows, shown, of_rates = [], {}, {}
    for suite, group, label in SPEEDUP_ROWS:
        cases = by_group(results[suite]["cases"]).get(group, []) if suite in results else []
        if not cases:
            continue
        means = results[suite]["summary"]["groups"].get(group, {})
        speedups = [_speedup(means.get(side)) for side in (LABELLED, STOCK, FLOOR)]
        rows.append([f"{label} ({plural(len(cases), 'dataset')})", *speedups])
        shown[label] = results[suite]
        summaries = [results[suite]["summary"]["cases"][case["name"]] for case in cases]
        of_rates[label] = summaries, (LABELLED if LABELLED in means else STOCK, SUBJECT)
    table = render(rows, ["speedup over", LABELLED, STOCK, f"the {FLOOR}"])
    return f"{table}\n\n{wrap(_speedups_note(shown))}\n\n{rates_table(of_rates, ['TRL', SUBJECT])}"


def _speedup(mean: Result | None) -> str:
    return "" if mean is None else f"{mean['value']:.1f}x{coverage(mean)}"


def _speedups_note(results: Mapping[str, Result]) -> str:
    environments = {
        f"{result['cases'][0]['facts'].get('dtype', 'float32')} with torch {result['versions']['torch']} and "
        f"TRL {result['versions'].get('trl', 'not installed')}"
        for result in results.values()
    }
    return (
        "A speedup is TRL's time divided by fastdpo's, as a geometric mean over the cases. TRL as shipped is timed for "
        "full fine-tuning, and for trainers that compute the same on CUDA. "
        f"In {'; '.join(sorted(environments))}. {measured_on(results)} "
        "`make site` adds intervals, memory and every other table."
    )


def where(result: Result) -> str:
    """The command, machine, versions and commits of a run."""
    command = f"python -m benchmarks.run --suite {result['suite']} --rounds {result['rounds']}"
    return wrap(f"`{command}` on {environment(result)}.")


def environment(result: Result) -> str:
    """Machine, versions, date and commits."""
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    packages = ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v != "not installed")
    return f"{machine}; {packages}; {result['date'][:10]}, {at_commits(result)}"


def profile_table(result: Result) -> str:
    """Seconds of a step by kind of work."""
    cases = {name.rpartition("/")[2]: case for name, case in result["cases"].items()}
    kinds = dict.fromkeys(kind for case in cases.values() for kind in case["kinds"])
    rows = [[kind, *(f"{case['kinds'].get(kind, 0):.2f}" for case in cases.values())] for kind in kinds]
    return render(rows, ["seconds", *(f"{name} ({case['seconds']:.2f} s)" for name, case in cases.items())])


def demo_table(result: Result) -> str:
    """The costs of `make demo`."""
    rows = []
    for cost in result["summary"]["costs"]:
        digits = 2 if cost["unit"] == "s" else 0
        sides = (f"{cost[side]:,.{digits}f} {cost['unit']}".strip() for side in ("stock", "fastdpo"))
        rows.append([cost["name"], *sides, f"{cost['ratio']:.1f}x"])
    steps = len(result["fastdpo"]["steps"])
    difference = f"{result['summary']['loss_difference']:.1e}"
    rows.append([f"largest difference of the loss over {steps} steps", "", difference, ""])
    return render(rows, ["", "TRL", "fastdpo", "ratio"])


def trainings_table(result: Result) -> str:
    """The seconds, losses and memory of whole trainings, and the parts of their first steps, if they were measured."""
    rows, of_steps = [], result["summary"]
    weights = of_steps["work"]["weights_bytes"]
    for name, x in result["sides"].items():
        first, *others = x["step_seconds"]
        losses = " ".join(f"{log['loss']:.4f}" for log in x["logs"] if "loss" in log)
        (evaluated,) = (log["eval_loss"] for log in x["logs"] if "eval_loss" in log)
        seconds = (f"{s:.2f} s" for s in (x["seconds"], first, median(others)))
        speeds = f"{of_steps['tokens_per_second'][name]:,.0f}", f"{of_steps['utilization'].get(name, 0):.0%}"
        memory = f"{(x['peak_bytes'] or weights) / GIB - weights / GIB:.1f}"
        rows.append([name, *seconds, *speeds, losses, f"{evaluated:.4f}", memory])
    headers = ["", "training", "first step", "median of the others", "tokens a second", "utilization", "losses"]
    headers += ["evaluation", f"GiB next to {weights / GIB:.1f} of weights"]
    tables = [render(rows, headers)]
    for title, key in (("before the first step", "before_first_step"), ("the first step", "first_step")):
        of_sides = {name: x[key] for name, x in result["sides"].items() if key in x}
        parts = dict.fromkeys(part for seconds in of_sides.values() for part in seconds)
        rows = [[part, *(f"{seconds.get(part, 0):.2f} s" for seconds in of_sides.values())] for part in parts]
        tables += [render(rows, [title, *of_sides])] if rows else []
    return "\n\n".join(tables)
