"""Generates docs/support.md from the cases of the tests.

Usage: `python -m tests.support.documents.support_tables`, or `make docs`.
"""

from __future__ import annotations

import html
import importlib
import re
import warnings
from collections.abc import Iterable
from types import ModuleType

import torch
from transformers import PreTrainedModel

from fastdpo.models import attention
from fastdpo.models.examine import probe, support
from fastdpo.models.parts import language_model
from fastdpo.models.reward_head import CLASSIFIER_HEAD
from tests.support import ROOT
from tests.support.documents import newest
from tests.support.models import multimodal
from tests.support.models.families import FAILS_IN_STOCK, FUSED, PACKED_SINCE, STOCK, tiny_family
from tests.support.models.surgeries import SURGERIES
from tests.support.trl import exported, vision
from tests.support.trl.reward import has_classifier, reward_family

PAGE = ROOT / "docs" / "support.md"

PINS = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints" / "pins.txt").read_text(), re.M))

TEXT = """# Supported models, changes and fields

Generated from the tests by `make docs`; a test fails when the page is stale. The tests run with
transformers {transformers} and TRL {trl}, and before a release (`make test-newest`) with the newest versions that
can be installed. Last passed: {newest}.

## Model families

fastdpo does not know a model family by its name. It checks a model's configuration and modules, and
then probes the model: a few random rows, longer than its sliding window, must give the same hidden
states packed and padded, and in training the same gradients. A family that is not in this table is
therefore packed as well if it passes. Otherwise it falls back to TRL, and the reason is logged.
`make test-all` trains every other causal LM of the installed transformers of which it can make a tiny
one: 96 of the other 134 in transformers 5.23, all with TRL's numbers, and 54 of them packed.

The tests train every family in this table as a tiny random model that uses its special features.
Every logged number and every gradient must equal TRL's. Padded forward passes and `generate()` must
give the same bits as before, with eager and with sdpa attention.

- *packed*: padding is not computed
- *shared*: a prefix that the completions of a prompt share is computed once
- *fused*: logits are never stored whole
- *reward model*: the same tests train the family's `...ForSequenceClassification` in `RewardTrainer`, packed and
  shared; *no class* where transformers has none

{families}

TRL's own fused head fails on {failing} with the same error, with or without fastdpo.

## Multimodal families

The tests train these in the same way, on pairs of text and, where *images* says so, on pairs with images. "Once"
means that the tower computes each image once for both rows, and *both directions* names the layers in
which the tokens of an image attend to each other. Families whose tower is a model of the package `timm`,
such as Gemma 3n, are not tested.

{multimodal}

TRL's own fused head fails on {failing_multimodal} with the same error, with or without fastdpo.

## Trainers that TRL exports

The tests train each of them without fastdpo and with every trainer of TRL patched, but for those marked
*untouched*: neither they nor their modules are changed. A trainer whose own loss reads logits trains to the last
bit as before.

{exported}

## Changes to a model between two steps

Training continues with TRL's results: on the fused path, or on TRL's path with a logged reason.

{surgeries}

## Fields of `DPOConfig`, and fields of `TrainingArguments` that change a model or its calls

*untouched* means that TRL reads the field before or after the model is called, in code that is the
same with fastdpo. Otherwise the table names the file whose trainings set the field, with and
without fastdpo.

{options}
"""


def reason_of(model: PreTrainedModel) -> str | None:
    """The reason why a model is not packed, or None if it is packed."""
    reason = support.unsupported_reason(model)
    if reason is None:
        attention.switch(model)
        reason = probe.probe(model, torch.device("cpu")).unsupported_reason
    return reason


def of_reward_model(name: str) -> str:
    """Whether the reward models of a family are packed, and score as their class does."""
    if not has_classifier(name):
        return "no class"
    model = reward_family(name)
    return "no" if reason_of(model) or probe.score_difference(model, torch.device("cpu"), CLASSIFIER_HEAD) else "yes"


def family_rows() -> list[list[str]]:
    rows = []
    for name in (*FUSED, *STOCK):
        reason = reason_of(tiny_family(name))
        special = FUSED[name][0] if name in FUSED else ""
        # The measured difference depends on the machine.
        reason = re.sub(r" by [\d.]+ of their norm .*", "", reason or "")
        since = f"packed since transformers {PACKED_SINCE[name]}" if name in PACKED_SINCE else ""
        packed = "no" if reason else "yes"
        rows.append([name, special, *[packed] * 3, of_reward_model(name), "; ".join(filter(None, (reason, since)))])
    return rows


def multimodal_rows() -> list[list[str]]:
    rows = []
    for name, family in (multimodal.FUSED | multimodal.STOCK).items():
        model = multimodal.tiny_multimodal(name)
        reason = reason_of(model) or ""
        text = f"`{type(language_model(model)).__name__}`"
        features = family.features if name in multimodal.FUSED else ""
        rows.append([name, text, features, "no" if reason else "yes", images_of(name), reason])
    return rows


def images_of(name: str) -> str:
    """What becomes of a family's images, if the tests train it on any."""
    if name not in vision.FAMILIES:
        return ""
    where = vision.FAMILIES[name].islands
    return f"once; both directions in {where}" if where else "once"


def tests_of(name: str) -> ModuleType:
    """The imported module tests/integrations/trl_dpo/test_NAME.py."""
    return importlib.import_module(f"tests.integrations.trl_dpo.test_{name}")


def option_rows() -> list[list[str]]:
    fields = tests_of("config_fields")
    listed = [*fields.claims(fields.OF_DPO).items(), *fields.claims(fields.OF_TRAINING).items()]
    return [[f"`{name}`", f"`{claim}`" if claim.endswith(".py") else claim] for name, claim in listed]


def surgery_rows() -> list[list[str]]:
    rows = []
    for surgery in SURGERIES:
        reason = html.escape(surgery.reason or "", quote=False)  # a name may contain <lambda>
        rows.append([surgery.description, "no" if reason else "yes", reason])
    return rows


def exported_rows() -> list[list[str]]:
    rows = []
    for name, trainer_class in exported.exported():
        entry = exported.entry_of(trainer_class)
        claim = exported.CLAIMS.get(name)
        what = f"patched{'' if entry.by_default else ', if named'}" if entry else claim.what if claim else "unknown"
        rows.append([f"`{name}`", what])
    return rows


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table. Columns are not aligned, so that changing a cell changes one line only."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, ["---"] * len(headers), *rows))


def listed(items: Iterable[str], conjunction: str) -> str:
    *most, last = items
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def page() -> str:
    family_headers = ["family", "special features", "packed", "shared", "fused", "reward model", "reason"]
    multimodal_headers = ["family", "language model", "special features", "packed", "images", "reason"]
    return TEXT.format(
        transformers=PINS["transformers"],
        trl=PINS["trl"],
        newest=newest.sentence(),
        families=table(family_headers, family_rows()),
        failing=listed(FAILS_IN_STOCK, "and"),
        multimodal=table(multimodal_headers, multimodal_rows()),
        failing_multimodal=listed(multimodal.FAILS_IN_STOCK, "and"),
        exported=table(["trainer", "by `fastdpo.patch()`"], exported_rows()),
        surgeries=table(["change", "fused", "reason"], surgery_rows()),
        options=table(["field", "tested in"], option_rows()),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text(page())
