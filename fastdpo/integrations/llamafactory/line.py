"""How the preference trainers of LLaMA-Factory score rows, and log what they have scored.

They derive from TRL's trainers, but replace `__init__` and all functions that call a model. Their
models therefore get the fused forward at the beginning of `__init__`, before accelerate and
DeepSpeed wrap them.

LLaMA-Factory averages its metrics `logits/*` over all positions of the padded batch. Prompts and
padding are not scored here, so those of a fused model are means over completions, and are logged as
`completion_logits/*`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ...models import forward
from ...models.examine.support import wrapping_reason
from ...models.identity.functions import module_of
from ...models.parts import base_of
from ...reasons import Reason
from ..admission.signatures import arguments_of
from ..line import TrainerLine
from ..scored_rows import ScoredRows

INPUTS = ("input_ids", "attention_mask", "labels")

_KERNELS = dict(liger_kernel="Liger", unsloth="Unsloth", unsloth_compiled_cache="Unsloth", kt_kernel="KTransformers")
"""By the packages of their code, what replaces modules of a model."""


class FactoryLine(TrainerLine):
    """What the lines of LLaMA-Factory's trainers have in common."""

    logged = ("mean_logits",)

    parameters = MappingProxyType(
        {"__init__": ["self", "model", "ref_model", "finetuning_args", "processor", "disable_dropout", "kwargs"]}
    )

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return replaced_kernels(arguments.get("args"), *_models(arguments).values())

    def init(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        for role, model in _models(arguments_of(stock, trainer, *args, **kwargs)).items():
            self.install(trainer, role, model, base_of(model, self.name))
        stock(trainer, *args, **kwargs)

    def log(self, stock: Callable, trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if not self.state_of(trainer).has_fused:
            stock(trainer, logs, *args, **kwargs)
            return
        renamed = _RenamedLogits(logs)
        stock(trainer, renamed, *args, **kwargs)
        logs.update(renamed)

    def output_of(self, trainer: Any, model: nn.Module, inputs: dict[str, Any], others: set[str]) -> Any:
        """The output of a model for rows [R, L].

        Args:
            trainer: the trainer.
            model: its policy or its reference.
            inputs: the model's arguments, with the labels of all rows.
            others: names of further inputs in the batch, which are not supported.

        Returns:
            The scored rows; or an output with `logits` [R, L, V], if the call has fallen back; or
            None, if the trainer is to call the model.
        """
        if not self.fuses(trainer, model):
            return None
        if others:
            reason = Reason("batch-entries", names=", ".join(sorted(others)))
            forward.record_fallback(model, self.name, reason)
            return None
        output = model(**inputs, return_dict=True, use_cache=False, fused_lm_head=wrapping_reason(model) or True)
        self.state_of(trainer).has_fused |= isinstance(output, ScoredRows)
        return output


def _models(arguments: dict[str, Any]) -> dict[str, nn.Module]:
    """The models that a trainer is created with, by role."""
    policy, reference = arguments["model"], arguments["ref_model"]
    return {"policy": policy} if reference in (None, policy) else {"policy": policy, "reference": reference}


def mean_logits_of(logits: Tensor) -> Tensor:
    """`mean_logits` [R, L-1] from logits [R, L, V]."""
    return logits[:, :-1].detach().mean(-1)


class _RenamedLogits(dict):
    """Logs in which metrics `logits/*` get another name when they are added."""

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name.replace("logits/", "completion_logits/"), value)


def replaced_kernels(args: Any, *models: nn.Module) -> Reason | None:
    """Returns which package has replaced modules of the models or is about to, or None."""
    if getattr(args, "use_liger_kernel", False):
        return Reason("incompatible-option", option="use_liger_kernel")
    for model in models:
        kinds = {type(module) for module in model.modules()}
        owners = {owner for kind in kinds for owner in (kind.__module__, module_of(kind.forward))}
        names = sorted({_KERNELS[owner] for owner in (x.partition(".")[0] for x in owners) if owner in _KERNELS})
        if names:
            return Reason("replaced-kernels", package=names[0], model=type(base_of(model, "llamafactory")).__name__)
    return None
