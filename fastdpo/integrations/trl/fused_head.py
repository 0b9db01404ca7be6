"""The function by which TRL's trainers prepare their models since TRL 1.15, `add_fused_lm_head`.

Each trainer module imports it under this name. Replaced there, it gives the models of that trainer
the fused forward, with TRL's own fused forward behind it for calls that are not supported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING

from ...models import forward
from ...models.forward import Request, ScoredBatch
from ...models.language_model import text_config
from ...models.layouts import Groups
from ...models.router import router_loss
from ...reasons import Reason
from .. import evidence
from ..protocol import PatchOptions
from ..replacements import Replacements
from ..signatures import signature_difference

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PARAMETERS = ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]
_STATISTICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
_OUTPUT_FIELDS = {"loss", "log_probs", "label_mask", "aux_loss", *_STATISTICS}

_leaves_models: ContextVar[bool] = ContextVar("fastdpo_leaves_models", default=False)


def unsupported_reason(module: ModuleType) -> Reason | None:
    """Returns how the function of a trainer module differs from the one that was tested, or None."""
    from trl.trainer import utils

    difference = signature_difference(module, "add_fused_lm_head", _PARAMETERS)
    if difference is not None:
        return difference
    fields = {field.name for field in dataclasses.fields(utils.FusedCausalLMOutput)}
    # Those that a newer version adds have defaults, as all have. A call whose output holds one is not fused.
    if fields != _OUTPUT_FIELDS and not (fields > _OUTPUT_FIELDS and evidence.is_newer(utils.FusedCausalLMOutput)):
        difference = f"FusedCausalLMOutput must have the fields {sorted(_OUTPUT_FIELDS)}; got {sorted(fields)}"
        return Reason("different-code", difference=difference)
    return None


def replace(
    replacements: Replacements,
    module: ModuleType,
    integration: str,
    options: PatchOptions,
    groups: Groups,
    kind_without_gradient: str = "reference",
    images: bool = False,
) -> None:
    """Replaces the function in a trainer module.

    Args:
        replacements: those of the trainer line.
        module: the module of the trainer.
        integration: name of the trainer, such as "trl.DPOTrainer".
        options: of `patch()`.
        groups: which rows of a batch may share what they begin with.
        kind_without_gradient, images: see `Request`.
    """
    stock = getattr(module, "add_fused_lm_head")  # noqa: B009

    @functools.wraps(stock)
    def add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",), *args, **kwargs):
        forward.uninstall(model)  # otherwise the fused forward of another trainer would stay inside TRL's
        stock(model, temperature, cast_lm_head_to_fp32, outputs, *args, **kwargs)  # some are of a newer TRL
        if _leaves_models.get():
            return
        request = Request(
            integration,
            role="policy" if len(outputs) > 1 else "reference",  # only the policy's statistics feed metrics
            kind_without_gradient=kind_without_gradient,
            outputs=tuple(name for name in outputs if name in _STATISTICS),
            temperature=temperature,
            float32_head=cast_lm_head_to_fp32,
            groups=groups,
            images=images,
            **options.of_forward(),
        )
        forward.install(model, request, functools.partial(_make_output, text_config(model)))

    replacements.put(module, "add_fused_lm_head", add_fused_lm_head)


@contextmanager
def leaving_models() -> Iterator[None]:
    """Leaves the models as TRL prepares them, for a trainer whose class bypasses the fused call."""
    token = _leaves_models.set(True)
    try:
        yield
    finally:
        _leaves_models.reset(token)


def _make_output(config: PretrainedConfig, scored: ScoredBatch, kwargs: dict) -> object:
    from trl.trainer.utils import FusedCausalLMOutput

    logps = scored.logps
    count = kwargs.get("num_items_in_batch")
    if count is None:
        count = scored.label_mask.sum().clamp(min=1)
    loss, aux_loss = -logps.logps.sum() / count, None
    if scored.router_logits is not None:
        aux_loss = router_loss(config, scored.router_logits, scored.multiplicity)
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=logps.logps,
        label_mask=scored.label_mask,
        aux_loss=aux_loss,
        **{name: getattr(logps, name) for name in _STATISTICS},
    )
