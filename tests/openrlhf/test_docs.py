"""The launcher in "docs/openrlhf.md" runs as printed."""

import sys

import pytest

from tests.support.documents.markdown_blocks import ROOT, blocks_of


def test_the_launcher_reaches_the_arguments_of_openrlhf(tmp_path, monkeypatch, capsys):
    (block,) = [block for block in blocks_of(ROOT / "docs" / "openrlhf.md") if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_dpo.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        exec(compile(block.code, block.place, "exec"), {"__name__": "__main__"})
    assert ended.value.code == 0
    assert "--ds.packing_samples" in capsys.readouterr().out
