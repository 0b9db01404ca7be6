"""The table of heads that is measured: what is written, and what is done with it."""

import json
import os

import pytest
import torch

from fastdpo import tune
from fastdpo.ops import head_table
from fastdpo.ops.head_table import Entry, fused_blocks

CPU = torch.device("cpu")
ENTRY = Entry("cpu", "bfloat16", 896, tune.BLOCKS[0])


def timer(times):
    """Milliseconds by the blocks that the table names while something is timed; others don't fit the device."""

    def time(run):
        entries = head_table._from_file(os.environ[head_table.VARIABLE])
        return times[entries[0].blocks if entries else None]

    return time


@pytest.mark.parametrize(
    ("times", "blocks"),
    [
        ({None: 10.0, tune.BLOCKS[0]: 9.0, tune.BLOCKS[2]: 8.0}, tune.BLOCKS[2]),
        ({None: 10.0, tune.BLOCKS[0]: 9.9}, None),  # not worth it
        ({None: 10.0}, None),  # nothing fits
    ],
)
def test_the_fastest_blocks_are_taken_if_they_are_worth_it(times, blocks):
    found = tune.tune(lambda: None, timer(times), ENTRY)
    assert found == (None if blocks is None else ENTRY._replace(blocks=blocks))
    assert head_table.VARIABLE not in os.environ


def test_a_table_of_ones_own(tmp_path, monkeypatch):
    path = tmp_path / "head.json"
    path.write_text(json.dumps([ENTRY._asdict()]))
    assert fused_blocks(896, torch.bfloat16, CPU) is None
    monkeypatch.setenv(head_table.VARIABLE, str(path))
    assert fused_blocks(896, torch.bfloat16, CPU) == tune.BLOCKS[0]
    assert fused_blocks(64, torch.bfloat16, CPU) == tune.BLOCKS[0]
    assert fused_blocks(897, torch.bfloat16, CPU) is None
    assert fused_blocks(896, torch.float16, CPU) is None
    assert fused_blocks(896, torch.bfloat16, torch.device("meta")) is None


@pytest.mark.parametrize("content", ["[", "[{}]", '[{"architecture": "sm90"}]', '{"architecture": "sm90"}'])
def test_a_table_that_is_none_is_named(content, tmp_path, monkeypatch):
    path = tmp_path / "head.json"
    path.write_text(content)
    monkeypatch.setenv(head_table.VARIABLE, str(path))
    with pytest.raises(
        ValueError, match=r"^linear_logps: FASTDPO_HEAD_TABLE must name a JSON list of objects of .*head"
    ):
        fused_blocks(896, torch.bfloat16, CPU)


def test_without_a_gpu_there_is_nothing_to_measure(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert tune.main(["--hidden", "896", "--vocabulary", "1000"]) == 2
    assert "a GPU is needed" in capsys.readouterr().err
