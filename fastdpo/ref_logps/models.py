"""A causal LM made to score pairs, packed and fused if it can be, and left as it was afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..ops import length_desensitized_logps, token_logps
from ..packing import IGNORE_INDEX
from .pairs import Pairs

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from .passes import Score

NAME = "fastdpo.ref_logps"
"""Of its calls in `fastdpo.calls`."""


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model in a model, which may be wrapped by PEFT, DDP or another engine."""
    from transformers import PreTrainedModel

    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"precompute: model must be or hold a transformers.PreTrainedModel; got {type(model).__name__}")


def device_of(base: PreTrainedModel) -> torch.device:
    """Where its inputs go."""
    return cast(Tensor, base.get_input_embeddings().weight).device


def vocabulary_of(base: PreTrainedModel) -> int | None:
    """The number of rows of a model's token embedding, or None for an embedding of another kind."""
    return getattr(base.get_input_embeddings(), "num_embeddings", None)


def _peft_model(model: nn.Module) -> PeftModel | None:
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel

    return next((module for module in model.modules() if isinstance(module, PeftModel)), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A reference has no dropout, whatever mode the model is in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def with_adapter(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """A PeftModel with only this adapter on; None: with none. Any other model as it is."""
    peft_model = _peft_model(model)
    if peft_model is None:
        if adapter is not None:
            raise ValueError(f"precompute: adapter must be None without a PeftModel; got {adapter!r}")
        yield
        return
    if adapter is None:
        with peft_model.disable_adapter():
            yield
        return
    configs = peft_model.peft_config
    if adapter not in configs or configs[adapter].is_prompt_learning:
        known = [name for name, config in configs.items() if not config.is_prompt_learning]
        raise ValueError(f"precompute: adapter must be one of {known}, none of virtual tokens; got {adapter!r}")
    previous, trainable = peft_model.active_adapter, [p for p in model.parameters() if p.requires_grad]
    peft_model.set_adapter(adapter)
    try:
        yield
    finally:
        peft_model.set_adapter(cast(str, previous))
        model.requires_grad_(False)  # PEFT makes trainable whatever it activates
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def scoring(model: nn.Module, pairs: Pairs, ld_alpha: float | None) -> Iterator[Score]:
    """Scores rows of pairs by the model while the block lasts."""
    from ..integrations import fused_forward, qualify

    base = base_of(model)
    if "_fastdpo" in vars(base):
        raise ValueError(
            "precompute: model must not be wrapped by fastdpo already; got one that belongs to a patched trainer. Call "
            "this before the trainer is built, or have the trainer do it (precompute_ref_log_probs=True)"
        )
    device = device_of(base)
    request = fused_forward.Request((), 1.0, False, *qualify.logit_transform(base.config.get_text_config()))
    options = {"output_router_logits": False} if hasattr(base.config, "output_router_logits") else {}

    def score(rows: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor]:
        batch = {name: x.to(device) for name, x in pairs.collate(rows).items()}
        found = model(**batch, **options, use_cache=False, fused_lm_head=True)
        logps = found if isinstance(found, Tensor) else _from_logits(found.logits, batch["labels"])  # [2B, L-1]
        if ld_alpha is None:
            sums = logps.sum(1)
        else:
            scored = batch["labels"][:, 1:] != IGNORE_INDEX
            sums = length_desensitized_logps(logps, scored.to(logps.device), ld_alpha)
        chosen, rejected = sums.chunk(2)
        return chosen, rejected

    try:
        fused_forward.install(
            base,
            NAME,
            "reference",
            request,
            fused_forward.Options(),
            lambda scored, _: scored.logps.logps,
            stock_scores=False,
        )
        with torch.no_grad():
            yield score
    finally:
        fused_forward.uninstall(base)


def _from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities [2B, L-1] of models that can't be packed."""
    labels = labels.to(logits.device)
    rows = [token_logps(row[:-1], targets[1:]).logps for row, targets in zip(logits, labels, strict=True)]
    return torch.stack(rows)
