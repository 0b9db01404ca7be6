"""Stand-ins for the packages whose kernels transformers calls in mixers.

They have the signatures of the packages' functions, and compute the same results by the PyTorch
code of the modeling file. `install` puts them where transformers looks for the packages.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from fastdpo.models.mixers import finding


class Kernel(NamedTuple):
    """A function of a package.

    Attributes:
        module: where it is.
        signature: its parameters, without annotations.
        stand_in: computes its result, from the PyTorch code and its arguments by name.
    """

    module: str
    signature: str
    stand_in: Callable[[Callable, dict[str, Any]], Any]


def _sequences(compute: Callable, arguments: dict[str, Any]) -> Any:
    """Several sequences in one row, each from its initial state."""
    bounds, state = arguments.pop("cu_seqlens"), arguments.pop("initial_state")
    on_cpu = arguments.pop("cu_seqlens_cpu")
    assert state is None or state.dtype == torch.float32  # float64 in `float64_throughout`
    tokens = [arguments.pop(name) for name in ("q", "k", "v")] + [arguments.pop(name) for name in ("g", "beta")]
    options = {name: arguments[name] for name in ("output_final_state", "use_qk_l2norm_in_kernel")}
    if bounds is None:
        return compute(*tokens, initial_state=state, **options)
    assert (len(tokens[0]), tokens[0].shape[1]) == (1, bounds[-1])
    assert bounds.dtype == torch.int64
    assert torch.equal(bounds, on_cpu)
    assert state is None or len(state) == len(bounds) - 1
    outputs, states = [], []
    for i, (start, end) in enumerate(bounds.unfold(0, 2, 1).tolist()):
        initial = None if state is None else state[i : i + 1]
        output, final = compute(*(x[:, start:end] for x in tokens), initial_state=initial, **options)
        outputs.append(output)
        states.append(final)
    return torch.cat(outputs, 1), torch.cat(states) if options["output_final_state"] else None


def _batch(*names: str) -> Callable:
    """A batch of rows: the named arguments, and no other one."""

    def compute_batch(compute: Callable, arguments: dict[str, Any]) -> Any:
        positional, rest = names[: names.index("D")], names[names.index("D") :]
        unused = {name: x for name, x in arguments.items() if name not in names and x is not None}
        assert unused.keys() <= {"return_varlen_states"}
        return compute(*(arguments[name] for name in positional), **{name: arguments[name] for name in rest})

    return compute_batch


def _convolution(compute: Callable, arguments: dict[str, Any]) -> Any:
    x, weight, bias, *states, activation = arguments.values()
    assert not any(states)
    return compute(x, weight, bias, activation=activation)


def _none(compute: Callable, arguments: dict[str, Any]) -> None:
    """The modeling file then calls single functions."""


KERNELS = {
    "chunk_gated_delta_rule": Kernel(
        "fla.ops.gated_delta_rule",
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs",
        _sequences,
    ),
    "chunk_kda": Kernel(
        "fla.ops.kda",
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs",
        _sequences,
    ),
    "mamba_chunk_scan_combined": Kernel(
        "mamba_ssm.ops.triton.ssd_combined",
        "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, "
        "cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float('inf')), return_final_states=False, "
        "return_varlen_states=False",
        _batch(
            *("x", "dt", "A", "B", "C", "chunk_size", "D", "z", "dt_bias", "initial_states"),
            *("dt_softplus", "dt_limit", "return_final_states"),
        ),
    ),
    "mamba_split_conv1d_scan_combined": Kernel(
        "mamba_ssm.ops.triton.ssd_combined",
        "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None, "
        "dt_limit=(0.0, float('inf')), return_final_states=False, activation='silu', rmsnorm_weight=None, "
        "rmsnorm_eps=1e-06, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True",
        _none,
    ),
    "selective_scan_fn": Kernel(
        "mamba_ssm.ops.selective_scan_interface",
        "u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False",
        _batch("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"),
    ),
    "mamba_inner_fn": Kernel(
        "mamba_ssm.ops.selective_scan_interface",
        "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, "
        "C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1, "
        "b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-06",
        _none,
    ),
    "causal_conv1d_fn": Kernel(
        "causal_conv1d",
        "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, "
        "activation=None",
        _convolution,
    ),
}
"""The functions that transformers calls in training: of flash-linear-attention and fla-core 0.6.0,
mamba_ssm 2.3.2.post1 and causal_conv1d 1.7.0.
"""


def signature_of(name: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(f"def function({KERNELS[name].signature}): pass", namespace)
    return inspect.signature(namespace["function"])


@dataclass
class Calls:
    """The calls of stand-ins.

    Attributes:
        made: the names of kernels and their arguments.
        code: the PyTorch code of the modeling file that is in use, by the names of kernels.
    """

    made: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    code: dict[str, Callable] = field(default_factory=dict)

    def of(self, *names: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.made if name in names]

    def stand_in(self, name: str) -> Callable:
        signature = signature_of(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)  # raises for arguments that the package would refuse
            bound.apply_defaults()
            assert not bound.arguments.pop("kwargs", None)
            self.made.append((name, dict(bound.arguments)))
            return KERNELS[name].stand_in(self.code[name], dict(bound.arguments))

        vars(kernel)["__signature__"] = signature
        return kernel


def install(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module, **changed: Callable) -> Calls:
    """Makes the mixers of a model call stand-ins, as if the packages had been installed before its
    modeling file was imported.

    Args:
        changed: other functions than the stand-ins, by the names of kernels.
    """
    calls = Calls()
    for name, kernel in KERNELS.items():
        path = kernel.module.split(".")
        for i in range(len(path)):
            module = ".".join(path[: i + 1])
            if module not in sys.modules or not hasattr(sys.modules[module], "stand_in"):
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
                vars(sys.modules[module])["stand_in"] = True
        vars(sys.modules[kernel.module])[name] = changed.get(name, calls.stand_in(name))
    namespaces = [finding.forward_of(type(mixer)).__globals__ for mixer in finding.mixers_of(model)]
    for namespace in {id(x): x for x in namespaces}.values():
        for function, value in list(namespace.items()):
            choice = inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {}
            if "torch_function" in choice:
                name, code = choice["func_name"], choice["torch_function"]
                calls.code[name] = code
                chosen = use_kernel_func_from_hub_with_fallback(name, choice["package"])(code)
                monkeypatch.setitem(namespace, function, chosen)
    return calls
