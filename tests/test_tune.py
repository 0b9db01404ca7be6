"""Entries that `fastdpo tune` writes to the head table, and the kernels that they select."""

import json
import os
import sys

import pytest
import torch

from fastdpo import tune
from fastdpo.__main__ import main
from fastdpo.logs import strict
from fastdpo.ops import head_table
from fastdpo.ops.head_table import Entry, fused_config

CPU = torch.device("cpu")
ENTRY = Entry("cpu", "bfloat16", 896, tune.CANDIDATES[0])


def timer(times):
    """A timer that looks up milliseconds by block sizes. An unknown size raises an error."""

    def time(run):
        entries = head_table.from_file(os.environ[head_table.VARIABLE])
        assert strict()  # a kernel that does not work raises, and PyTorch is not timed in its place
        return times[entries[0].blocks if entries else None]

    return time


@pytest.mark.parametrize(
    ("times", "blocks"),
    [
        ({None: 10.0, tune.CANDIDATES[0]: 9.0, tune.CANDIDATES[2]: 8.0}, tune.CANDIDATES[2]),
        ({None: 10.0, tune.CANDIDATES[0]: 9.9}, None),  # less than the minimum speedup
        ({None: 10.0}, None),  # no candidate fits the device
    ],
)
def test_the_fastest_candidate_is_chosen_if_it_is_faster_than_rows(times, blocks):
    entry = tune.tune(lambda: None, timer(times), ENTRY)
    assert entry == (None if blocks is None else ENTRY._replace(blocks=blocks))
    assert head_table.VARIABLE not in os.environ


def test_a_table_file_selects_the_fused_kernel(tmp_path, monkeypatch):
    path = tmp_path / "head.json"
    path.write_text(json.dumps([ENTRY._asdict()]))
    assert fused_config(896, torch.bfloat16, CPU) is None
    monkeypatch.setenv(head_table.VARIABLE, str(path))
    assert fused_config(896, torch.bfloat16, CPU) == tune.CANDIDATES[0]
    assert fused_config(64, torch.bfloat16, CPU) == tune.CANDIDATES[0]
    assert fused_config(897, torch.bfloat16, CPU) is None
    assert fused_config(896, torch.float16, CPU) is None
    assert fused_config(896, torch.bfloat16, torch.device("meta")) is None


@pytest.mark.parametrize("content", ["[", "[{}]", '[{"architecture": "sm90"}]', '{"architecture": "sm90"}'])
def test_an_invalid_table_file_raises(content, tmp_path, monkeypatch):
    path = tmp_path / "head.json"
    path.write_text(content)
    monkeypatch.setenv(head_table.VARIABLE, str(path))
    with pytest.raises(
        ValueError, match=r"^linear_logps: FASTDPO_HEAD_TABLE must name a JSON list of objects of .*head"
    ):
        fused_config(896, torch.bfloat16, CPU)


HEAD = ["tune", "--hidden", "896", "--vocabulary", "1000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (HEAD, "fastdpo tune: no GPU found (torch.cuda.is_available() is False)"),
        (["tune", "--hidden", "0", "--vocabulary", "9"], "fastdpo tune: hidden must be positive; got 0"),
    ],
)
def test_the_command_ends_with_one_line(monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["fastdpo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == message


def test_the_command_writes_the_table_and_prints_json(monkeypatch, tmp_path, capsys):
    table = tmp_path / "head.json"
    table.write_text(json.dumps([ENTRY._asdict()]))
    for name, stand_in in {
        "is_available": lambda: True,
        "get_device_capability": lambda device: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(tune, "step", lambda *head: lambda: None)
    monkeypatch.setattr(tune, "milliseconds", timer({None: 10.0, tune.CANDIDATES[1]: 8.0}))
    monkeypatch.setattr(sys, "argv", ["fastdpo", *HEAD, "--table", str(table), "--json"])
    main()
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(table.read_text())
    assert printed == {"table": str(table), "entry": written[0]}
    assert written[0]["blocks"] == list(tune.CANDIDATES[1])
    assert written[1:] == [json.loads(json.dumps(ENTRY._asdict()))]
