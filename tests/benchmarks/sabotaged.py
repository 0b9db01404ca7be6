"""Sides that a benchmark must not report a speed for. Built in workers, by the tests."""

import os

import torch

from benchmarks.cases import Arrays
from benchmarks.sides.heads import HeadStep, HeadWorkload


class Wrong(HeadStep):
    """A gradient that is off by one part in a thousand."""

    def __init__(self, workload: HeadWorkload) -> None:
        super().__init__(workload, "plain PyTorch")

    def check(self) -> Arrays:
        found = super().check()
        return found | {"gradient of hidden": found["gradient of hidden"] * 1.001}


class Silent(HeadStep):
    """Keeps a gradient to itself."""

    def __init__(self, workload: HeadWorkload) -> None:
        super().__init__(workload, "plain PyTorch")

    def check(self) -> Arrays:
        return {name: x for name, x in super().check().items() if name != "gradient of hidden"}


class NaN(HeadStep):
    def __init__(self, workload: HeadWorkload) -> None:
        super().__init__(workload, "plain PyTorch")

    def check(self) -> Arrays:
        return {name: x * float("nan") for name, x in super().check().items()}


class Dies(HeadStep):
    """Ends its process in the middle of a measurement."""

    def __init__(self, workload: HeadWorkload) -> None:
        super().__init__(workload, "plain PyTorch")

    def step(self, batch: int) -> None:
        print("no more memory", flush=True)
        os._exit(9)


class Raises(HeadStep):
    def __init__(self, workload: HeadWorkload) -> None:
        raise torch.OutOfMemoryError("too large")
