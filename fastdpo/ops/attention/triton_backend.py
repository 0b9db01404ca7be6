"""The backend `triton`: fastdpo's own kernels."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..choice.verdicts import Kernel, Trial
from ..devices import compute_capability, suits_triton
from . import trials
from .device_layout import OP, AttentionOptions, Kind, Rows, offsets
from .pieces import with_last_stride_1

if TYPE_CHECKING:
    from ...kernels.attention_blocks import KernelConfig, KernelConfigs, LayoutBlocks

MAX_HEAD_SIZE = 256
MOST_PARTS = 512
"""Programs of a launch whose sums are parts of those of a block of keys.

A block has several programs if each can have this share of all work, so that none does much more than twice as much,
which is the mean on GPUs: they run 200 to 300 programs at a time. The buffers of all parts take at most 32 MiB, or 64
with heads above 128.
"""
LEAST_TURNS = 64
"""Blocks of queries of one head in such a program. They take much longer than to store its sums and to add them."""


class TritonBackend:
    """fastdpo's kernels (`kernels/packed_attention.py` and its backward): every option, and 16-bit dtypes.

    In float32 on a GPU, the kernels would run without tensor cores, spill 1 to 2 KB of registers per
    thread, and exceed the shared memory of several devices. Triton's interpreter, which runs on a
    CPU, has no such limits.
    """

    def unsupported_reason(self, kind: Kind) -> str | None:
        reason = kernels_unsupported_reason(kind)
        if reason is None and kind.device.type == "cuda" and kind.dtype == torch.float32:
            return f"it needs float16 or bfloat16; got {kind.dtype}"
        return reason

    def kernel_and_trial(self, kind: Kind) -> tuple[Kernel, Trial]:
        """The kernels for a supported call, and their trial (see `verdicts`)."""
        described = tuple(f"{name} {x}" for name, x in kind.features.items())
        call = partial(self.call, least_turns=1)  # several programs for the keys of a prefix
        trial = partial(trials.packed_attention, call, **kind.features)
        return Kernel(OP, kind.device, kind.dtype, described), trial

    def call(self, kind: Kind, least_turns: int = LEAST_TURNS) -> TritonCall:
        from ...kernels.attention_blocks import kernel_configs

        configs = kernel_configs(kind.d, kind.d_v, compute_capability(kind.device))
        return TritonCall(configs, kind.options, kind.heads, kind.key_heads, least_turns)


class TritonCall(NamedTuple):
    """One kind of call of fastdpo's kernels."""

    configs: KernelConfigs
    options: AttentionOptions
    heads: int
    key_heads: int
    least_turns: int

    def describe(self, rows: Rows) -> LayoutBlocks:
        sizes = self.heads, self.key_heads, self.options.window
        return layout_blocks(rows, *sizes, self.configs, self.least_turns)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, layout: LayoutBlocks
    ) -> tuple[Tensor, Tensor]:
        from ...kernels.packed_attention import packed_attention_fwd

        q, k, v = with_last_stride_1(query), with_last_stride_1(key), with_last_stride_1(value)
        sinks = None if sinks is None else sinks.float().contiguous()
        return packed_attention_fwd(q, k, v, layout, self.configs.forward, sinks, *self.options)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, layout: LayoutBlocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        from ...kernels.packed_attention_backward import packed_attention_bwd

        q, k, v = with_last_stride_1(query), with_last_stride_1(key), with_last_stride_1(value)
        return packed_attention_bwd(grad, q, k, v, out, lse, layout, self.configs, *self.options)


def kernels_unsupported_reason(kind: Kind) -> str | None:
    """Why fastdpo's Triton kernels do not take the tensors of a call, or None if they do."""
    if not suits_triton(kind.device, kind.dtype):
        needed = "Triton, a device that Triton supports, and a dtype other than float64"
        return f"it needs {needed}; got {kind.device}, {kind.dtype}"
    size = max(kind.d, kind.d_v)
    if size > MAX_HEAD_SIZE:
        return f"it needs head sizes of at most {MAX_HEAD_SIZE}; got {size}"
    return None


