"""How often the machine code of the kernels reads and writes each logit, and multiplies blocks of queries and keys."""

import pytest

pytest.importorskip("triton")

from fastdpo.kernels import token_logps
from tests.support.kernels import compiled
from tests.support.kernels.machine_code import Program


def turns(kernel, unit):
    """The innermost loops that use a unit, in the order of the code: what all warps do in a turn."""
    code = Program.parse(compiled.disassembly(kernel))
    loops = {header: body for header, body in code.loops.items() if code.turn(header)[unit]}
    innermost = sorted(x for x, body in loops.items() if not any(other < body for other in loops.values()))
    return [code.turn(header)[unit] * kernel.metadata.num_warps for header in innermost]


LOGITS = {"forward": (2, 1), "forward, statistics": (2, 1), "forward of a head": (2, 1), "backward": (1, 1)}
"""Reads and writes of each logit. If a gradient tile is wanted, the forward reads logits a second time to write it."""
ATTENTION = {"forward": 2, "queries": 3, "keys": 4}
"""Products of a block of queries and a block of keys."""
REPEATED = {("keys", 256, "sm90"): 1.5}
"""Products that are executed over those needed. The two warp groups repeat two of four products of 64 keys: both sums
of 128 keys would take all registers.
"""


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("case", LOGITS)
def test_a_row_kernel_reads_and_writes_logits(case, target):
    kernel = compiled.compile_row_kernel(target, case)
    block = 2 * (token_logps.BLOCK_V if case == "backward" else token_logps.LANES * token_logps.NUM_WARPS * 8)
    reads, writes = LOGITS[case]
    assert turns(kernel, "read") == [block] * reads
    assert turns(kernel, "write") == [block] * writes


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_multiplies_a_block_of_queries_and_keys(name, d, target):
    config = compiled.attention_configs(target, d)[name]
    found = turns(compiled.compile_attention(target, name, d), "products")
    assert len(found) == (1 if name == "keys" else 2)  # blocks without and with a mask
    products = ATTENTION[name] * REPEATED.get((name, d, target), 1)
    assert {*found} == {products * 2 * config.block_q * config.block_k * d}


def test_every_kernel_is_counted():
    assert LOGITS.keys() <= compiled.ROW_KERNELS.keys()
    assert ATTENTION.keys() == compiled.ATTENTION.keys()
