"""Metrics are those of all ranks together: two ranks log what one process logs that has their pairs in one batch."""

from comparison import approximately


def test_two_ranks_log_what_one_process_logs(line, tmp_path):
    two, one = line.two_ranks_and_one(tmp_path)
    assert len(two) == len(one) > 2
    compared = set()
    for step, (a, b) in enumerate(zip(two, one, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            if name not in line.RANKS_APART:
                compared.add(name)
                assert a[name] == approximately(b[name]), (step, name)
    assert len(compared) >= 5
