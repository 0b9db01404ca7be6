"""The numbers in the prose of README.md, docs/results.md and docs/notes/performance.md, and the expressions of them.

    python -m benchmarks.report

writes the values into the pages. The tests check that the pages hold them, and that every other
number of these pages is in `CONSTANTS`. Tables stand between markers and are generated as a whole
(`benchmarks.report`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import product
from statistics import geometric_mean
from string import Formatter
from typing import Any, NamedTuple

from benchmarks.cases import SUBJECT
from benchmarks.suites.attention import PADDED, UNSHARED
from benchmarks.suites.step import BUDGET, FLOOR, GRAPHS_OF_COMPILED, LABELLED, STOCK
from benchmarks.tables import coverage

GIB = 1 << 30

Result = dict[str, Any]


class Numbers:
    """What expressions read of the committed results.

    Args:
        results: of the suites, by name.
        others: the parsed JSON of other programs, by the name of the file.
        on_gpu: results of suites on a GPU, by name. Methods take "gpu/step" for the suite `step` of these.
    """

    def __init__(self, results: dict[str, Result], others: dict[str, Result], on_gpu: dict[str, Result]) -> None:
        self.results, self.others, self.on_gpu = results, others, on_gpu
        self._by_suite = results | {f"gpu/{name}": result for name, result in on_gpu.items()}

    def cases(self, suite: str, *groups: str) -> list[Result]:
        """The cases of a suite, or those of some of its groups."""
        return [case for case in self._by_suite[suite]["cases"] if not groups or case["group"] in groups]

    def mean(self, suite: str, group: str, side: str) -> Result:
        """The geometric mean of the cost of a side divided by fastdpo's; see `summary.mean_ratio`."""
        return self._by_suite[suite]["summary"]["groups"][group][side]

    def ratios(self, suite: str, sides: Iterable[str], *groups: str) -> dict[str, float]:
        """By case and side, the time of the side divided by fastdpo's. Sides that were not measured are left out."""
        summaries = self._by_suite[suite]["summary"]["cases"]
        return {
            f"{case['name']}, {side}": summaries[case["name"]]["times_fastdpo"][side]["value"]
            for case, side in product(self.cases(suite, *groups), sides)
            if side in summaries[case["name"]]["times_fastdpo"]
        }

    def range(self, suite: str, sides: Iterable[str], *groups: str) -> tuple[float, float]:
        """The least and the greatest of `ratios`."""
        values = self.ratios(suite, sides, *groups).values()
        return min(values), max(values)

    def peaks(self, suite: str, side: str) -> list[int]:
        """Peak bytes of a side in each case, 0 where it was not measured."""
        summaries = self._by_suite[suite]["summary"]["cases"]
        return [summaries[case["name"]]["peak_bytes"].get(side, 0) for case in self.cases(suite)]

    def size(self, name: str) -> int:
        """A dimension of the model of the suite `step`."""
        return self.results["step"]["cases"][0]["workload"]["size"][name]

    def rows(self, suite: str) -> list[Any]:
        """Lengths of the first batch of a suite."""
        return self.results[suite]["cases"][0]["workload"]["batches"][0]


class Claim(NamedTuple):
    """A sentence, or a part of one, with a field for each number, and the expression of its values."""

    page: str
    text: str
    values: Callable[[Numbers], tuple[float | str, ...]]


def _over_floor(n: Numbers) -> tuple[float | str, ...]:
    inverse = {name: 1 / value for name, value in n.ratios("step", [FLOOR], "full").items()}
    least, greatest = (pick(inverse, key=inverse.__getitem__) for pick in (min, max))
    datasets = (name.removeprefix("full/").removesuffix(f", {FLOOR}") for name in (least, greatest))
    return inverse[least], inverse[greatest], *datasets, 1 / n.mean("step", "full", FLOOR)["value"]


def _half_the_tokens(n: Numbers) -> tuple[float, ...]:
    ratios = n.ratios("step", [BUDGET]).values()
    memory = [100 * half / whole for half, whole in zip(n.peaks("step", BUDGET), n.peaks("step", SUBJECT), strict=True)]
    return geometric_mean(ratios), len(ratios), min(ratios), max(ratios), min(memory), max(memory)


def _on_gpu(n: Numbers) -> tuple[float, ...]:
    peaks = zip(n.peaks("gpu/step", SUBJECT), n.peaks("gpu/step", STOCK), strict=True)
    memory = [100 * of_fastdpo / of_trl for of_fastdpo, of_trl in peaks]
    return *n.range("gpu/step", [STOCK]), min(memory), max(memory)


def _graphs_on_gpu(n: Numbers) -> tuple[float, float]:
    """TRL's time divided by that of replayed steps."""
    stock, replayed = (n.ratios("gpu/step", [side], "0.5B, full").values() for side in (STOCK, GRAPHS_OF_COMPILED))
    speedups = [of_trl / x for of_trl, x in zip(stock, replayed, strict=True)]
    return min(speedups), max(speedups)


def _shares(n: Numbers, kind: str) -> tuple[float, float]:
    shares = [100 * case["kinds"][kind] / sum(case["kinds"].values()) for case in n.others["profile"]["cases"].values()]
    return min(shares), max(shares)


