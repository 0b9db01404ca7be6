"""Hybrid models on packed tokens in float64, compared with padded rows."""

from __future__ import annotations

import torch
from torch import nn

from fastdpo import packing
from fastdpo.models import attention
from tests.support.models.families import tiny_family

LENGTHS = ((150, 20, 33), (130, 5, 40), (1, 12, 17), (2, 3, 1))
"""Tokens of prompts and completions. States are shared (20 chunks of 64 tokens rather than 24), and
some prompts and completions are shorter than a convolution.
"""
SHORTEST = ((1, 2, 3), (2, 1, 2), (2, 3, 3), (1, 3, 4))
"""Rows of 3 to 5 tokens, all shorter than two convolutions."""


def pairs(
    share: bool = True, lengths: tuple[tuple[int, int, int], ...] = LENGTHS
) -> tuple[torch.Tensor, torch.Tensor, packing.Layout]:
    """ids and mask [R, L] of pairs of these lengths, and one of equal rows, and their layout."""
    generator = torch.Generator().manual_seed(1)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(3, 97, (n,), generator=generator)

    rows = [(p, tokens(p), tokens(c), tokens(r)) for p, c, r in lengths]
    rows.append((6, tokens(6), (y := tokens(9)), y))
    prompts = torch.tensor([p for p, *_ in rows] * 2)[:, None]
    padded = nn.utils.rnn.pad_sequence([torch.cat([x, (c, r)[i]]) for i in (0, 1) for _, x, c, r in rows], True)
    lengths = torch.tensor([len(x) + len((c, r)[i]) for i in (0, 1) for _, x, c, r in rows])[:, None]
    at = torch.arange(padded.shape[1])
    labels = padded.masked_fill((at >= lengths) | (at < prompts), packing.IGNORE_INDEX)
    return padded, (at < lengths).long(), packing.pack_pairs(padded, at < lengths, labels, share=share)


def results(model, ids, mask, layout, *, packed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`results_of` a batch of text."""
    padded = dict(input_ids=ids, attention_mask=mask, use_cache=False)
    inputs = attention.inputs_of(layout, ids) if packed else padded
    return results_of(model, inputs, layout, packed=packed)


def results_of(model, inputs, layout, *, packed: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states of the scored positions [M, D], and the gradients of a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    configs = attention.configs_of(model) if packed else []
    output = attention.run(configs, lambda: model.base_model(**inputs).last_hidden_state)
    if packed:
        hidden = output[0][layout.score_index][layout.output_source]
    else:
        hidden = output[:, : layout.output_shape[1]].flatten(0, 1)[layout.output_index]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (hidden * weights.to(hidden.dtype)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found, exact) -> float:
    """The largest relative error of a position's hidden state or of a parameter's gradient."""
    (hidden, gradients), (exact_hidden, exact_gradients) = found, exact
    assert gradients.keys() == exact_gradients.keys()
    floor = 1e-6 * max(x.norm() for x in exact_gradients.values())  # some gradients are zero in exact arithmetic
    errors = [(gradients[name] - x).norm() / x.norm().clamp(min=floor) for name, x in exact_gradients.items()]
    return max(*errors, ((hidden - exact_hidden).norm(dim=-1) / exact_hidden.norm(dim=-1)).max()).item()


def in_dtype(model, dtype: torch.dtype):
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped implementation has no float64
    return model.to(dtype)


def switched(name: str, dtype: torch.dtype = torch.float32):
    model = in_dtype(tiny_family(name), dtype)
    attention.switch(model)
    return model
