"""Every real token of chosen and rejected answers is scored, and no prompt token is."""

import pytest

from fastdpo import packing


def test_all_answer_tokens_and_no_prompt_tokens_are_scored(line, tmp_path, monkeypatch):
    batches, stock = [], packing.pack

    def pack(ids, mask, labels, **options):
        batches.append((ids, mask, labels))
        return stock(ids, mask, labels, **options)

    monkeypatch.setattr(packing, "pack", pack)  # every trainer line packs its batches here
    line.train(tmp_path)
    expected, seen = line.rows(), set()
    for ids, mask, labels in batches:
        if len(ids) % 2:
            continue  # a batch of the probe
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


def test_an_unexpected_row_raises(line):
    with pytest.raises(KeyError):
        line.rows()[(1, 2, 3)]
