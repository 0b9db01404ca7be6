"""Every reason in the source has a name that docs/troubleshooting.md explains."""

import ast
import copy
import pickle
import re
import string

import pytest

from fastdpo.reasons import Reason, kinds
from tests.support.documents import reason_sections
from tests.support.documents.markdown_blocks import ROOT

SOURCE = {path: path.read_text() for path in sorted((ROOT / "fastdpo").rglob("*.py"))}
CALLS = [
    (f"{path.name}:{node.lineno}", node)
    for path, text in SOURCE.items()
    if "Reason(" in text
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reason"
]
PRINTED = {"nothing-imported"}
"""Printed by a process that may not have imported fastdpo."""

WITHOUT_NAMES = {"ops", "doctor.py", "max_tokens"}
"""Where reasons concern one kernel or one file, or are raised as errors."""


def details_of(name: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(kinds()[name]["text"]) if field}


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[place for place, _ in CALLS])
def test_a_reason_in_the_source_has_a_kind_and_its_details(call):
    (name,) = (argument.value for argument in call.args)
    assert name in kinds()
    assert {keyword.arg for keyword in call.keywords} == details_of(name)


def test_every_kind_of_reason_is_used():
    assert {call.args[0].value for _, call in CALLS} | PRINTED == kinds().keys()
    launcher = (ROOT / "fastdpo" / "commands" / "startup" / "sitecustomize.py").read_text()
    for name in PRINTED:
        text = kinds()[name]["text"].replace("{trainers}", "{supported}")
        assert f"{text} [{name}]" in launcher


def test_no_function_takes_or_returns_a_reason_without_a_name():
    """Arguments and results that hold reasons are annotated as such, and basedpyright checks them."""
    unnamed = []
    for path, text in SOURCE.items():
        if not WITHOUT_NAMES.isdisjoint(path.relative_to(ROOT / "fastdpo").parts):
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.FunctionDef(name=name, returns=annotation) | ast.arg(arg=name, annotation=annotation):
                    is_text = annotation is not None and re.search(r"^str$|\bstr \| None", ast.unparse(annotation))
                    if is_text and name.endswith(("reason", "difference")):
                        unnamed.append(f"{path.name}: {name}")
    assert unnamed == []


def test_names_are_words_and_texts_end_a_sentence():
    for name, kind in kinds().items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
        assert not kind["text"].endswith(".")
        assert kind["advice"].endswith(".")


def test_a_reason_is_its_text_and_survives_copies():
    reason = Reason("alibi", model="Bloom")
    assert reason == "Bloom biases its attention by distance (ALiBi)"
    for other in (reason, copy.deepcopy(reason), pickle.loads(pickle.dumps(reason))):
        assert other == reason
        assert other.named == f"{reason} [alibi]"


def test_the_page_is_up_to_date():
    assert reason_sections.PAGE.read_text(encoding="utf-8") == reason_sections.page(), "run `make docs`"


def test_the_page_has_a_section_for_every_name():
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert headings == list(kinds())
