"""How long a kernel takes at least, and how long if its programs hide nothing but each other's waits.

    busy     the time for which the busiest unit works, if all units work at the same time
    serial   in each turn of a loop, the products, then the arithmetic, then a wait; hidden only by the
             programs that run beside it on the multiprocessor

The larger of both is the estimate. It neither knows the last programs of a launch, which leave units
idle, nor conflicts in caches and shared memory. So it ranks kernels of one kind; its milliseconds are
none that a device was seen to take.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from fastdpo.kernels.linear_exp import FusedConfig
from fastdpo.kernels.packed_attention import KernelConfig
from fastdpo.kernels.token_logps import NUM_WARPS

from . import compiled
from .devices import WAIT, Device
from .sass import Program

Pieces = tuple[tuple[int, int], ...]

TOKENS = 16_384
ITEM = 2
"""Bytes of a bfloat16."""
HEADS = {
    "Llama 3 8B": (128_256, 4096),
    "Qwen2.5 0.5B": (151_936, 896),
    "Gemma 2 2B": (256_000, 2304),
}
"""Vocabulary and hidden size."""
ROW_PASSES = {"forward": (1, 0), "forward, statistics": (1, 0), "forward of a head": (2, 1), "backward": (1, 1)}
"""How often the kernels over logits read and write a row."""
ATTENTION_PRODUCTS = {"forward": 2, "queries": 3, "keys": 4}
"""How many products each kernel of attention has."""
PAIRS = 16
PROMPT, COMPLETION = 1024, 256
ROWS: tuple[Pieces, Pieces] = (((0, PROMPT + COMPLETION),), ((0, PROMPT), (PROMPT, COMPLETION)))
"""The pieces of the two rows of a pair, as (position, length). The last one has the row's own tokens."""
START = 1500
"""Cycles from the start of a pass over a row to its first logits, and from its last ones to its sums. Assumed."""
ARITHMETIC = ("issue", "fma", "imad", "alu", "mufu")


class Kernel(NamedTuple):
    """A compiled kernel for NVIDIA.

    Attributes:
        registers, stack: of a thread; bytes of the latter.
        shared: bytes of a program.
    """

    code: Program
    warps: int
    registers: int
    stack: int
    shared: int

    @classmethod
    def of(cls, kernel: Any) -> Kernel:
        code = Program.parse(compiled.disassembly(kernel))
        return cls(code, kernel.metadata.num_warps, *compiled.registers_and_spills(kernel), kernel.metadata.shared)

    def resident(self, device: Device) -> int:
        """Programs on a multiprocessor at the same time."""
        return device.programs(self.warps, self.registers, self.shared)

    def turns(self, unit: str) -> list[Counter[str]]:
        """The turns of the loops that use a unit, in the order of the code."""
        return [self.code.turn(header) for header in self._headers(unit)]

    def outside(self, unit: str) -> Counter[str]:
        """What a warp does outside of these loops."""
        return self.code.outside(self._headers(unit))

    def _headers(self, unit: str) -> list[int]:
        """The loops that use a unit, without those around others of them."""
        loops = {header: body for header, body in self.code.loops.items() if self.code.turn(header)[unit]}
        return sorted(header for header, body in loops.items() if not any(other < body for other in loops.values()))


class Estimate(NamedTuple):
    """Times in seconds.

    Attributes:
        floor: of the products alone, or of moving each byte once.
        busy: of the busiest unit.
        unit: its name.
        serial: of programs that hide nothing but each other's waits.
    """

    floor: float
    busy: float
    unit: str
    serial: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.busy, self.serial)

    @property
    def limit(self) -> str:
        """What the time goes into: a unit, or "waits"."""
        return self.unit if self.busy >= self.serial else "waits"

    def at_least(self, seconds: float, unit: str) -> Estimate:
        """The estimate if a unit that is not part of multiprocessors works for so long."""
        return self._replace(busy=seconds, unit=unit) if seconds > self.busy else self


def estimate(device: Device, kernel: Kernel, launch: Iterable[tuple[Counter[str], float]], floor: float) -> Estimate:
    """For a launch that consists of pieces of work of a warp, each of them so many times in all programs together."""
    busy: defaultdict[str, float] = defaultdict(float)
    serial = 0.0
    for work, times in launch:
        cycles = device.cycles(work, kernel.warps)
        for unit, count in cycles.items():
            busy[unit] += count * times
        serial += (cycles["products"] + max(cycles[unit] for unit in ARITHMETIC) + WAIT) * times
    unit = max(busy, key=busy.__getitem__)
    whole = device.multiprocessors * device.clock
    return Estimate(floor, busy[unit] / whole, unit, serial / kernel.resident(device) / whole)


