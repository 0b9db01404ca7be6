"""Figures of GPUs, and the cycles for which a kernel occupies the units of a multiprocessor."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

WAIT = 220
"""Cycles for which a program waits in a turn for the results of two products and of its reductions. Assumed."""
RESERVED = 1024
"""Bytes of shared memory that the system takes of each program."""


class Device(NamedTuple):
    """A GPU. Rates are those of one multiprocessor, per cycle.

    Attributes:
        name: with the size of its memory where there are several.
        target: the architecture.
        multiprocessors: their number.
        clock: cycles a second under sustained load.
        memory: bytes a second that a copy reads and writes.
        l2: bytes of the L2 cache read or written, by one of all multiprocessors at work.
        l2_size: bytes.
        products: floating-point operations of 16-bit products, by the fastest instruction.
        mma: the share of it that `mma.sync` reaches.
        fma: lanes of float32 arithmetic, some of which multiply integers too.
        shared_size: bytes of shared memory for all programs.
    """

    name: str
    target: str
    multiprocessors: int
    clock: float
    memory: float
    l2: float
    l2_size: int
    products: float
    mma: float
    fma: int
    shared_size: int

    # Equal on these devices: lanes, bytes of shared memory, instructions, registers, threads
    imad = 64
    alu = 64
    mufu = 16
    shared = 128
    issue = 4
    registers = 65_536
    threads = 2_048

    def product_rate(self) -> float:
        """Floating-point operations a second."""
        return self.products * self.multiprocessors * self.clock

    def programs(self, warps: int, registers: int, shared: int) -> int:
        """How many programs run on a multiprocessor at the same time."""
        of_a_warp = -(-registers // 8) * 8 * 32
        fits = (
            self.registers // (of_a_warp * warps),
            self.shared_size // (shared + RESERVED),
            self.threads // (32 * warps),
            32,
        )
        return max(1, min(fits))

    def cycles(self, work: Counter[str], warps: int) -> dict[str, float]:
        """For how many cycles the work of a program's warps occupies each unit."""
        lanes = 32 * warps
        return {
            "issue": work["issue"] * warps / self.issue,
            "products": (work["products"] + work["mma"] * (1 / self.mma - 1)) * warps / self.products,
            "fma": (work["fma"] + work["imad"]) * lanes / self.fma,
            "imad": work["imad"] * lanes / self.imad,
            "alu": work["alu"] * lanes / self.alu,
            "mufu": work["mufu"] * lanes / self.mufu,
            "shared": work["shared"] * warps / self.shared,
            "l2": (work["read"] + work["write"]) * warps / self.l2,
        }


A100 = Device("A100 80 GB", "sm80", 108, 1.30e9, 1.75e12, 5120 / 108, 40 << 20, 2048, 1.0, 64, 164 << 10)
H200 = Device("H200", "sm90", 132, 1.60e9, 4.3e12, 5120 / 132, 50 << 20, 4096, 0.62, 128, 228 << 10)
DEVICES = (A100, H200)
"""The rates of units, the sizes and the 5,120 bytes that the L2 cache of an A100 delivers in a cycle are NVIDIA's (A100
and H100 whitepapers, CUDA C++ Programming Guide); the H200's L2 cache is taken to be as fast. Its `mma` is measured
(arXiv 2402.13499), and so are the copies. The clocks are assumed: at 91 % of the resulting 865 TFLOP/s,
an H200 reaches the 790 TFLOP/s that its matrix products were measured at."""
