"""The functions that modeling files call by global names and that run on packed tokens.

A short convolution of width K sees K - 1 earlier tokens. Each segment is put behind the K - 1 tokens that
precede it in its row, its halo. One call convolves all of them, and the results of halos are dropped.

A scan carries a state from token to token. One that takes an initial state runs the roots first, and then
the branches, each from the final state of its prefix. Gradients flow back through the states. Two batches
may need more chunks than whole rows do, where segments are short; then, and if a scan takes no initial
state, it runs whole rows. Only the scan computes a prefix twice in that case, and the layer around it does
not.

A function calls PyTorch code, or the kernel of a package. transformers chooses when a modeling file is
imported. A function with the name of the PyTorch code passes its arguments on to the kernel if the package
is installed, without those that the kernel does not take. Where the package `kernels` is installed, the
function is inside a module, whose forward may be replaced by a kernel of the Hugging Face Hub. PyTorch code
and the kernels of mamba_ssm run batches that are padded. Those of flash-linear-attention run sequences of
any lengths in one row, so that nothing is padded.

To support another function, give it a `Scan` here, with an example of its arguments that decays slowly, and a family
to `HYBRID` in `tests/support/models/families.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..identity.functions import inner_function
from . import current
from .segments import Segments, collect, gather, gather_all

Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]

WHOLE_MIXERS = {"mamba2_split_conv1d_scan_combined", "mamba_inner_fn"}
"""Names of kernels that compute a whole mixer. If one returns None, as it does without its package,
the modeling file calls single functions instead.
"""

REFUSED: set[Callable] = set()
"""Functions that give wrong results on packed tokens."""

_ORIGINAL = "_fastdpo_original"


def calls_kernel(function: Callable) -> bool:
    """Whether a function of a modeling file calls a kernel."""
    return bool(_chosen(function).get("is_new_implementation"))


@functools.lru_cache(256)
def _chosen(function: Callable) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)


class Convolution:
    """`causal_conv1d_fn(x, weight, ...)` with x [B, D, T] and weight [D, K]."""

    time = 2
    kernel_arguments = frozenset({"weight"})

    def run(self, original: Callable, segments: Segments, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The function's result for the packed tokens x [1, D, T]."""
        weight = args[0] if args else kwargs["weight"]
        index, keep = segments.halos(weight.shape[-1] - 1)
        return original(gather(x, self.time, index), *args, **kwargs).index_select(self.time, keep)

    def example(self, tokens: int, random: Callable[..., Tensor]) -> Arguments:
        return (random(1, 8, tokens), random(8, 4)), {}


@dataclass(frozen=True)
class Scan:
    """A function that scans sequences.

    Attributes:
        time: the dimension of its tensors that runs over tokens.
        initial_state: the argument that takes an initial state [B, ...]; None if there is none.
        return_state: the argument that makes it return its final state as well.
        is_of_fla: whether it stands for a function of flash-linear-attention: it returns (output, state) in any case,
            and the kernel takes several sequences in one row, by `cu_seqlens`.
        example: arguments for a number of tokens, from a function that draws tensors.
    """

    time: int
    initial_state: str | None
    return_state: str
    is_of_fla: bool
    example: Callable[[int, Callable[..., Tensor]], Arguments]

    @property
    def kernel_arguments(self) -> frozenset[str]:
        """The arguments that a kernel must have to run packed tokens."""
        states = {self.initial_state, self.return_state} if self.initial_state else {self.return_state}
        return frozenset(states | ({"cu_seqlens"} if self.is_of_fla else set()))

    def run(self, original: Callable, segments: Segments, *args: Any, **kwargs: Any) -> Any:
        """The function's result for packed tokens: tensors with 1 in dimension 0 and T in `time`."""
        in_one_row = self.is_of_fla and calls_kernel(original)
        sequences = segments.sequences(self._chunk(original, args, kwargs), in_one_row)
        outputs, state = [], {}
        for i, index in enumerate(sequences.batches):
            parents = None if i else sequences.parents
            inputs = gather_all(args, self.time, segments.tokens, index)
            named = gather_all(kwargs, self.time, segments.tokens, index)
            bounds = sequences.bounds[i] if sequences.bounds else {}
            result = original(*inputs, **{**named, **state, **bounds, self.return_state: parents is not None})
            outputs.append(result[0] if isinstance(result, tuple) else result)
            if parents is not None:
                state = {self.initial_state: result[1].index_select(0, parents)}
        output = collect(outputs, self.time, sequences.place)
        return (output, None) if self.is_of_fla else output

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


