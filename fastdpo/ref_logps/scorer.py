"""Makes a causal LM score pairs, packed and fused where it is supported, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..models import forward
from ..models.examine.support import wrapping_reason
from ..models.parts import base_of, input_device_of
from ..models.state import ForwardOptions, state_of
from ..ops import token_logps
from ..packing import IGNORE_INDEX
from .filling import Score
from .pairs import Pairs

NAME = "fastdpo.ref_logps"
"""The integration under which `fastdpo.calls` counts its calls."""


@contextmanager
def scoring(model: nn.Module, pairs: Pairs, ld_alpha: float | None) -> Iterator[Score]:
    """Yields a function that scores rows of pairs with the model, valid during the block."""
    base = base_of(model, "precompute")
    if state_of(base) is not None:
        raise ValueError(
            "precompute: model must not belong to a patched trainer; got one that does. Call precompute before the "
            "trainer is created, or let the trainer do it (precompute_ref_log_probs=True)"
        )
    device = input_device_of(base)
    arguments = {"output_router_logits": False} if hasattr(base.config, "output_router_logits") else {}

    def score(rows: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor]:
        batch = {name: x.to(device) for name, x in pairs.collate(rows).items()}
        fused = wrapping_reason(model) or True
        output = model(**batch, **arguments, use_cache=False, fused_lm_head=fused)
        logps = output if isinstance(output, Tensor) else _from_logits(output.logits, batch["labels"])  # [2B, L-1]
        if ld_alpha is not None:  # LD-DPO, arXiv 2409.06411
            scored = (batch["labels"][:, 1:] != IGNORE_INDEX).to(logps.device)
            shorter = torch.minimum(*scored.sum(1).chunk(2)).repeat(2)  # [2B] lengths of the shorter completions
            logps = torch.where(scored.cumsum(1) <= shorter[:, None], logps, ld_alpha * logps)
        chosen, rejected = logps.sum(1).chunk(2)
        return chosen, rejected

    try:
        options = ForwardOptions(NAME, "reference")
        forward.install(base, options, lambda scored, _: scored.logps.logps, prior_scores=False)
        with torch.no_grad():
            yield score
    finally:
        forward.uninstall(base)


def _from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities [2B, L-1] of models that cannot be packed."""
    labels = labels.to(logits.device)
    rows = [token_logps(row[:-1], targets[1:]).logps for row, targets in zip(logits, labels, strict=True)]
    return torch.stack(rows)
