"""The backend `triton`: fastdpo's own kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..choice.verdicts import Kernel, Trial, works
from ..devices import compute_capability
from . import trials
from .calls import OP, AttentionOptions, kernels_unsupported_reason, with_last_stride_1
from .layouts import LEAST_TURNS, layout_blocks

if TYPE_CHECKING:
    from ...kernels.attention_blocks import KernelConfigs, LayoutBlocks


class TritonBackend:
    """fastdpo's kernels (`kernels/packed_attention.py` and its backward): every option, and 16-bit dtypes.

    In float32 on a GPU, the kernels would run without tensor cores, spill 1 to 2 KB of registers per
    thread, and exceed the shared memory of several devices. Triton's interpreter, which runs on a
    CPU, has no such limits.
    """

    needs_probe = False

    def unsupported_reason(self, query: Tensor, value: Tensor, options: AttentionOptions) -> str | None:
        reason = kernels_unsupported_reason(query, value)
        if reason is None and query.device.type == "cuda" and query.dtype == torch.float32:
            return f"it needs float16 or bfloat16; got {query.dtype}"
        return reason

    def works(self, query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
        """Whether the kernels for a supported call work on its device (see `verdicts`)."""
        return works(*self.kernel_and_trial(query, value, options))

    def kernel_and_trial(self, query: Tensor, value: Tensor, options: AttentionOptions) -> tuple[Kernel, Trial]:
        sizes = dict(d=query.shape[2], d_v=value.shape[2], heads=query.shape[1], key_heads=value.shape[1])
        features = dict(sizes, windowed=options.window is not None, capped=options.softcap is not None)
        described = tuple(f"{name} {x}" for name, x in features.items())
        kernel = Kernel(OP, query.device, query.dtype, described)
        prepare = partial(self.prepare, least_turns=1)  # several programs for the keys of a prefix
        return kernel, partial(trials.packed_attention, prepare, **features)

    def prepare(
        self, query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions, least_turns: int = LEAST_TURNS
    ) -> TritonCall:
        from ...kernels.attention_blocks import kernel_configs

        configs = kernel_configs(query.shape[2], value.shape[2], compute_capability(query.device))
        return TritonCall(configs, layout_blocks(query, value, rows, options.window, configs, least_turns), options)


class TritonCall(NamedTuple):
    """One call of fastdpo's kernels, with the rows in their blocks."""

    configs: KernelConfigs
    blocks: LayoutBlocks
    options: AttentionOptions

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        from ...kernels.packed_attention import packed_attention_fwd

        q, k, v = with_last_stride_1(query), with_last_stride_1(key), with_last_stride_1(value)
        sinks = None if sinks is None else sinks.float().contiguous()
        return packed_attention_fwd(q, k, v, self.blocks, self.configs.forward, sinks, *self.options)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from ...kernels.packed_attention_backward import packed_attention_bwd

        q, k, v = with_last_stride_1(query), with_last_stride_1(key), with_last_stride_1(value)
        return packed_attention_bwd(grad, q, k, v, out, lse, self.blocks, self.configs, *self.options)