def _state_space_dual(tokens: int, random: Callable[..., Tensor]) -> Arguments:
    x, dt = random(1, tokens, 4, 8), 0.05 * random(1, tokens, 4).abs()
    rates, b, c = -random(4).abs(), random(1, tokens, 1, 8), random(1, tokens, 1, 8)
    return (x, dt, rates, b, c), {"chunk_size": 64, "D": random(4)}


def _selective(tokens: int, random: Callable[..., Tensor]) -> Arguments:
    x, dt = random(1, 8, tokens), 0.05 * random(1, 8, tokens).abs()
    rates, b, c = -random(8, 4).abs(), random(1, 4, tokens), random(1, 4, tokens)
    return (x, dt, rates, b, c, random(8)), {"z": random(1, 8, tokens)}


_OF_FLA = ("initial_state", "output_final_state", True)

KNOWN: dict[str, Convolution | Scan] = {
    "causal_conv1d_fn": Convolution(),
    "torch_chunk_gated_delta_rule": Scan(1, *_OF_FLA, _delta_rule),
    "chunk_kimi_delta_attention": Scan(1, *_OF_FLA, functools.partial(_delta_rule, channels=(8,))),
    "mamba2_chunk_scan": Scan(1, "initial_states", "return_final_states", False, _state_space_dual),
    "mamba_selective_scan": Scan(2, None, "return_last_state", False, _selective),
}
"""Functions by the names under which modeling files of transformers call them.

The examples of scans decay slowly: a state that is lost changes the result by about half of its norm.
"""

WRAPPED = KNOWN.keys() | WHOLE_MIXERS


def wrapper(name: str, original: Callable) -> Callable:
    """The function that takes the place of a known one. It differs only in a mixer that runs on
    packed tokens.
    """

    @torch.compiler.disable(reason="it may run on packed tokens, whose layout is read on the host")
    def of_one_row(*args: Any, **kwargs: Any) -> Any:
        mixer = current.mixer()
        if mixer is None or not mixer.expected:
            return original(*args, **kwargs)
        if name in WHOLE_MIXERS:
            return None
        mixer.called.add(name)
        return KNOWN[name].run(function_inside(original), mixer.segments, *args, **kwargs)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if args else next(iter(kwargs.values()))
        if len(values) > 1:  # packed tokens are one row
            return original(*args, **kwargs)
        return of_one_row(*args, **kwargs)

    vars(replacement)[_ORIGINAL] = original
    return replacement


def original_of(function: Any) -> Any:
    """The function inside a `wrapper`."""
    return getattr(function, _ORIGINAL, function)


def function_inside(original: Any) -> Any:
    """The function inside the module that the package `kernels` makes of it. The module itself if a kernel has taken
    the function's place, or if it is a module of other code.
    """
    if not isinstance(original, nn.Module) or inner_function(original.forward) is not type(original).forward:
        return original
    return _chosen(type(original).forward).get("func", original)


def runs_packed(name: str, original: Any, file: str) -> bool:
    """Whether packed tokens may reach what a known name stands for.

    PyTorch code takes them, and so does the kernel that transformers calls instead, if it has the
    arguments for states. Kernels of the Hugging Face Hub and functions of other code do not.

    Args:
        name: one of `KNOWN`.
        original: what it stands for.
        file: the name of the modeling file's module.
    """
    is_function_of_file = isinstance(original, FunctionType) and original.__module__ == file
    if not is_function_of_file or original in REFUSED:
        return False
    if not calls_kernel(original):
        return True
    kernel = _chosen(original).get("implementation")
    return kernel is not None and KNOWN[name].kernel_arguments <= inspect.signature(kernel).parameters.keys()
