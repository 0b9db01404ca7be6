"""Scans on packed tokens: functions that carry a state from token to token.

A scan that takes an initial state runs the roots first, and then the branches, each from the final
state of its prefix. Gradients flow back through the states. Two batches may need more chunks than
whole rows do, where segments are short; then, and if a scan takes no initial state, it runs whole
rows. Only the scan computes a prefix twice in that case, and the layer around it does not.

PyTorch code and the kernels of mamba_ssm run batches that are padded. Those of
flash-linear-attention run sequences of any lengths in one row, so that nothing is padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .implementations import kernel_of
from .segments import Segments, collect, gather_all

Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]


@dataclass(frozen=True)
class Scan:
    """A function that scans sequences.

    Attributes:
        time: the dimension of its tensors that runs over tokens.
        initial_state: the argument that takes an initial state [B, ...]; None if there is none.
        return_state: the argument that makes it return its final state as well.
        returns_pair: whether it returns (output, state) in any case.
        kernel_in_one_row: whether its kernel takes several sequences in one row, by `cu_seqlens`.
        example: arguments for a number of tokens, from a function that draws tensors.
    """

    time: int
    initial_state: str | None
    return_state: str
    returns_pair: bool
    kernel_in_one_row: bool
    example: Callable[[int, Callable[..., Tensor]], Arguments]

    @property
    def kernel_arguments(self) -> frozenset[str]:
        """The arguments that a kernel must have to run packed tokens."""
        states = {self.initial_state, self.return_state} if self.initial_state else {self.return_state}
        return frozenset(states | ({"cu_seqlens"} if self.kernel_in_one_row else set()))

    def run(self, original: Callable, segments: Segments, *args: Any, **kwargs: Any) -> Any:
        """The function's result for packed tokens: tensors with 1 in dimension 0 and T in `time`."""
        in_one_row = self.kernel_in_one_row and kernel_of(original) is not None
        sequences = segments.sequences(self._chunk(original, args, kwargs), in_one_row)
        outputs, state = [], {}
        for i, index in enumerate(sequences.batches):
            parents = None if i else sequences.parents
            inputs = gather_all(args, self.time, segments.tokens, index)
            named = gather_all(kwargs, self.time, segments.tokens, index)
            bounds = sequences.bounds[i]._asdict() if sequences.bounds else {}
            result = original(*inputs, **{**named, **state, **bounds, self.return_state: parents is not None})
            outputs.append(result[0] if isinstance(result, tuple) else result)
            if parents is not None:
                state = {self.initial_state: result[1].index_select(0, parents)}
        output = collect(outputs, self.time, sequences.place)
        return (output, None) if self.returns_pair else output

    def _chunk(self, original: Callable, args: tuple, kwargs: dict[str, Any]) -> int | None:
        """Number of tokens that a call computes at once; None if it must run whole rows."""
        if self.initial_state is None:
            return None
        parameters = inspect.signature(original).parameters
        position = list(parameters).index("chunk_size")
        given = args[position] if position < len(args) else kwargs.get("chunk_size")
        return parameters["chunk_size"].default if given is None else given


def _delta_rule(tokens: int, random: Callable[..., Tensor], channels: tuple[int, ...] = ()) -> Arguments:
    query, key, value = (random(1, tokens, 2, 8) for _ in range(3))
    decay, beta = -0.02 * random(1, tokens, 2, *channels).abs(), random(1, tokens, 2).sigmoid()
    return (query, key, value), {"g": decay, "beta": beta, "use_qk_l2norm_in_kernel": True}


def _delta_rule_of_channels(tokens: int, random: Callable[..., Tensor]) -> Arguments:
    return _delta_rule(tokens, random, channels=(8,))


def _state_space_dual(tokens: int, random: Callable[..., Tensor]) -> Arguments:
    x, dt = random(1, tokens, 4, 8), 0.05 * random(1, tokens, 4).abs()
    rates, b, c = -random(4).abs(), random(1, tokens, 1, 8), random(1, tokens, 1, 8)
    return (x, dt, rates, b, c), {"chunk_size": 64, "D": random(4)}


def _selective(tokens: int, random: Callable[..., Tensor]) -> Arguments:
    x, dt = random(1, 8, tokens), 0.05 * random(1, 8, tokens).abs()
    rates, b, c = -random(8, 4).abs(), random(1, 4, tokens), random(1, 4, tokens)
    return (x, dt, rates, b, c, random(8)), {"z": random(1, 8, tokens)}


_OF_FLA = ("initial_state", "output_final_state", True, True)

SCANS = {
    "torch_chunk_gated_delta_rule": Scan(1, *_OF_FLA, _delta_rule),
    "chunk_kimi_delta_attention": Scan(1, *_OF_FLA, _delta_rule_of_channels),
    "mamba2_chunk_scan": Scan(1, "initial_states", "return_final_states", False, False, _state_space_dual),
    "mamba_selective_scan": Scan(2, None, "return_last_state", False, False, _selective),
}
"""Scans by the names under which modeling files of transformers call them.

The examples decay slowly: a state that is lost changes the result by about half of its norm.
"""