def _attention(n: Numbers, side: str) -> tuple[float, float, float]:
    ratios = n.ratios("attention", [side], "fixed lengths", "dataset lengths").values()
    return min(ratios), max(ratios), geometric_mean(ratios)


def _compiled_with_entropy(n: Numbers) -> tuple[float, ...]:
    peaks = [
        n.results["head"]["summary"]["cases"][case["name"]]["peak_bytes"] for case in n.cases("head", *ENTROPY_GROUPS)
    ]
    memory = [of_sides[COMPILED] / of_sides[SUBJECT] for of_sides in peaks]
    return *n.range("head", [COMPILED], *ENTROPY_GROUPS), min(memory), max(memory)


README, RESULTS, PERFORMANCE = "README.md", "docs/results.md", "docs/notes/performance.md"
ENTROPY_GROUPS = ("trainable, with entropy", "frozen, with entropy")
COMPILED = "plain PyTorch, compiled"
STATISTICS_GROUPS = ("trainable, with statistics", "frozen, with statistics")
CLAIMS = (
    Claim(
        README,
        "measured on {:d} CPU cores and on one GPU. On the CPU, a DPO step of a small Llama in TRL was {:.1f} to "
        "{:.1f} times as fast",
        lambda n: (n.results["step"]["machine"]["threads"], *n.range("step", [LABELLED])),
    ),
    Claim(
        README,
        "a full fine-tuning step of a model of the size of Qwen2.5-0.5B was {:.1f} to {:.1f} times as fast and took "
        "{:.0f} to {:.0f} % of the memory",
        _on_gpu,
    ),
    Claim(README, "the step was {:.1f} to {:.1f} times as fast as TRL's", _graphs_on_gpu),
    Claim(
        RESULTS,
        "Each step has {:d} pairs (online {:d}, KTO {:d} rows, GRPO {:d} groups of {:d} completions)",
        lambda n: (*(len(n.rows(suite)) for suite in ("step", "online", "kto", "grpo")), len(n.rows("grpo")[0]) - 1),
    ),
    Claim(
        RESULTS,
        "a Llama with {:d} layers, hidden size {:d} and a vocabulary of {:,d}",
        lambda n: (n.size("layers"), n.size("hidden"), n.size("vocabulary")),
    ),
    Claim(
        PERFORMANCE,
        "the full fine-tuning steps take {:.2f} to {:.2f} times the floor ({} and {}), {:.2f} times in the geometric "
        "mean",
        _over_floor,
    ),
    Claim(
        PERFORMANCE,
        "next to trainers that hold up to {:.1f} GiB each",
        lambda n: (max(n.peaks("step", STOCK) + n.peaks("step", LABELLED)) / GIB,),
    ),
    Claim(
        PERFORMANCE,
        "(`max_tokens`), a step takes {:.2f} times as long in the geometric mean of {:d} cases ({:.2f} to {:.2f}), "
        "with {:.0f} to {:.0f} % of the memory above the model",
        _half_the_tokens,
    ),
    Claim(
        PERFORMANCE,
        "Under LoRA, a step takes {:.2f} times the floor, in the geometric mean of {:d} datasets, and is {:.1f} times "
        "as fast as TRL with labelled positions only{}.",
        lambda n: (
            1 / n.mean("step", "LoRA", FLOOR)["value"],
            n.mean("step", "LoRA", FLOOR)["cases"],
            n.mean("step", "LoRA", LABELLED)["value"],
            coverage(n.mean("step", "LoRA", LABELLED)),
        ),
    ),
    Claim(
        PERFORMANCE,
        "It is {:.1f} times as fast as TRL with labelled positions only, in the geometric mean of {:d} datasets.",
        lambda n: (
            n.mean("evaluation", "all", LABELLED)["value"],
            n.mean("evaluation", "all", LABELLED)["cases"],
        ),
    ),
    Claim(
        PERFORMANCE,
        "With {} bfloat16, a step of a smaller model (suite `bf16`) is {:.1f} times as fast",
        lambda n: (n.results["bf16"]["machine"]["bfloat16"], n.mean("bf16", "all", LABELLED)["value"]),
    ),
    Claim(
        PERFORMANCE,
        "passes over logits, {:.0f} to {:.0f} % of a step, and Python, {:.0f} to {:.0f} %",
        lambda n: (*_shares(n, "passes over logits"), *_shares(n, "Python and time between operators")),
    ),
    Claim(
        PERFORMANCE,
        "The head alone is {:.2f} to {:.2f} times as fast as TRL's head, over the sizes that were measured. It is "
        "{:.2f} to {:.2f} times as fast as plain PyTorch, and {:.2f} to {:.2f} times as fast as plain PyTorch under "
        "`torch.compile`",
        lambda n: tuple(
            bound
            for side in ("TRL", "plain PyTorch", COMPILED)
            for bound in n.range("head", [side], "trainable", "frozen")
        ),
    ),
    Claim(
        PERFORMANCE,
        "With TRL's statistics it is {:.2f} to {:.2f} times as fast as TRL's chunked head, and {:.2f} to {:.2f} times "
        "as fast as plain PyTorch",
        lambda n: (
            *n.range("head", ["TRL"], *STATISTICS_GROUPS),
            *n.range("head", ["plain PyTorch"], *STATISTICS_GROUPS),
        ),
    ),
    Claim(
        PERFORMANCE,
        "With the entropy alone, plain PyTorch under `torch.compile` takes {:.2f} to {:.2f} times as long as fastdpo, "
        "and {:.2f} to {:.2f} times as much memory",
        _compiled_with_entropy,
    ),
    Claim(
        PERFORMANCE,
        "One layer of {:d} pairs is {:.2f} to {:.2f} times as fast as torch's attention over padded rows, {:.2f} times "
        "in the geometric mean",
        lambda n: (
            len(n.cases("attention")[0]["workload"]["pairs"]),
            *_attention(n, PADDED),
        ),
    ),
    Claim(
        PERFORMANCE,
        "Sharing the prompt makes it {:.2f} to {:.2f} times as fast, {:.2f} times in the geometric mean,",
        lambda n: _attention(n, UNSHARED),
    ),
    Claim(
        PERFORMANCE,
        "For {} tokens it takes {:.1f} ms",
        lambda n: next(
            (re.sub(r"packing | tokens.*", "", name), 1000 * seconds)
            for name, seconds in n.others["ops"]["others"].items()
        ),
    ),
)
CONSTANTS = {
    README: (
        "Python 3.11 or later",
        "Triton 3.6 or later",
        "TRL 0.24 to 1.16",
        "OpenRLHF 0.9.10 to 0.11",
        "LLaMA-Factory 0.9.5",
        "ms-swift 4.6",
        "axolotl 0.19",
        "H200",
    ),
    RESULTS: ("on 2 CPU cores",),
    PERFORMANCE: (
        "tiles of 64 MiB",
        "blocks of 8 MiB",
        "a 4-layer Llama",
        "8 pairs",
        "1/total",
    ),
}
"""Numbers that were not measured: versions, and sizes in the code."""

