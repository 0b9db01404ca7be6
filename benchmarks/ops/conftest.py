"""What the saved results say of where they were measured."""

from benchmarks.machine import machine, versions


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.clear()
    machine_info.update(machine() | {"versions": versions("torch", "transformers", "trl", "fastdpo")})


def pytest_benchmark_update_commit_info(config, commit_info):
    commit_info.clear()
