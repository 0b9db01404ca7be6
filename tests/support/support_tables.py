"""docs/support.md, made from what the tests run: `python tests/support/support_tables.py`."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from types import ModuleType

import torch
from families import FAILS_IN_STOCK, FUSED, STOCK, tiny_family
from surgeries import SURGERIES
from tabulate import tabulate

from fastdpo import attention
from fastdpo.integrations import qualify

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
TESTS = ROOT / "tests" / "integrations"

TEXT = """# What is supported, and how that is known

Made from the tests by `make docs`; a test says when it is stale.

## Model families

Nothing in the library knows a family by its name. A model's configuration and modules are looked at, and then it is
run before it is trusted: a few random rows, longer than its window, packed and padded, must give the same hidden
states. So a family that is not in this table is packed too if it passes, and takes TRL's own path if it does not, with
the reason in the log. Those in the table are trained in the tests, as tiny random models with what makes them special
switched on: every logged number and every gradient as stock's; and their padded forward and `generate()` give the same
bits as before, with eager and with sdpa attention.

*packed*: no padding is computed. *shared*: what the answers to a prompt have in common is computed once. *fused*:
logits are never stored whole.

{families}

TRL's own fused head fails on {failing}, patched or not, with the same error.

## What is done to a model between two steps

The training goes on as TRL's does: fused, or in TRL's own path for the reason that is logged.

{surgeries}

With `reference_memory`, the reference is looked at in every step. What was remembered is dropped when it is {changes}.

## Fields of `DPOConfig`, and those of `TrainingArguments` that change a model or its calls

*untouched*: read before the model is called, or after, by the same code on either side. Otherwise the test that trains
with the field set, stock against patched.

{options}
"""


def why_not(name: str) -> str | None:
    model = tiny_family(name)
    reason = qualify.why_not(model)
    if reason is None:
        attention.switch(model)
        reason = qualify.probe(model, torch.device("cpu")).wrong
    return reason


def family_rows() -> list[list[str]]:
    rows = []
    for name in (*FUSED, *STOCK):
        reason = why_not(name)
        special = FUSED[name][0] if name in FUSED else ""
        reason = re.sub(r" by [\d.]+ of their size .*", "", reason or "")  # the number is not the same everywhere
        rows.append([name, special, *["no" if reason else "yes"] * 3, reason])
    return rows


def tests_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TESTS / f"test_trl_dpo_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def option_rows() -> list[list[str]]:
    fields, rows = tests_of("config_fields"), []
    for name, claim in {**fields.OF_DPO, **fields.OF_TRAINING}.items():
        text = claim if isinstance(claim, str) else f"`{claim[0]}`: {', '.join(f'`{test}`' for test in claim[1])}"
        rows.append([f"`{name}`", text])
    return rows


def surgery_rows() -> list[list[str]]:
    return [[surgery.what, "no" if surgery.reason else "yes", surgery.reason] for surgery in SURGERIES]


def page() -> str:
    of_families = ["family", "what is special", "packed", "shared", "fused", "why not"]
    changes = list(tests_of("changing_reference").CASES)
    return TEXT.format(
        families=tabulate(family_rows(), of_families, tablefmt="github"),
        failing=", ".join(FAILS_IN_STOCK),
        surgeries=tabulate(surgery_rows(), ["what is done", "fused", "why not"], tablefmt="github"),
        changes=" or ".join([", ".join(changes[:-1]), changes[-1]]),
        options=tabulate(option_rows(), ["field", "what becomes of it"], tablefmt="github"),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text(page())
