"""Compares a model with custom layers on packed rows with the same model on each row alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ... import checks
from ...accuracy import LARGEST_PROBE_ERROR, TF32, error
from ...packing import pack

OP = "verify_packed"

UNITS = 1024
"""Allowed relative error in units of rounding. Two orders of additions differ by a few units in each layer, and wrong
rows or positions by a tenth of the norm.
"""

Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def verify_packed(model: nn.Module, run: Run, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> None:
    """Raises an error unless a model runs a packed batch as it runs each of its rows alone.

    Compares the hidden states of the labelled positions and the gradients of all parameters, in the mode that the model
    is in. This finds layers that are not given the rows or the positions, checkpointing that runs a layer again without
    them, and dropout, of which packed attention has none. Call it with the first batch, before the training. It runs
    the batch three times, and leaves gradients and random numbers as they were.

    Args:
        model: whose parameters are compared.
        run: given ids [1, T], their positions [1, T] and `Layout.rows`, returns the hidden states [1, T, D]. Given None
            for the rows, it runs one ordinary row.
        input_ids, attention_mask, labels: [R, L] of a few rows that share prefixes, as in `pack`.

    Raises:
        ValueError: the model runs a packed batch differently or draws random numbers, or no two rows share tokens; the
            message says which.
        TypeError, NotPackable: as in `pack`.
    """
    layout = pack(input_ids, attention_mask, labels, groups="content")
    is_shared = len(layout.token_index) < layout.unshared
    checks.require(is_shared, OP, "input_ids", "have rows that begin alike", "rows that share nothing")
    device = input_ids.device
    devices = [] if device.type == "cpu" else [device]
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    kept = {name: x.grad for name, x in parameters.items()}
    bounds = layout.label_bounds.tolist()

    def packed() -> Tensor:
        hidden = run(layout.pack(input_ids), layout.position_ids[None], layout.rows)
        return hidden[0, layout.label_index]  # [M, D]

    def alone() -> Tensor:
        states = []
        for i, (ids, mask) in enumerate(zip(input_ids, attention_mask != 0, strict=True)):
            if bounds[i] < bounds[i + 1]:
                scored = layout.output_index[bounds[i] : bounds[i + 1]] - i * layout.output_shape[1]
                offset = mask.int().argmax()
                hidden = run(ids[mask][None], torch.arange(int(mask.sum()), device=device)[None], None)
                states.append(hidden[0, scored - offset])
        return torch.cat(states)

    def results(compute: Callable[[], Tensor], seed: int) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            hidden = compute()
            weights = torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device, dtype=hidden.dtype)
            if hidden.requires_grad:  # `backward`, since reentrant checkpointing knows no other function
                (hidden * weights.cos()).sum().backward()
        gradients = {name: x.grad for name, x in parameters.items() if x.grad is not None}
        return {"the hidden states": hidden.detach(), **{f"the gradient of {k}": x for k, x in gradients.items()}}

    try:
        found, expected, again = results(packed, 0), results(alone, 0), results(alone, 1)
    finally:
        for name, x in parameters.items():
            x.grad = kept[name]
    unit = _unit(found["the hidden states"])
    bound = min(UNITS * unit, LARGEST_PROBE_ERROR)
    same = torch.equal(expected["the hidden states"], again["the hidden states"])
    rule = "compute the same twice, with dropout 0 or in evaluation mode: packed attention has no dropout"
    checks.require(same, OP, "run", rule, "other hidden states with other random numbers")
    rule = "return the same for packed rows and for each row alone"
    checks.require(found.keys() == expected.keys(), OP, "run", rule, "gradients of other parameters")
    norm = max(float(x.norm()) for name, x in expected.items() if name != "the hidden states") if len(found) > 1 else 1
    for name, x in found.items():
        least = 0.0 if name == "the hidden states" else UNITS * unit * norm  # some gradients are zero but for rounding
        difference = float((x.double() - expected[name].double()).norm())
        wrong = difference > max(bound * float(expected[name].double().norm()), least)
        got = f"{name} with a relative error of {error(x, expected[name]):.2g}"
        checks.require(not wrong, OP, "run", rule, got)


def _unit(hidden: Tensor) -> float:
    """The unit of rounding of products, from the dtype of hidden states, autocast and TF32."""
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    reduced = dtype == torch.float32 and (device != "cpu" or torch.get_float32_matmul_precision() != "highest")
    return TF32 if reduced else torch.finfo(dtype).eps
