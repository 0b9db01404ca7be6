"""`fastdpo check` agrees with TRL where fastdpo is right, and names the row where it is wrong."""

import functools
import json
import re
import sys

import pytest
import torch

import fastdpo.__main__
from fastdpo.commands.check import command, side
from fastdpo.commands.check.command import as_json, as_text, check
from fastdpo.data.files import load_preferences
from tests.support.documents.markdown_blocks import blocks
from tests.support.faults import SOFTCAPPED, no_softcap, scaled_gradients, targets_off_by_one, unnoticed_by_probes
from tests.support.programs.warm import run_program
from tests.support.trl.dpo import pairs as rows
from tests.support.trl.dpo import tiny_model, tokenizer
from tests.support.trl.reward import reward_model

in_this_process = functools.partial(check, run=side.measure)


def write_model(directory, dtype=torch.float32, build=tiny_model, **tiny):
    build(**tiny).to(dtype).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def write_pairs(path, n=6):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(n)))
    return str(path)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.fixture
def dataset(tmp_path):
    return write_pairs(tmp_path / "pairs.jsonl")


def failed(report) -> set[str]:
    assert report.ok == all(x.is_explained for x in report.verdicts)
    return {x.name for x in report.verdicts if not x.is_explained}


def run_in_a_fork(program, stdout, stderr):
    """Stands in for `subprocess.run`."""
    done = run_program(*program[1:])
    stdout.write(done.stdout)
    stderr.write(done.stderr.encode())
    return done


@pytest.fixture
def command_line(monkeypatch, capsys):
    """What the command prints, which ends without an error. Its runs have processes of their own."""
    monkeypatch.setattr(command.subprocess, "run", run_in_a_fork)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            fastdpo.__main__.main(["check", *arguments])
        printed = capsys.readouterr()
        assert ended.value.code == 0, printed.out + printed.err
        return printed

    return run


def test_the_report_in_the_documentation(command_line):
    """Its rows are among those of the command, in their order, and the command agrees."""
    printed = command_line("--tiny")
    assert "TRL, rounded otherwise: 100%" in printed.err
    (documented, _) = [block.code for block in blocks("text") if block.page == "docs/check.md"]

    def words(report):
        numbers = r"(?<= )[\d.,]+(e[-+]\d+)?( s| MiB|x)?(?= |$)|TRL [\d.]+, torch \S+"
        return [re.sub(numbers, "N", line).split() for line in report.splitlines()]

    rows = iter(words(printed.out))
    assert all(row in rows for row in words(documented))
    tokens = [re.search("tokens a batch.*", report)[0] for report in (documented, printed.out)]
    assert tokens[0] == tokens[1]


def test_a_saved_model_and_a_dataset(model, dataset):
    report = in_this_process(model, dataset, batches=3, fields=["--beta", "0.05", "--loss-type", "ipo"])
    assert not failed(report)
    assert "2 batches of 4 pairs" in report.title  # there are no more
    names = [x.name for x in report.verdicts]
    assert {"loss", "log-probabilities of the reference", "metric rewards/margins", "gradients: MLP"} <= set(names)
    saved = json.loads(as_json(report))
    assert saved["ok"]
    assert saved["costs"][0]["ratio"] > 1.3
    assert [cost["name"] for cost in saved["costs"]] == ["tokens a batch", "peak memory above the models"]


def real_rows(dataset) -> list[list[tuple[int, ...]]]:
    """The token ids of both rows of each pair, as TRL makes them."""
    encode, end = tokenizer().encode, [tokenizer().eos_token_id]
    return [
        [tuple(encode(row["prompt"]) + encode(row[name]) + end) for name in ("chosen", "rejected")]
        for row in load_preferences(dataset)
    ]


@pytest.mark.parametrize("sample", [1024, 4], ids=["all", "a sample"])
def test_the_tokens_of_an_epoch(sample, model, tmp_path, monkeypatch):
    """Of batches of one pair. The last token of a row is never computed."""
    monkeypatch.setattr(side, "EPOCH_SAMPLE", sample)
    path = tmp_path / "pairs.jsonl"
    report = in_this_process(model, write_pairs(path, 6), batches=1, batch_size=1)
    epoch = json.loads(as_json(report))["epoch"]
    assert (epoch["pairs"], epoch["counted"]) == (6, min(sample, 6))
    assert f"tokens of an epoch of 6 pairs, in each model{'' if sample > 6 else ' (estimated from 4 pairs)'}:" in (
        as_text(report)
    )
    if sample > 6:
        pairs = real_rows(path)
        assert epoch["padded"] == sum(2 * max(map(len, rows)) for rows in pairs)
        assert epoch["packed"] == sum(len(row) - 1 for rows in pairs for row in rows)
        distinct = [{row[:end] for row in rows for end in range(1, len(row))} for rows in pairs]
        assert epoch["shared"] == sum(map(len, distinct)) < epoch["packed"]
    else:
        assert epoch["shared"] < epoch["packed"] < epoch["padded"]


