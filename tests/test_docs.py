"""The documentation's code runs as printed, its commands and links exist, and it is up to date."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fastdpo.__main__ import parser
from fastdpo.commands.check.side import parse_fields
from tests.support.documents import trained
from tests.support.documents.markdown_blocks import PAGES, ROOT, blocks, blocks_of

PYTHON = blocks("python")
GENERATED = ("support.md", "troubleshooting.md", "CHANGELOG.md")
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_block_has_a_language_that_is_tested():
    for page in PAGES:
        for block in blocks_of(page):
            assert block.language in ("python", "bash", "diff", "text"), block.place


@pytest.mark.parametrize("block", PYTHON, ids=[block.place for block in PYTHON])
def test_python_runs_as_printed(block, tmp_path, monkeypatch, capsys):
    """Every block runs in an empty namespace and prints the values in its comments."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, block.place, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    for comment in re.findall(r"^ *print\(.*\)  # (.*)$", block.code, re.M):
        assert comment.split(": ")[0] in printed, f"{block.place} prints {printed}, and its comment says {comment}"


@pytest.mark.parametrize("block", blocks("bash"), ids=[block.place for block in blocks("bash")])
def test_commands_exist(block):
    for line in block.code.splitlines():
        command = line.split("  #")[0].strip()
        if command:
            check_command(command)


def test_the_table_of_trainers_names_what_the_tests_train():
    committed = trained.read(trained.COMMITTED)
    assert trained.untrained_entries(committed) == [], f"add what your tests train: {trained.__doc__}"
    page = trained.PAGE.read_text()
    assert page == trained.with_table(page, committed), (
        "update the table: python -m tests.support.documents.trained --update"
    )


def test_make_targets_in_sentences_exist():
    for page in PAGES:
        for target in re.findall(r"`make ([\w-]+)", page.read_text()):
            assert target in TARGETS, f"{page.name}: make {target}"


def test_the_paths_in_the_map_of_the_tree_exist():
    """Every path at the beginning of a line of CONTRIBUTING's map of the tree exists."""
    (map_of_the_tree,) = [
        b.code for b in blocks("text") if b.page == "CONTRIBUTING.md" and b.code.startswith("kernels/")
    ]
    home = ROOT
    for line in map_of_the_tree.splitlines():
        path = re.match(r" *(\S+)", line)[0]
        if not path.startswith(" "):
            home = ROOT / path.strip()
            assert home.exists(), path
        elif path.endswith((".py", "/")):
            assert (home / path.strip()).exists(), f"{home.name}: {path.strip()}"


def check_command(command: str) -> None:
    command = command.removeprefix(".venv/bin/")
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["make", *targets]:
            assert set(targets) <= set(TARGETS), command
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), command
        case ["accelerate", "launch", "-m", module, *_]:  # tests/test_run.py runs it
            assert importlib.util.find_spec(module), command
        case ["fastdpo", "run", program, *_]:
            assert (ROOT / "tests" / "programs" / program.removesuffix("-cli")).is_dir(), f"nothing tests {command}"
        case ["fastdpo", "doctor", *_]:
            parser().parse_args(words[1:])
        case ["fastdpo", "check", *_]:
            args, fields = parser().parse_known_args(words[1:])
            assert args.tiny or args.model
            parse_fields([*fields, "--use_cpu=true"])
        case [".ci/run"]:
            assert (ROOT / command).exists()
        case ["python", script, *_]:
            assert (ROOT / script).exists(), command
        case ["pip", "install", "-e", place]:
            extras = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", place)
            assert extras, command
            assert set(filter(None, (extras[1] or "").split(","))) <= EXTRAS.keys(), command
        case ["pip", "install", package]:
            assert re.fullmatch(r"[\w-]+==[\d.]+", package), command
        case _:
            pytest.fail(f"this test does not know the command: {command}")


def test_the_targets_of_links_exist():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if link.startswith(("http:", "https:")):
                continue
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            if heading:
                assert heading in anchors(target), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_drawn_pictures_are_up_to_date():
    spec = importlib.util.spec_from_file_location("draw_layout", ROOT / "docs" / "draw_layout.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    for name, draw in drawing.PICTURES.items():
        assert (ROOT / "docs" / name).read_text() == draw(), "run `make docs`"


def test_every_page_is_on_the_site():
    """`make site` fails if one is missing, too."""
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": ([\w-]+\.md)$", text.partition("\nnav:\n")[2], re.M)
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - {"package.md"} <= set(listed)
    assert len(listed) == len(set(listed))


def test_every_page_says_first_what_it_is_for():
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        _, title, first, *_ = re.split(r"\n+", f"\n{page.read_text()}", maxsplit=3)
        assert title.startswith("# "), page.name
        assert not first.startswith(("#", "```", "|")), page.name


def test_pages_are_read_in_minutes():
    """Each has an answer to one question. Tables that are generated grow with what is measured."""
    lengths = {}
    for page in (page for page in PAGES if page.name not in GENERATED):
        by_hand = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", page.read_text(), flags=re.S)
        lengths[page.name] = len(by_hand.split())
    assert max(lengths.values()) <= 1600, lengths
    assert sum(lengths.values()) <= 13_000, lengths


def test_workflows_call_targets_that_exist():
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text()
        called = re.findall(r"- run: make (.*)", text)
        assert called, workflow.name
        listed = re.search(r"target: \[(.*)\]", text)
        for command in called:
            targets = listed[1].split(", ") if listed and "matrix.target" in command else command.split()
            assert set(targets) <= set(TARGETS), workflow.name
