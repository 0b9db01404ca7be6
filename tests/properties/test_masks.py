"""Chosen and rejected answers are masked alike: every real token of either is scored, and no token of a prompt."""

import pytest

from fastdpo import packing


def test_every_answer_is_scored_whole_and_no_prompt_is(line, tmp_path, monkeypatch):
    batches, stock = [], packing.pack

    def pack(ids, mask, labels, **options):
        batches.append((ids, mask, labels))
        return stock(ids, mask, labels, **options)

    monkeypatch.setattr(packing, "pack", pack)  # the one place that batches of every trainer line pass
    line.train(tmp_path)
    expected, seen = line.rows(), set()
    for ids, mask, labels in batches:
        if len(ids) % 2:
            continue  # a probe's
        for row in range(len(ids)):
            real = tuple(ids[row][mask[row] != 0].tolist())
            start = expected[real]
            scored = labels[row][mask[row] != 0]
            for token, label in enumerate(scored.tolist()):
                assert label == (real[token] if token >= start else -100), (real, token)
            assert (labels[row][mask[row] == 0] == -100).all()
            seen.add((real, row < len(ids) // 2))
    assert len({real for real, _ in seen}) >= 20
    assert {chosen for _, chosen in seen} == {True, False}


def test_a_row_that_is_not_expected_is_noticed(line):
    with pytest.raises(KeyError):
        line.rows()[(1, 2, 3)]
