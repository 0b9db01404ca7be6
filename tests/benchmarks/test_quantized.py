"""Steps of a model with 4-bit weights, as in QLoRA."""

import json

from benchmarks import run
from benchmarks.cases import SUBJECT
from benchmarks.suites.step import STOCK
from tests.support.workers.packages import run_with


def test_without_bitsandbytes_each_side_is_unavailable(tmp_path, monkeypatch):
    """The ground truth needs it as well."""
    monkeypatch.setenv("GPU_CASES", "1")
    out = tmp_path / "step.json"
    assert run.main(["--suite", "step", "--quick", "--cases", "8B, QLoRA", "--json", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    reasons = {(side["status"], side["reason"]) for side in case["sides"].values()}
    assert reasons == {("unavailable", "bitsandbytes is not installed")}


def test_steps_of_qlora(tmp_path, monkeypatch):
    """The case of a GPU on tiny sizes. Each side has proved that its weights are quantized."""
    monkeypatch.setenv("GPU_CASES", "1")
    out = tmp_path / "step.json"
    options = [
        *["--suite", "step", "--quick", "--rounds", "1", "--sides"],
        f"^({STOCK}|{SUBJECT})$",
        "--cases",
        "8B, QLoRA",
    ]
    run_with("QUANTIZERS", "benchmarks.run", *options, "--json", out)
    result = json.loads(out.read_text())
    (case,) = result["cases"]
    assert case["facts"]["dtype"] == "nf4 of bfloat16 weights, bfloat16 autocast"
    assert result["versions"]["bitsandbytes"] == "0.50.2"
    stock, subject = case["sides"][STOCK], case["sides"][SUBJECT]
    for side in (stock, subject):
        assert side["status"] == "measured"
        assert all(check["equal"] for check in side["checks"])
    assert subject["facts"]["tokens"] < stock["facts"]["tokens"]
