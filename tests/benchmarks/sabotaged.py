"""Faulty sides, for which a benchmark must not report a time. The tests create them in workers."""

import os
import time

import torch

from benchmarks.cases import Arrays
from benchmarks.sides.heads import HeadStep, HeadWorkload


class Faulty(HeadStep):
    def __init__(self, workload: HeadWorkload) -> None:
        super().__init__(workload, "plain PyTorch")


class Wrong(Faulty):
    """Returns a gradient with a relative error of 1e-3."""

    def check(self) -> Arrays:
        arrays = super().check()
        return arrays | {"gradient of hidden states": arrays["gradient of hidden states"] * 1.001}


class Incomplete(Faulty):
    """Returns no gradient of the hidden states."""

    def check(self) -> Arrays:
        return {name: x for name, x in super().check().items() if name != "gradient of hidden states"}


class NaN(Faulty):
    """Returns NaN."""

    def check(self) -> Arrays:
        return {name: x * float("nan") for name, x in super().check().items()}


class Dies(Faulty):
    """Ends its process during the measurement."""

    def step(self, batch: int) -> None:
        print("no more memory", flush=True)
        os._exit(9)


class Raises(HeadStep):
    """Raises in its constructor."""

    def __init__(self, workload: HeadWorkload) -> None:
        raise ValueError("too large")


class Slow(Faulty):
    """Takes a minute to be checked."""

    def check(self) -> Arrays:
        time.sleep(60)
        return super().check()


class NeedsMemory(Faulty):
    """Runs out of memory in its first step."""

    def step(self, batch: int) -> None:
        raise torch.OutOfMemoryError("tried to allocate 180 GiB")
