"""The numbers that docs/notes/gpu.md predicts for a GPU, next to what was measured there, as far as it was.

`python -m benchmarks.report` writes the table into that page. It reads benchmarks/results/gpu.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import SUBJECT
from benchmarks.first_step import COMPILING, UNTUNED
from benchmarks.suites.step import STOCK, UNSHARED
from benchmarks.tables import render

NOT_MEASURED = "not measured"
MIB = 1 << 20
HEAD_CASE = "N 16,384, V 151,936, D 896, trainable"
DKV = "_packed_attention_dkv_kernel"

Files = dict[str, Any]


class Prediction(NamedTuple):
    """A predicted number.

    Attributes:
        what: what it is a number of.
        predicted: it.
        measured: reads the number from the parsed files, by their names. It raises KeyError if there is none.
        why: what explains the difference, or what was assumed.
    """

    what: str
    predicted: str
    measured: Callable[[Files], str]
    why: str


def case(files: Files, suite: str, name: str) -> Any:
    """The record of a case in the JSON of a suite."""
    found = {x["name"]: x for x in files[suite]["cases"]}
    return found[name]


def head_bytes(files: Files) -> str:
    return f"{files['head']['summary']['cases'][HEAD_CASE]['peak_bytes'][SUBJECT] / MIB:,.0f} MiB"


def gradient_of_keys(name: str) -> Callable[[Files], str]:
    def read(files: Files) -> str:
        kernels = case(files, "attention", name)["sides"][f"{SUBJECT}, triton"]["facts"]["kernels"]
        return f"{kernels[DKV]:.2f} ms"

    return read


def first_step(side: str, number: Callable[[Any], str]) -> Callable[[Files], str]:
    return lambda files: number(files["first_step"]["cases"][f"{side}, cold"])


def profiled(name: str, side: str) -> Callable[[Files], Any]:
    return lambda files: files["profile"]["cases"][f"0.5B, full/{name}, {side}"]


def launches_of_sharing(files: Files) -> str:
    shared, unshared = (profiled("UltraFeedback", side)(files)["kernels"] for side in (SUBJECT, UNSHARED))
    return f"{shared - unshared}"


def host_ratio(files: Files) -> str:
    stock, fused = (profiled("HH", side)(files)["seconds"] for side in (STOCK, SUBJECT))
    return f"{stock / fused:.2f}x"


PREDICTIONS = (
    Prediction(
        "Logits kept by the head of the 0.5B model, 16,384 scored tokens",
        f"{16_384 * 151_936 * 2 / MIB:,.0f} MiB",
        head_bytes,
        "The measured peak also holds the gradients of the weight, in float32 and bfloat16, and of the hidden states.",
    ),
    Prediction(
        "Gradient of keys behind a header, 8 pairs (H200)", "0.23 ms", gradient_of_keys("header, 8 pairs"), "Counted."
    ),
    Prediction(
        "Gradient of keys behind a header, 64 pairs (H200)", "1.80 ms", gradient_of_keys("header, 64 pairs"), "Counted."
    ),
    Prediction(
        "Kernels that a first step compiles, `FASTDPO_TUNE=0`, attention by a library",
        "12",
        first_step(UNTUNED, lambda x: f"{x['calls'][COMPILING]}"),
        "Recorded on a CPU.",
    ),
    Prediction(
        "Kernels that a first step compiles, with tuning",
        "20",
        first_step(SUBJECT, lambda x: f"{x['calls'][COMPILING]}"),
        "Recorded on a CPU.",
    ),
    Prediction(
        "Seconds that it compiles, with Triton 3.6",
        "6.5 s",
        first_step(SUBJECT, lambda x: f"{x['parts'][COMPILING]:.1f} s"),
        "One processor compiles one kernel after another.",
    ),
    Prediction(
        "Kernels that later batches of other lengths compile",
        "0",
        first_step(SUBJECT, lambda x: f"{x['compiled_later']}"),
        "Integers that differ in whether 16 divides them would compile again.",
    ),
    Prediction(
        "Launches that shared prompts add to a step of 24 layers",
        f"{24 * (2 * 1 + 2)}",
        launches_of_sharing,
        "One in each forward, of policy and reference, and two in the backward.",
    ),
    Prediction(
        "Speedup of a step whose limit is the host (HH's lengths)",
        "0.99x",
        host_ratio,
        "The suite `host` leaves out the launches, of which attention has more where rows share prompts; and the "
        "host was not equally fast for all sides, which ran one after another.",
    ),
)


def table(directory: Path) -> str:
    """The table of the page."""
    files = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    rows = []
    for prediction in PREDICTIONS:
        try:
            measured = prediction.measured(files)
        except KeyError:
            measured = NOT_MEASURED
        rows.append([prediction.what, prediction.predicted, measured, prediction.why])
    return render(rows, ["", "predicted", "measured", "why"])
