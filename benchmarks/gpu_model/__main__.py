"""Estimates the times of the kernels on GPUs from their machine code, for docs/gpu.md.

Usage: python -m benchmarks.gpu_model [--json FILE] [--jobs N] [--markdown]

No GPU is needed. Every configuration of the kernels of attention and of the fused product that fits a
device is compiled and ranked by its estimate (see `bounds`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path

from fastdpo.kernels.linear_exp import FusedConfig
from fastdpo.kernels.packed_attention import KernelConfig
from fastdpo.kernels.token_logps import NUM_WARPS
from fastdpo.ops.head_table import CANDIDATES, SHARED_MEMORY
from fastdpo.ops.head_tiles import WHOLE_MULTIPROCESSOR

from . import bounds
from .bounds import Kernel
from .compiled import ATTENTION, attention_configs
from .devices import DEVICES, Device
from .results import RESULTS, Row, read, tables, write

HEAD_SIZES = (64, 128, 256)
MOST_STACK = 64
"""Bytes of a thread. The estimate of a kernel that spills more would mean nothing."""
MOST_REGISTERS = 224
"""Of a thread, for sums and scores. Kernels that need more take minutes to compile."""


def row_kernel(device: Device, name: str, warps: int = NUM_WARPS) -> list[Row]:
    """A row for each head."""
    is_used = warps == NUM_WARPS
    kernel, estimates = bounds.row_kernel(device, name, warps)
    described = f"rows, {name}" if is_used else f"rows, {name}, {warps} warps"
    return [Row.of(x, kernel.stack, device, described, head, (), is_used) for head, x in estimates.items()]


def attention(device: Device, name: str, d: int, config: KernelConfig) -> list[Row]:
    """One row, or none if another configuration than the built-in one spills too much or does not fit the device."""
    kernel, found = bounds.attention(device, name, d, config)
    used = attention_configs(device.target, d)[name] == config
    row = Row.of(found, kernel.stack, device, f"attention, {name}", f"D {d}", config, used)
    return [row] if used or fits(device, kernel) else []


def fits(device: Device, kernel: Kernel) -> bool:
    return kernel.stack <= MOST_STACK and kernel.shared <= SHARED_MEMORY[device.target]


def attention_candidates(device: Device, name: str, d: int) -> set[KernelConfig]:
    found = {attention_configs(device.target, d)[name]}
    for block_q, block_k, warps in product((32, 64, 128), (16, 32, 64, 128), (4, 8)):
        sums = 2 * block_k * d if name == "keys" else block_q * d
        scores = block_q * block_k * (1 if name == "forward" else 2)
        if (sums + scores) / (32 * warps) <= MOST_REGISTERS:
            found.add(KernelConfig(block_q, block_k, warps, 2))
    return found


def fused(device: Device, config: FusedConfig) -> list[Row]:
    """A row for each head, or none if the kernel spills too much or does not fit the device."""
    kernel, estimates = bounds.fused(device, config)
    if not fits(device, kernel):
        return []
    return [Row.of(x, kernel.stack, device, "fused product", head, config, False) for head, x in estimates.items()]


def tasks() -> Iterator[Callable[[], list[Row]]]:
    for device in DEVICES:
        yield from (partial(row_kernel, device, name) for name in bounds.ROW_PASSES)
        yield partial(row_kernel, device, "forward of a head", WHOLE_MULTIPROCESSOR)
        for name, d in product(ATTENTION, HEAD_SIZES):
            yield from (partial(attention, device, name, d, x) for x in sorted(attention_candidates(device, name, d)))
        yield from (partial(fused, device, FusedConfig(*blocks)) for blocks in CANDIDATES)


def main() -> None:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file to write")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="kernels compiled at a time")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the file, and compile nothing")
    args = parser.parse_args()
    if not args.markdown:
        with ProcessPoolExecutor(args.jobs) as pool:
            waiting = [pool.submit(task) for task in tasks()]
            found = [row for task in tqdm(as_completed(waiting), total=len(waiting)) for row in task.result()]
        write(found, args.json)
    print(*tables(read(args.json)), sep="\n\n")


if __name__ == "__main__":
    main()
