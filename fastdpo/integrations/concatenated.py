"""Trainers that score the chosen and the rejected rows of a batch in one call of the model, in a
function of their own named `concatenated_forward`.

TRL's preference trainers did so before their rewrite, and so do the programs that have subclassed
them. The patched function gives the model a padded batch with labels, and gets per-token results
instead of logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from ..models import forward
from ..models.forward import Request, ScoredBatch
from ..models.language_model import text_config
from ..models.layouts import Groups
from ..models.router import router_loss
from ..reasons import Reason
from .protocol import PatchOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = dict[str, Any]
"""Arguments of a model call: `input_ids`, `attention_mask` and `labels`, [2B, L] each, chosen rows
first, and options such as `output_router_logits`.
"""

T = TypeVar("T")


def install(
    models: Iterable[tuple[str, PreTrainedModel]],
    integration: str,
    options: PatchOptions,
    statistics: tuple[str, ...] = ("mean_logits",),
    *,
    groups: Groups = "content",
    make_output: Callable[[Any, ScoredBatch, dict], Any] | None = None,
) -> None:
    """Makes models return per-token results when `score` calls them.

    Args:
        models: role and causal LM of each model.
        integration: name of the trainer, such as "trl.DPOTrainer".
        options: of `patch()`.
        statistics: of each token, next to its log-probability; only the policy's feed metrics.
        groups: which rows of a batch may share what they begin with.
        make_output: makes the output from the model's configuration, a scored batch and the
            arguments of the call. Default: the results that `score` describes.
    """
    for role, model in models:
        request = Request(
            integration,
            role,
            outputs=statistics if role == "policy" else (),
            groups=groups,
            **options.of_forward(),
        )
        forward.install(
            model, request, functools.partial(make_output or results_of, text_config(model)), prior_scores=False
        )


def score(
    model: Any,
    integration: str,
    inputs: Inputs | Reason,
    results: Callable[[Inputs, dict[str, Tensor]], T],
    stock: Callable[[Callable], T],
) -> T:
    """Calls a model once and returns what the trainer computes from it.

    Args:
        model: with `install` called on it, or on a model inside of it.
        integration: name of the trainer.
        inputs: of the model, or the reason why the batch is not supported.
        results: computes the return value from the inputs and the per-token results: `log_probs`
            and statistics of the token after each position, [2B, L-1] each, and `aux_loss` if the
            call asked for router logits.
        stock: the trainer's own function of a model. If the call fell back, it is given a function
            that returns the output of that call, with logits.
    """
    if isinstance(inputs, Reason):
        forward.record_fallback(model, integration, inputs)
        return stock(model)
    output = model(**inputs, fused_lm_head=True)
    if "log_probs" in output:
        return results(inputs, output)
    return stock(lambda *args, **kwargs: output)


def liger_reason(config: Any) -> Reason | None:
    """Why a trainer with this configuration cannot be fused: Liger replaces its head or its loss."""
    return option_reason(config, ("use_liger_loss", "use_liger_kernel"))


def option_reason(config: Any, options: Iterable[str]) -> Reason | None:
    """Why a trainer with this configuration cannot be fused: the first of these options that is set."""
    set_ones = (name for name in options if getattr(config, name, False))
    return next((Reason("incompatible-option", option=name) for name in set_ones), None)


def results_of(config: Any, scored: ScoredBatch, kwargs: dict) -> dict[str, Tensor]:
    """The per-token results that `score` describes."""
    output = {"log_probs": scored.logps.logps}
    output |= {name: x for name, x in scored.logps._asdict().items() if name != "logps" and x is not None}
    if scored.router_logits is not None:
        output["aux_loss"] = router_loss(config, scored.router_logits, scored.multiplicity)
    return output
