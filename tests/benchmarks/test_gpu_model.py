"""The static model of the kernels counts what they do, and its tables are those of the kernels that are used."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_model import bounds, compiled, results
from benchmarks.gpu_model.devices import A100, DEVICES, H200
from benchmarks.gpu_model.sass import Program, work
from fastdpo.kernels import token_logps
from fastdpo.kernels.packed_attention import KernelConfig

ROOT = Path(__file__).parents[2]
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_CTAID.X ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, [R2.64] ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
        /*0040*/                   FADD R4, R4, R5 ;
        /*0050*/                   FADD R4, R4, R6 ;
.L_x_2:
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   STG.E.U16 [R2.64], R4 ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
"""


def test_a_turn_takes_the_shortest_way_through_a_loop():
    program = Program.parse(LISTING)
    ((header, body),) = program.loops.items()
    assert len(body) == 3  # with the additions, and without the trap at the end
    turn = program.turn(header)
    assert turn == Counter(issue=5, read=32 * 16, write=32 * 2, mufu=1, shared=32 * 18)
    assert program.outside([header]) == Counter(issue=3, alu=1)


def test_products_of_a_warp_group_are_shared_by_its_warps():
    (block,) = Program.parse("        /*0000*/  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;").blocks
    assert work(block)["products"] * 4 == 2 * 64 * 128 * 16
    (block,) = Program.parse("        /*0000*/  HMMA.16816.F32.BF16 R24, R4, R8, R24 ;").blocks
    assert work(block)["products"] == work(block)["mma"] == 2 * 16 * 8 * 16


@pytest.mark.parametrize("device", DEVICES, ids=[device.name for device in DEVICES])
@pytest.mark.parametrize("name", compiled.ATTENTION)
def test_a_turn_of_attention_multiplies_a_block_of_queries_and_keys(name, device):
    config = compiled.attention_configs(device.target, 128)[name]
    kernel = bounds.Kernel.of(compiled.compile_attention(device.target, name, 128))
    turns = kernel.turns("products")
    assert len(turns) == (1 if name == "keys" else 2)  # blocks without and with a mask
    for turn in turns:
        needed = bounds.ATTENTION_PRODUCTS[name] * 2 * config.block_q * config.block_k * 128
        assert turn["products"] * kernel.warps == needed


@pytest.mark.parametrize("device", DEVICES, ids=[device.name for device in DEVICES])
@pytest.mark.parametrize("case", bounds.ROW_PASSES)
def test_a_turn_of_a_row_kernel_reads_a_block_of_logits(case, device):
    kernel = bounds.Kernel.of(compiled.compile_row_kernel(device.target, case))
    turns = [turn["read"] * kernel.warps for turn in kernel.turns("read")]
    block = 2 * (token_logps.BLOCK_V if case == "backward" else token_logps.LANES * kernel.warps * 8)
    reads, writes = bounds.ROW_PASSES[case]
    assert turns == [block] * reads
    assert [turn["write"] * kernel.warps for turn in kernel.turns("write")] == [block] * writes


@pytest.mark.parametrize(
    "config", [KernelConfig(32, 64, 4, 2), KernelConfig(128, 48, 8, 2), KernelConfig(64, 64, 4, 2)]
)
def test_turns_are_the_blocks_with_visible_keys(config):
    """The pieces of a row are read one after the other, so blocks of keys start with each piece."""
    for pieces in bounds.ROWS:
        before, own = pieces[-1]
        starts = [position + start for position, length in pieces for start in range(0, length, config.block_k)]
        met = sum(
            start <= min(before + first + config.block_q, before + own) - 1
            for first, start in product(range(0, own, config.block_q), starts)
        )
        assert sum(bounds._turns_of_queries(pieces, config)) == met


def test_the_busiest_unit_or_the_waits_take_the_time():
    kernel = bounds.Kernel(Program.parse(LISTING), warps=4, registers=64, stack=0, shared=32 << 10)
    assert kernel.resident(H200) == 6  # of 33 KiB in 228
    assert kernel.resident(A100) == 4
    much = bounds.estimate(H200, kernel, [(Counter(mufu=1000), 132)], floor=0.0)
    assert (much.unit, much.limit) == ("mufu", "mufu")
    assert much.seconds == pytest.approx(1000 * 4 * 32 / 16 / 1.6e9)
    little = bounds.estimate(H200, kernel, [(Counter(mufu=1), 132 * 6)], floor=0.0)
    assert little.limit == "waits"
    assert little.seconds == pytest.approx((8 + 220) / 1.6e9)
    assert much.at_least(1.0, "memory").limit == "memory"


def test_repeated_products_make_an_estimate_longer():
    """Eight warps have no part of such a small block for themselves."""
    _, four = bounds.attention(H200, "keys", 128, KernelConfig(32, 64, 4, 2))
    _, eight = bounds.attention(H200, "keys", 128, KernelConfig(32, 64, 8, 2))
    assert four.floor == eight.floor
    assert four.seconds < eight.seconds


def test_the_tables_are_those_of_the_kernels_that_are_used():
    found = results.read()
    for device, name, d in product(DEVICES, compiled.ATTENTION, (64, 128, 256)):
        (used,) = (row for row in found if row.used and row.kind == (device.name, f"attention, {name}", f"D {d}"))
        assert used.config == compiled.attention_configs(device.target, d)[name]
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert all(table in page for table in results.tables(found))


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_the_first_configurations_can_be_measured(target):
    first, second, third = results.ranked_attention(target, 128)[:3]
    assert len({first, second, third}) == 3
    assert results.ranked_attention("sm120", 128) == []
