"""Makes a causal LM score pairs, packed and fused where it is
supported, and restores it afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..data.pairs import Pairs
from ..models import forward
from ..ops import length_desensitized_logps, token_logps
from ..packing import IGNORE_INDEX

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from .passes import Score

NAME = "fastdpo.ref_logps"
"""The integration under which `fastdpo.calls` counts its calls."""


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a model, which PEFT, DDP or another engine may have wrapped."""
    from transformers import PreTrainedModel

    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(f"precompute: model must be or hold a transformers.PreTrainedModel; got {type(model).__name__}")


def input_device_of(base: PreTrainedModel) -> torch.device:
    """The device that a model's inputs go to."""
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
    """Puts a model into evaluation mode for the block, and each module
    back into its own mode afterwards.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def with_adapter(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """Activates only this adapter of a PeftModel for the block, or none.
    Leaves any other model as it is.
    """
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
    """Yields a function that scores rows of pairs with the model, valid during the block."""
    base = base_of(model)
    if forward.ATTRIBUTE in vars(base):
        raise ValueError(
            "precompute: model must not belong to a patched trainer; got one that does. Call precompute before the "
            "trainer is created, or let the trainer do it (precompute_ref_log_probs=True)"
        )
    device = input_device_of(base)
    options = {"output_router_logits": False} if hasattr(base.config, "output_router_logits") else {}

    def score(rows: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor]:
        batch = {name: x.to(device) for name, x in pairs.collate(rows).items()}
        output = model(**batch, **options, use_cache=False, fused_lm_head=True)
        logps = output if isinstance(output, Tensor) else _from_logits(output.logits, batch["labels"])  # [2B, L-1]
        if ld_alpha is None:
            sums = logps.sum(1)
        else:
            scored = batch["labels"][:, 1:] != IGNORE_INDEX
            sums = length_desensitized_logps(logps, scored.to(logps.device), ld_alpha)
        chosen, rejected = sums.chunk(2)
        return chosen, rejected

    try:
        request = forward.Request(NAME, "reference")
        forward.install(base, request, lambda scored, _: scored.logps.logps, prior_scores=False)
        with torch.no_grad():
            yield score
    finally:
        forward.uninstall(base)


def _from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities [2B, L-1] of models that cannot be packed."""
    labels = labels.to(logits.device)
    rows = [token_logps(row[:-1], targets[1:]).logps for row, targets in zip(logits, labels, strict=True)]
    return torch.stack(rows)
