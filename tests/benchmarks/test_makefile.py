"""What `make bench-gpu` runs, also after a step fails, and what `make gpu-flash-attn` compiles."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.suites import SUITES
from tools import restrict_flash_attn

ROOT = Path(__file__).parents[2]


STEPS = ["device_tests --device cuda", "--suite head", "--suite step", "trainings", "accuracy"]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.mark.parametrize(
    ("failing", "steps"),
    [
        ("nothing", STEPS),
        ("device_tests", ["device_tests --device cuda", "accuracy"]),
        ("--suite head", STEPS),
        ("trainings", STEPS),
        ("accuracy", STEPS),
    ],
)
def test_bench_gpu(failing, steps, tmp_path):
    log, python = tmp_path / "log", tmp_path / "python"
    log.touch()
    python.write_text(f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in *"{failing}"*) exit 3;; esac\n')
    python.chmod(0o755)
    command = ["make", "bench-gpu", f"GPU_PYTHON={python}", "GPU_SUITES=head step"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == (failing == "nothing"), done.stderr
    calls = log.read_text().splitlines()
    assert len(calls) == len(steps)
    assert all(step in call for step, call in zip(steps, calls, strict=True))


def test_each_run_of_a_day_on_a_gpu_has_its_seconds_and_its_cases(tmp_path, monkeypatch):
    """A quarter of an hour in two commands. The suites have the cases and the sides that are asked for. Here each line
    fails, which the next one does not mind, and which is printed last.
    """
    monkeypatch.setenv("GPU_CASES", "1")
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport sys\nprint(sys.argv[1:], file=open({str(log)!r}, 'a'))\nsys.exit(3)\n"
    )
    python.chmod(0o755)
    seconds = []
    for part in ("gpu-day-1", "gpu-day-2"):
        command = ["make", "--no-print-directory", part, f"GPU_PYTHON={python}", f"GPU_OUT={tmp_path / 'out'}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append([int(x) for x in re.findall(r"^timeout --kill-after 5 (\d+) ", done.stdout, re.MULTILINE)])
        last = done.stdout.splitlines()[-len(seconds[-1]) :]
        assert all(line.startswith("exit status 3: ") for line in last), last
    calls = [ast.literal_eval(line) for line in log.read_text().splitlines()]
    assert len(calls) == sum(map(len, seconds))
    assert all(sum(of_part) < 600 for of_part in seconds)
    of_suites = [run.parse(arguments) for _, module, *arguments in calls if module == "benchmarks.run"]
    assert len(of_suites) == len(calls) - 2
    for args in of_suites:
        cases = [x for x in SUITES[args.suite].cases(False) if any(re.search(args.cases, name) for name in x.names)]
        assert len(cases) == {"attention": 3}.get(args.suite, 1), args
        assert all(sum(bool(re.search(args.sides, side.name)) for side in x.sides) >= 3 for x in cases), args
        assert str(args.json).startswith(str(tmp_path / "out"))


@pytest.mark.skipif("FLASH_SOURCES" not in os.environ, reason="FLASH_SOURCES is not set")
def test_restricted_flash_attn_defines_what_is_dispatched(tmp_path):
    """Each instantiation is defined once: by a file that is compiled, or by a stub that raises."""
    (archive,) = Path(os.environ["FLASH_SOURCES"]).glob("flash_attn-2.8.3*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, [x for x in packed if "/cutlass/" not in x.name], filter="data")
    (sources,) = tmp_path.iterdir()
    dispatched = restrict_flash_attn.dispatched(sources)
    assert len(dispatched) == 3 * 2 * 6 * 2  # functions, dtypes, head sizes, causal or not
    restrict_flash_attn.restrict(sources)
    setup = (sources / "setup.py").read_text()
    compiled = re.findall(r'"(csrc/flash_attn/\w+/?\w+\.(?:cu|cpp))"', setup)
    defined = [x for file in compiled for x in restrict_flash_attn.instantiated((sources / file).read_text())]
    assert sorted(defined) == sorted(dispatched)
    kept = [x for x in defined if x.is_kept]
    assert len(kept) == 2 * 2 * 2
    assert {x.d for x in kept} == {64, 128}
    stubs = (sources / restrict_flash_attn.STUBS).read_text()
    assert stubs.count("TORCH_CHECK(false") == len(defined) - len(kept)
    assert restrict_flash_attn.instantiated(stubs).isdisjoint(kept)
    api = (sources / "csrc/flash_attn/flash_api.cpp").read_text()
    for flag in ("DROPOUT", "ALIBI"):  # in C++, calls with them raise; in CUDA, kernels leave them out
        assert f"#ifdef FLASHATTENTION_DISABLE_{flag}" in api
        assert setup.count(f'"-DFLASHATTENTION_DISABLE_{flag}"') == 2 + 1  # the last one is a comment
