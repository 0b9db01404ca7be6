"""The benchmark of LLaMA-Factory runs on tiny sizes, and finds both of its sides correct."""

import json

from benchmarks import run


def test_the_suite(tmp_path):
    out = tmp_path / "result.json"
    options = ("--quick", "--threads", "1", "--rounds", "1", "--json", str(out))
    assert run.main(["--suite", "llamafactory", *options]) == 0
    cases = json.loads(out.read_text())["cases"]
    sides = [side for case in cases for side in case["sides"].values()]
    assert len(sides) == 4
    assert all(side["status"] == "measured" and side["checks"] for side in sides)