OPTIONS = {
    "adapters": dict(lora=True),
    "autocast": dict(fields=["--bf16=true"]),
    "bfloat16": dict(fields=["--model_init_kwargs", '{"dtype": "bfloat16"}']),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_adapters_and_low_precision(name, model, dataset):
    report = in_this_process(model, dataset, **OPTIONS[name])
    assert not failed(report)
    groups = {x.name for x in report.verdicts if x.name.startswith("gradients")}
    assert ("gradients: adapters" in groups) == (name == "adapters")


def test_a_model_runs_in_its_own_dtype_and_three_batches_are_timed(tmp_path):
    model = write_model(tmp_path / "model", torch.bfloat16)
    report = in_this_process(model, write_pairs(tmp_path / "pairs.jsonl"), batches=3, batch_size=2)
    assert not failed(report)
    assert "LlamaForCausalLM in bfloat16, 3 batches of 2 pairs" in report.title
    (seconds,) = (cost for cost in report.costs if cost.name == "time a batch")
    assert min(seconds.stock, seconds.fastdpo) > 0


REWARDS = {"rewards", "loss", "metric margin", "metric accuracy", "metric min_reward", "gradients: attention"}


@pytest.mark.parametrize("is_tiny", [False, True], ids=["saved", "tiny"])
def test_a_reward_model(is_tiny, command_line, dataset, tmp_path):
    """By the command, which trains it with RewardTrainer."""
    saved = "--model", write_model(tmp_path / "model", build=reward_model), "--dataset", dataset
    chosen = ("--tiny", "reward", "--center_rewards_coefficient=0.1") if is_tiny else saved
    report = json.loads(command_line(*chosen, "--json").out)
    assert report["title"].startswith("LlamaForSequenceClassification in float32, 2 batches of 4 pairs")
    assert {x["name"] for x in report["verdicts"]} >= REWARDS | {"every call is fused", "gradients: head"}
    assert not any("log-probabilities" in x["name"] for x in report["verdicts"])
    assert report["costs"][0]["ratio"] > 1.3


@pytest.mark.parametrize(
    "options", [dict(lora=True, fields=["--center_rewards_coefficient=0.1"]), dict(fields=["--bf16=true"])]
)
def test_options_of_reward_models(options, dataset, tmp_path):
    report = in_this_process(write_model(tmp_path / "model", build=reward_model), dataset, **options)
    assert not failed(report)
    assert {x.name for x in report.verdicts} >= REWARDS - ({"gradients: attention"} if "lora" in options else set())


def test_a_wrong_reward_is_named(dataset, tmp_path, monkeypatch):
    unnoticed_by_probes(monkeypatch)
    targets_off_by_one(monkeypatch)
    report = in_this_process(write_model(tmp_path / "model", build=reward_model), dataset)
    assert failed(report) >= {"rewards", "loss", "metric min_reward", "gradients: attention"}


def test_reward_models_without_an_exact_comparison(dataset, tmp_path):
    several = write_model(tmp_path / "several", build=reward_model, num_labels=3)
    message = r"model must be a causal LM, or a sequence classifier with one label; got .*, a \w+ with 3 labels"
    with pytest.raises(ValueError, match=message):
        check(several, dataset)
    with pytest.raises(ValueError, match="or fields of RewardConfig; got --beta"):
        check(write_model(tmp_path / "model", build=reward_model), dataset, fields=["--beta", "0.1"])


LOGPS = {"log-probabilities of the policy", "log-probabilities of the reference", "metric logps/chosen"}
WRONG = {
    targets_off_by_one: ({}, LOGPS | {"gradients: attention", "gradients: head"}),
    no_softcap: (SOFTCAPPED, LOGPS | {"gradients: attention", "gradients: head"}),
    scaled_gradients: ({}, {f"gradients: {x}" for x in ("embeddings", "attention", "MLP", "norms")}),
}


@pytest.mark.parametrize("plant", WRONG)
def test_a_wrong_op_is_named(plant, dataset, tmp_path, monkeypatch):
    tiny, expected = WRONG[plant]
    plant(monkeypatch)
    report = in_this_process(write_model(tmp_path / "model", **tiny), dataset, fields=["--bf16=false"])
    found = failed(report)
    assert expected <= found
    if plant is scaled_gradients:
        assert found <= expected | {"metric grad_norm"}


def test_a_model_that_falls_back_is_no_agreement(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(command.subprocess, "run", run_in_a_fork)
    path = write_model(tmp_path / "model", attention_dropout=0.1)
    report = check(path, dataset, batches=1, fields=["--bf16=false", "--disable_dropout=false"])
    (fused, *_) = report.verdicts
    assert (fused.name, fused.is_explained) == ("every call is fused", False)
    assert "policy stock 1" in fused.detail
    assert "attention dropout is active" in fused.detail


ROW = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
MALFORMED = {
    "CUT": (ROW + "\n" + ROW[:28], "Missing a closing quotation mark in string. in row 1"),
    "NULL": (ROW + "\n" + ROW.replace('"a"', "null"), "with none in row 1"),
    "MISSING": (ROW + '{"prompt": "a", "chosen": "b"}', "with none in row 1"),
    "ARRAY": ("[\n" + ROW + ",\n" + ROW[:28], "be a well-formed .json file"),
    "NUMBER": (ROW + "3\n", "Column() changed from object to string in row 0"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_datasets_name_the_row(name, tmp_path):
    text, reason = MALFORMED[name]
    path = tmp_path / ("pairs.json" if name == "ARRAY" else "pairs.jsonl")
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_preferences(path)
    assert f"got {path}" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass --model and --dataset, or --tiny"),
        (("--tiny", "--model", "MODEL"), "pass --model and --dataset, or --tiny"),
        (("--model", "MODEL"), "pass --model and --dataset, or --tiny"),
        (("--model", "MODEL", "--dataset", "no.jsonl"), "the dataset must exist; got no.jsonl"),
        (("--model", "MODEL", "--dataset", "EMPTY"), "the dataset must not be empty; got"),
        (("--model", "MODEL", "--dataset", "OTHER"), "the dataset must have the columns ['chosen', 'rejected']; got"),
        (("--model", "MODEL", "--dataset", "MODEL"), "the dataset must be a file or a save_to_disk directory; got"),
        (("--model", "MODEL", "--dataset", "CSV"), "the dataset must be a .jsonl, .json or .parquet file or"),
        (("--tiny", "--batches", "0"), "--batches must be 1 or more; got 0"),
        (
            ("--tiny", "--betta", "1"),
            "options must be those of `fastdpo check --help` or fields of DPOConfig; got --betta; did you mean --beta?",
        ),
        (("--model", "MODEL", "--dataset", "CUT"), "the dataset must be a well-formed .jsonl file; got"),
        (("--model", "MODEL", "--dataset", "NULL"), "the dataset must have a prompt in every row; got"),
        (("--tiny", "--beta", "much"), "argument --beta: invalid float value: 'much'"),
        (("--tiny", "--learning_rate=1e-6"), "--learning_rate is set by the check itself"),
    ],
)
def test_misuse_is_an_error_of_one_line(arguments, message, model, tmp_path, monkeypatch):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "pairs.csv").write_text("chosen,rejected\na,b\n")
    (tmp_path / "other.json").write_text('[{"text": "a"}]')
    files = {"MODEL": model, "EMPTY": tmp_path / "empty.jsonl", "CSV": tmp_path / "pairs.csv"}
    files["OTHER"] = tmp_path / "other.json"
    for name, (text, _) in MALFORMED.items():
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text(text)
    monkeypatch.setattr(sys, "argv", ["fastdpo", "check", *(str(files.get(x, x)) for x in arguments)])
    with pytest.raises(SystemExit) as raised:
        fastdpo.__main__.main()
    assert str(raised.value.code).startswith(f"fastdpo check: {message}")
    assert "\n" not in raised.value.code


def test_a_run_that_fails_names_its_error(model, dataset, tmp_path, monkeypatch):
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="the run of TRL as shipped failed: OSError: "):
        check(model, dataset)


def test_other_versions_of_trl(monkeypatch):
    seam = fastdpo.Seam("trl.DPOTrainer", "0.29.1", None)
    monkeypatch.setattr(command.patching, "examine", lambda *names: fastdpo.PatchReport((seam,)))
    with pytest.raises(ValueError, match=r"TRL >=1\.15,<1\.17 is required; got 0\.29\.1"):
        check(None, None)


def test_one_run_at_a_time(model, dataset):
    """A run has ended, and nothing but its result is left, before the next one starts."""
    running = []

    def run(settings, name):
        assert not running
        running.append(name)
        result = side.measure(settings, name)
        weights = sum(x.numel() for x in tiny_model().parameters())
        assert 0 < sum(x.numel() for x in result["gradients"].values()) < weights / 10
        running.remove(name)
        return result

    assert check(model, dataset, batches=1, fields=["--bf16=false"], run=run).ok


def test_datasets_of_other_formats(dataset, tmp_path):
    expected = load_preferences(tmp_path / "pairs.jsonl")
    expected.to_parquet(tmp_path / "pairs.parquet")
    expected.save_to_disk(tmp_path / "disk")
    for name in ("pairs.parquet", "disk"):
        assert load_preferences(tmp_path / name).to_list() == expected.to_list()
