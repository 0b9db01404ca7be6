"""Two ranks log the same metrics as one process with the pairs of both ranks in one batch."""

from tests.support.comparison import approximately


def test_two_ranks_log_the_same_as_one_process(line, tmp_path):
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