MASKED = (
    r"^```.*?^```",  # code, which other tests run
    r"<!-- \w+:begin -->.*?<!-- \w+:end -->",  # generated text
    r"`[^`\n]*`",
    r"\]\([^)\s]*\)",
    r"<[^>]*>",
)
NUMBER = r"(?<![\w.\-])\d[\d,.]*"


def write(page: str, text: str, numbers: Numbers) -> str:
    """The text of a page with the values of its claims.

    Raises:
        ValueError: a sentence is not in the page, or is in it more than once.
    """
    for claim in CLAIMS:
        if claim.page == page:
            place = locate(claim, text, numbers)
            for (start, end), value in reversed([*zip(place.fields, place.values, strict=True)]):
                if text[start:end].split() != value.split():  # a page may wrap it
                    text = text[:start] + value + text[end:]
    return text


def unsourced(page: str, text: str, numbers: Numbers) -> list[str]:
    """The numbers of a page that are neither generated nor constants, each with the words around it.

    Raises:
        ValueError: a sentence or a constant is not in the page.
    """

    def blank(match: re.Match[str]) -> str:
        return " " * len(match[0])

    for claim in CLAIMS:
        if claim.page == page:
            start, end = locate(claim, text, numbers).span
            text = text[:start] + " " * (end - start) + text[end:]
    for pattern in MASKED:
        text = re.sub(pattern, blank, text, flags=re.M | re.S)
    for constant in CONSTANTS[page]:
        text, found = re.subn(_literal(constant), blank, text)
        if not found:
            raise ValueError(f"report: {page} must contain the constant {constant!r}; it is missing")
    return [text[max(0, m.start() - 40) : m.end() + 40].strip() for m in re.finditer(NUMBER, text)]


def _literal(text: str) -> str:
    """A pattern for text that may be wrapped in other places."""
    return r"\s+(?:> )?".join(map(re.escape, text.split(" ")))


class Place(NamedTuple):
    """Where a sentence is in a page.

    Attributes:
        span: its begin and end.
        fields: begin and end of each number.
        values: their current values, as text.
    """

    span: tuple[int, int]
    fields: list[tuple[int, int]]
    values: list[str]


def locate(claim: Claim, text: str, numbers: Numbers) -> Place:
    """Finds a sentence in a page, whatever its numbers are.

    Raises:
        ValueError: it is not in the page, or is in it more than once.
    """
    values = iter(claim.values(numbers))
    pattern, formatted = "", []
    for literal, field, spec, _ in Formatter().parse(claim.text):
        pattern += _literal(literal)
        if field is not None:
            value = next(values)
            pattern += r"(.{0,80}?)" if isinstance(value, str) else r"([\d,]*\.?\d+)"
            formatted.append(format(value, spec or ""))
    matches = list(re.finditer(pattern, text, re.S))
    if len(matches) != 1:
        raise ValueError(f"report: {claim.page} must contain once: {claim.text!r}; it does {len(matches)} times")
    (match,) = matches
    return Place(match.span(), [match.span(i) for i in range(1, len(formatted) + 1)], formatted)
