"""What is free on a device, and what those that spend it are said to hold."""

import re
from pathlib import Path

import pytest
import torch

from fastdpo.commands import doctor
from fastdpo.ops import memory

CPU = torch.device("cpu")
MIB = 1 << 20
VERSIONS = {"first": ("4:cpu,memory:/jobs/one\n1:cpuset:/", "memory", 0), "second": ("0::/jobs/one", "", 1)}
"""By version of control groups: the groups of the process, the folder of its kind, and the files of `memory.LIMITS`."""


@pytest.fixture
def group(monkeypatch, tmp_path):
    """Puts the process into a control group, whose folders have the given texts of limit and use."""

    def put(version: str, **limits: tuple[str, int]) -> None:
        text, kind, files = VERSIONS[version]
        (tmp_path / "cgroup").write_text(text)
        monkeypatch.setattr(memory, "GROUPS", (tmp_path / "cgroup", tmp_path / "groups"))
        names = memory.LIMITS[1 - files]
        for folder, texts in limits.items():
            path = tmp_path / "groups" / ("cpu,memory" if kind else "") / folder.replace("_", "/")
            path.mkdir(parents=True, exist_ok=True)
            for name, value in zip(names, texts, strict=True):
                (path / name).write_text(f"{value}\n")

    return put


def allowed() -> int:
    now = memory.report(CPU)
    return round((now.most - now.used) / MIB)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_limit_of_a_control_group_counts(monkeypatch, group, version):
    """Of the group itself and of those around it, half of what the tightest one has left."""
    monkeypatch.setenv(memory.VARIABLE, "1")
    group(version, jobs_one=(900 * MIB, 100 * MIB))
    assert allowed() == 400
    group(version, jobs=(500 * MIB, 300 * MIB))
    assert allowed() == 100
    group(version, jobs=(500 * MIB, 600 * MIB))
    assert allowed() == 0


def test_without_a_limit_half_of_what_is_available_counts(monkeypatch, group):
    monkeypatch.setenv(memory.VARIABLE, "1")
    group("second", jobs_one=("max", 100 * MIB))
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    assert allowed() == pytest.approx(int(sizes["MemAvailable"]) / 2048, rel=0.2)
    monkeypatch.setattr(memory, "GROUPS", (Path("/no/file"), Path("/no/folder")))
    assert allowed() == pytest.approx(int(sizes["MemAvailable"]) / 2048, rel=0.2)
    monkeypatch.setenv(memory.VARIABLE, "0")
    assert memory.report(CPU).most == torch.inf


def test_doctor_says_who_spends_the_memory(monkeypatch):
    monkeypatch.setenv(memory.VARIABLE, "1")
    (section,) = (x for name, x in doctor.examine().items() if name.startswith("memory"))
    assert [x.name for x in section][-len(memory.SPENDERS) :] == [*memory.SPENDERS]
    assert {x.status for x in section} == {doctor.OK}


def test_a_line_a_spender_in_the_order_of_precedence(monkeypatch):
    monkeypatch.setattr(memory, "held", {})
    monkeypatch.setenv(memory.VARIABLE, "1")
    for spender, size in (("activations", 3), ("micro-batches", 5), ("activations", 7), ("activations", 6)):
        memory.hold(CPU, spender, size * MIB, f"text {size}")
    assert memory.lines() == [
        "fastdpo: cpu, micro-batches: 5 MiB, text 5",
        "fastdpo: cpu, activations: 7 MiB, text 7",
    ]
    monkeypatch.setenv(memory.VARIABLE, "0")
    memory.hold(CPU, "recordings", MIB, "not spent")
    assert len(memory.lines()) == 2