def row_kernel(device: Device, case: str, warps: int = NUM_WARPS) -> tuple[Kernel, dict[str, Estimate]]:
    """One of `ROW_PASSES` over `TOKENS` rows of logits of each head, each row by so many warps.

    A second read of a row comes from the L2 cache if all rows that are read at a time fit there. A
    program that runs alone on a multiprocessor loads nothing while it starts and while it adds up a row.
    """
    kernel = Kernel.of(compiled.compile_row_kernel(device.target, case, warps=warps))
    resident, (reads, writes) = kernel.resident(device), ROW_PASSES[case]
    turns = [turn for turn in kernel.turns("read") if turn["read"] > ITEM * 32]  # more than one logit of each thread
    found = {}
    for head, (vocabulary, _) in HEADS.items():
        row = vocabulary * ITEM
        launch = [(turn, TOKENS * row / (turn["read"] * kernel.warps)) for turn in turns]
        once = TOKENS * row / device.memory
        moved = once * (1 + writes)
        if reads > 1 and device.multiprocessors * resident * row > device.l2_size:
            moved += once * (reads - 1)
        idle = START * reads * TOKENS / device.multiprocessors / device.clock
        busy = estimate(device, kernel, launch, floor=once * (1 + writes)).at_least(moved, "memory")
        found[head] = busy._replace(serial=busy.busy + idle if resident == 1 else 0.0)
    return kernel, found


def attention(device: Device, name: str, d: int, config: KernelConfig) -> tuple[Kernel, Estimate]:
    """A kernel for 32 heads and 8 key heads of size d, over `PAIRS` pairs."""
    kernel = Kernel.of(compiled.compile_attention(device.target, name, d, config=config))
    scores = PAIRS * compiled.HEADS * sum(_visible_keys(pieces) for pieces in ROWS)
    floor = 2 * ATTENTION_PRODUCTS[name] * d * scores / device.product_rate()
    if name == "keys":
        blocks = PAIRS * compiled.KEY_HEADS * sum(math.ceil(own / config.block_k) for *_, (_, own) in ROWS)
        counts = [_turns_of_keys(config)]
    else:
        blocks = PAIRS * compiled.HEADS * sum(math.ceil(own / config.block_q) for *_, (_, own) in ROWS)
        counts = [sum(x) for x in zip(*(_turns_of_queries(pieces, config) for pieces in ROWS), strict=True)]
    turns = [(turn, n * PAIRS * compiled.HEADS) for turn, n in zip(kernel.turns("products"), counts, strict=True)]
    return kernel, estimate(device, kernel, [*turns, (kernel.outside("products"), blocks)], floor)


def _visible_keys(pieces: Pieces) -> int:
    """Summed over the queries of a row."""
    before, own = pieces[-1]
    return own * before + own * (own + 1) // 2


def _turns_of_queries(pieces: Pieces, config: KernelConfig) -> tuple[int, int]:
    """Blocks of keys without and with a mask that the blocks of queries of a row meet."""
    before, own = pieces[-1]
    whole = masked = 0
    for first in range(0, own, config.block_q):
        for position, length in pieces:
            start = before + first - position
            unmasked = min(start, length) // config.block_k
            whole += unmasked
            masked += math.ceil((min(start + config.block_q, length) - unmasked * config.block_k) / config.block_k)
    return whole, masked


def _turns_of_keys(config: KernelConfig) -> int:
    """Blocks of queries that the blocks of keys of a pair meet.

    The keys of the prompt and of the chosen completion are those of the first row. The second row reads
    the prompt.
    """
    (*_, (_, first_row)), (*_, (_, second_row)) = ROWS
    turns = 0
    for start in range(0, first_row, config.block_k):
        turns += math.ceil((first_row - start) / config.block_q)
        turns += math.ceil(second_row / config.block_q) if start < PROMPT else 0
    return turns + sum(
        math.ceil((second_row - start) / config.block_q) for start in range(0, second_row, config.block_k)
    )


def fused(device: Device, config: FusedConfig) -> tuple[Kernel, dict[str, Estimate]]:
    """The product of `linear_exp` for `TOKENS` tokens of each head, which writes a gradient tile."""
    requested = dict(tile_ptr="*bf16", tile_stride="i32")
    with_tma = device.target == "sm90"
    kernel = Kernel.of(compiled.compile_fused_product(device.target, with_tma, requested, config))
    (turn,) = kernel.turns("products")
    if with_tma:  # the instruction that loads a block of hidden states or weights names no size
        turn = turn + Counter(read=(config.block_n + config.block_v) * config.block_d * ITEM // kernel.warps)
    found = {}
    for head, (vocabulary, width) in HEADS.items():
        programs = math.ceil(TOKENS / config.block_n) * math.ceil(vocabulary / config.block_v)
        launch = [(turn, programs * math.ceil(width / config.block_d)), (kernel.outside("products"), programs)]
        floor = 2 * TOKENS * vocabulary * width / device.product_rate()
        written = TOKENS * vocabulary * ITEM / device.memory
        found[head] = estimate(device, kernel, launch, floor).at_least(written, "memory")
    return kernel, found