def layout_blocks(
    layout: Rows, heads: int, key_heads: int, window: int | None, configs: KernelConfigs, least_turns: int = LEAST_TURNS
) -> LayoutBlocks:
    """The rows in blocks of queries and of keys, for fastdpo's kernels, whatever the default device."""
    from ...kernels.attention_blocks import LayoutBlocks, PartialSums

    pieces = [(i, *piece) for i, row in enumerate(layout.checked) for piece in row.pieces]
    pieces, rows = (torch.tensor(x, dtype=torch.long, device="cpu").view(-1, 4) for x in (pieces, layout.causal))
    first_piece = offsets(pieces[:, 0].bincount(minlength=len(rows) + 1))
    queries = (_blocks_of_queries(rows, x.block_q) for x in (configs.forward, configs.query_gradient))
    blocks = _blocks_of_rows(rows[:, 3], configs.key_gradient.block_k)
    readers, work = _readers(rows, pieces, blocks, window, configs.key_gradient)
    share = math.ceil(int(work[:, 2].sum()) * key_heads / MOST_PARTS)
    least = max(share, least_turns * key_heads // heads, 1)
    keys, token_of_place = _programs_of_keys(rows, blocks, work, configs.key_gradient.block_k, least)
    places = token_of_place.argsort(stable=True)
    tokens, counts = token_of_place[places].unique_consecutive(return_counts=True)
    parts = PartialSums(_ended(places, 0), offsets(_ended(counts, 0)), _ended(tokens, -1))
    unused = len(rows), 0  # a block without tokens
    forward, query_gradient = (_ended(x, *unused) for x in queries)
    keys, rows = _ended(keys, *unused, 0, 0, -1), _ended(rows, layout.tokens, 0, layout.tokens, 0)
    return LayoutBlocks(rows, pieces, first_piece, forward, query_gradient, keys, readers, parts)


def _ended(x: Tensor, *unused: int) -> Tensor:
    """x with one more entry, which stands for nothing."""
    return torch.cat([x, torch.tensor(unused, device="cpu").view(1, *x.shape[1:])])


def _blocks_of_queries(rows: Tensor, size: int) -> Tensor:
    """[number of blocks, 2] row and first token, those that see the most keys first."""
    _, prefix_length, _, own_length = rows.unbind(1)
    row, first = _blocks_of_rows(own_length, size)
    keys_seen = prefix_length[row] + torch.minimum(first + size, own_length[row])
    return torch.stack([row, first], 1)[keys_seen.argsort(descending=True, stable=True)]


def _readers(
    rows: Tensor, pieces: Tensor, blocks: tuple[Tensor, Tensor], window: int | None, config: KernelConfig
) -> tuple[Tensor, Tensor]:
    """`LayoutBlocks.readers`, and who reads each of the blocks of keys.

    The latter is [E, 3]: a block, one of the readers of its row that have queries that see some of its keys, and the
    number of blocks of such queries. It is sorted.
    """
    _, prefix_length, own, own_length = rows.unbind(1)
    reading, start, length, position = pieces.unbind(1)
    overlap = (start < (own + own_length)[:, None]) & (start + length > own[:, None])  # [row, piece]
    readers, counts = overlap.nonzero()[:, 1], overlap.sum(1)
    row, first = blocks
    block, nth = _blocks_of_rows(counts[row], 1)
    reader = offsets(counts)[row[block]] + nth
    piece = readers[reader]
    skipped = (own[row] + first)[block] - start[piece]  # keys of the piece before those of the block
    begin = position[piece] + skipped - prefix_length[reading[piece]]
    end = own_length[reading[piece]]
    if window is not None:
        end = torch.minimum(end, begin + config.block_k - 1 + window)
    queries = (end - begin.clamp(min=0)) * (skipped < length[piece])
    turns = (queries + config.block_q - 1) // config.block_q
    return readers, torch.stack([block, reader, turns], 1)[queries > 0]


def _programs_of_keys(
    rows: Tensor, blocks: tuple[Tensor, Tensor], work: Tensor, size: int, least: int
) -> tuple[Tensor, Tensor]:
    """`LayoutBlocks.keys`, and the token of each place of a part.

    A block of `size` keys has as many programs as can have `least` turns each, with whole readers. These are short
    enough: a row of m blocks of queries reads its own keys in m^2 / 2 turns, so it has more turns than the mean of 256
    programs only if m < 512 / H_kv and the batch has little else.
    """
    _, _, own, own_length = rows.unbind(1)
    row, first = blocks
    block, reader, turns = work.unbind(1)
    done = offsets(turns)
    of_block = torch.zeros_like(row).index_add_(0, block, turns)
    programs = (of_block // least).clamp(min=1)
    middle = done[:-1] + turns // 2 - offsets(of_block)[block]  # of a reader in the turns of its block
    program = offsets(programs)[block] + middle * programs[block] // of_block[block]
    _, counts = program.unique_consecutive(return_counts=True)
    ends = offsets(counts)
    block, first_reader, last_reader = block[ends[:-1]], reader[ends[:-1]], reader[ends[1:] - 1]
    row, first = row[block], first[block]

    is_part = block.bincount()[block] > 1
    places = (own_length[row] - first).clamp(max=size) * is_part
    first_place = torch.where(is_part, offsets(places)[:-1], -1)
    found = torch.stack([row, first, first_reader, last_reader + 1, first_place], 1)
    program, key = _blocks_of_rows(places, 1)
    return found[done[ends].diff().argsort(descending=True, stable=True)], (own[row] + first)[program] + key


def _blocks_of_rows(lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The row of each block of `size` tokens, and the block's first token within the row."""
    counts = (lengths + size - 1) // size
    row = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    return row, (torch.arange(len(row), device="cpu") - offsets(counts)[row]) * size
