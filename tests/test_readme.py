"""README's script and the training loop of docs/own-loop.md run, and their results match the text."""

import copy
import json
import re
import tomllib
from importlib.metadata import version
from statistics import median

import pytest
import torch

import fastdpo
from benchmarks import report
from tests.integrations.test_custom_loops import own_logps
from tests.support.documents import speedups
from tests.support.documents.markdown_blocks import ROOT, blocks_of
from tests.support.programs.warm import run_program
from tests.support.trl.dpo import pairs, tiny_model, tokenizer

README, OWN_LOOP = ROOT / "README.md", ROOT / "docs" / "own-loop.md"
CHECKPOINT, DATASET, CONFIG = '"Qwen/Qwen2.5-0.5B-Instruct"', '"trl-lib/ultrafeedback_binarized"', 'output_dir="out"'


def the_block(language: str):
    """The first block of a language."""
    return next(block for block in blocks_of(README) if block.language == language)


def after_the_diff(diff: str) -> str:
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))


def test_the_script_runs_after_the_diff(tmp_path):
    """Runs the script as printed, with three replacements and a last line that prints the counters.

    Checkpoint and dataset are local, since tests download nothing, and the configuration is the one that
    README has for a CPU.
    """
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(16)))
    script = after_the_diff(the_block("diff").code)
    on_a_cpu = re.search(r"On a CPU, TRL needs\s+`DPOConfig\((.*?)\)`", README.read_text())[1]
    for name, local in ((CHECKPOINT, '"./model"'), (DATASET, '"./data"'), (CONFIG, on_a_cpu)):
        assert script.count(name) == 1
        script = script.replace(name, local)
    (tmp_path / "train.py").write_text(f"{script}print(fastdpo.calls)\n")

    offline = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = run_program("train.py", cwd=tmp_path, env={"FASTDPO_STRICT": "1", **offline})
    assert done.returncode == 0, done.stderr[-4000:]
    report, *_, counters = (line for line in done.stdout.splitlines() if line.startswith(("fastdpo:", "Counter")))
    assert report == re.sub(r"\(1\.\d+\.\d+\)", f"({version('trl')})", the_block("text").code.strip())
    assert re.findall(r"'(\w+)', '(\w+)'\): (\d+)", counters) == [(m, "fused", "6") for m in ("policy", "reference")]


@pytest.fixture
def loop() -> dict:
    """The namespace after the first loop of docs/own-loop.md, with larger weights to amplify errors."""
    names = {"__name__": "__main__"}
    block = next(block for block in blocks_of(OWN_LOOP) if block.language == "python")
    exec(compile(block.code, block.place, "exec"), names)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in names["policy"].parameters())
    with torch.no_grad():
        for parameter in names["policy"].parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return names


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [6, 11] of three pairs with prompts of four tokens, right-padded with 0."""
    ids = torch.randint(1, 64, (6, 11))
    ids[3:, :4] = ids[:3, :4]
    ids[1, 7:], ids[3, 9:] = 0, 0
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, :4] = -100
    return ids, labels


@torch.no_grad()
def test_scores_of_the_custom_loop_equal_those_of_a_padded_batch(loop):
    stock = fastdpo.restore(copy.deepcopy(loop["policy"]))
    before = fastdpo.calls.copy()
    for ids, labels in ((loop["input_ids"], loop["labels"]), ragged_batch()):
        batch = dict(input_ids=ids, labels=labels, attention_mask=(ids != 0).long())
        loop |= batch
        scored = torch.cat(loop["score"](loop["policy"]))
        torch.testing.assert_close(scored, own_logps(stock, **batch).sum(1), rtol=1e-5, atol=1e-5)
    assert {path for _, _, path in fastdpo.calls - before} == {"fused"}


def test_it_is_read_in_two_minutes():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    by_hand = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->|<!--.*?-->", "", text, flags=re.S)
    assert len(by_hand.split()) <= 750
    assert len(re.findall(r"\]\([^)]*\)|<a ", by_hand)) <= 12


def test_the_table_of_speedups_is_that_of_the_committed_results():
    """Its rows are recomputed here in one cell of each machine."""
    text = README.read_text()
    for page, written in speedups.pages().items():
        assert page.read_text() == written, "run `python -m tests.support.documents.speedups`"
    for path, group, machine, of_trl in (
        (speedups.CPU, "full", "2 CPU cores, AMD EPYC, float32", "TRL, labelled positions only"),
        (speedups.GPU, "0.5B, full", "NVIDIA H200, bfloat16", "TRL as shipped"),
    ):
        case = next(x for x in json.loads(path.read_text())["cases"] if x["name"] == f"{group}/HH")
        trl, ours = ([x["seconds"] for x in case["sides"][side]["samples"]] for side in (of_trl, "fastdpo"))
        row = next(line for line in text.splitlines() if line.startswith(f"| {machine} | "))
        assert row.split("|")[3].strip().startswith(f"{median(trl) / median(ours):.1f}x, ")
    assert "0.9x" in text  # the shortest rows are not left out


def test_its_other_numbers_are_measured():
    text = " ".join(README.read_text().split())
    sides = json.loads((speedups.GPU_RESULTS / "trainings.json").read_text())["sides"]
    first, of_trl = (sides[side]["step_seconds"][0] for side in ("fastdpo", "TRL as shipped"))
    assert f"{first:.0f} s instead of {of_trl:.0f} s on the H200" in text
    machine = json.loads(speedups.CPU.read_text())["machine"]
    assert f"on {machine['threads']} CPU cores ({machine['cpu']})" in text
    assert f"AMD EPYC, {machine['threads']} threads" in (report.PICTURES / "first-light.svg").read_text()


def test_the_button_waits_for_an_address():
    """`[project.urls]` and the notebook have it, too."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls")
    shown = re.sub(r"<!--.*?-->", "", README.read_text(), flags=re.S)
    (repository,) = re.findall(r'^REPOSITORY = "(.*)"', notebook_source(), re.M)
    assert ("colab.research.google.com" in shown) == (urls is not None) == (repository != "")
    assert "OWNER" not in shown


def notebook_source() -> str:
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
