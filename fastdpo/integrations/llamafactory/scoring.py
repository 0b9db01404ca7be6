"""How the preference trainers of LLaMA-Factory score rows, and log what they have scored.

They derive from TRL's trainers, but replace `__init__` and all functions that call a model. Their
models therefore get the fused forward at the beginning of `__init__`, before accelerate and
DeepSpeed wrap them.

LLaMA-Factory averages its metrics `logits/*` over all positions of the padded batch. Prompts and
padding are not scored here, so those of a fused model are means over completions, and are logged as
`completion_logits/*`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...models import forward
from ...models.functions import module_of
from ...models.layouts import Groups
from ...models.wrapped import base_of
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from .. import concatenated
from ..bypass import leave_unpatched, left_unpatched, report_if_unused
from ..last_result import LastResult
from ..protocol import STATE, PatchOptions
from ..replacements import Replacements
from ..signatures import first_difference

if TYPE_CHECKING:
    from transformers import Trainer

INPUTS = ("input_ids", "attention_mask", "labels")

_PARAMETERS = {
    "__init__": ["self", "model", "ref_model", "finetuning_args", "processor", "disable_dropout", "kwargs"],
    "log": ["self", "logs", "args", "kwargs"],
}
_OWN_STATE = "_fastdpo_llamafactory_state"
_KERNELS = {
    "liger_kernel": "Liger",
    "unsloth": "Unsloth",
    "unsloth_compiled_cache": "Unsloth",
    "kt_kernel": "KTransformers",
}


@dataclass(eq=False)
class ScoringState:
    """The state of a trainer that was created after `patch()`.

    Attributes:
        has_logged: whether the trainer has logged a training step.
        has_fused: whether a call of one of its models has been fused.
        merged: the rows of the last batch whose parts were merged.
        outputs: the model's outputs for the parts of a merged batch, while the trainer reads them.
    """

    has_logged: bool = False
    has_fused: bool = False
    merged: LastResult[dict[str, Tensor]] = field(default_factory=LastResult)
    outputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class ScoringLine:
    """What the lines of LLaMA-Factory's trainers have in common.

    Args:
        integration: name of the trainer, such as "llamafactory.DPOTrainer".
        groups: which rows of a batch may share what they begin with.
        path: the functions that lead to the fused call, for `bypass`.
        parameters: names of parameters of the functions that the line replaces.
    """

    def __init__(self, integration: str, groups: Groups, path: tuple[str, ...], parameters: dict[str, list[str]]):
        self.integration = integration
        self.replacements = Replacements()
        self._groups: Groups = groups
        self._path, self._parameters = path, parameters
        self._trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()

    def unsupported_reason(self, stock: type) -> Reason | None:
        """Returns how a trainer class differs from the one that was tested, or None."""
        return first_difference(stock, {**_PARAMETERS, **self._parameters})

    def enable(self, stock: type, options: PatchOptions) -> None:
        """Replaces `__init__` and `log` of a trainer class."""
        stock_init, stock_log = (getattr(stock, name) for name in ("__init__", "log"))

        @functools.wraps(stock_init)
        def __init__(trainer, *args, **kwargs):
            self._trainers.add(trainer)
            if not left_unpatched(trainer, self.integration, stock, self._path):
                vars(trainer)[STATE] = None  # that of TRL's trainer, whose functions are not called
                self._prepare(trainer, inspect.signature(stock_init).bind(trainer, *args, **kwargs).arguments, options)
            stock_init(trainer, *args, **kwargs)

        @functools.wraps(stock_log)
        def log(trainer, logs, *args, **kwargs):
            state = self.state_of(trainer)
            if state is not None and "loss" in logs and not state.has_logged:
                state.has_logged = True
                report_if_unused(trainer, self.integration, trainer.model)
            if state is None or not state.has_fused:
                stock_log(trainer, logs, *args, **kwargs)
                return
            renamed = _RenamedLogits(logs)
            stock_log(trainer, renamed, *args, **kwargs)
            logs.update(renamed)

        self.replacements.put(stock, "__init__", __init__)
        self.replacements.put(stock, "log", log)

    def disable(self) -> None:
        self.replacements.undo()
        for trainer in list(self._trainers):
            for name in (STATE, _OWN_STATE):
                vars(trainer).pop(name, None)
        self._trainers.clear()

    def state_of(self, trainer: Any) -> ScoringState | None:
        """The state of a trainer, or None for one that is not patched."""
        return vars(trainer).get(_OWN_STATE)

    def output_of(self, trainer: Any, model: nn.Module, inputs: dict[str, Any], others: set[str]) -> Any:
        """The output of a model for rows [R, L].

        Args:
            trainer: the trainer.
            model: its policy or its reference.
            inputs: the model's arguments, with the labels of all rows.
            others: names of further inputs in the batch, which are not supported.

        Returns:
            `log_probs` and `mean_logits` [R, L-1] of the token after each position; or an output
            with `logits` [R, L, V], if the call has fallen back; or None, if the trainer is to call
            the model.
        """
        state = self.state_of(trainer)
        if state is None or not forward.is_installed(model, self.integration):
            return None
        if others:
            reason = Reason("batch-entries", names=", ".join(sorted(others)))
            forward.record_fallback(model, self.integration, reason)
            return None
        output = model(**inputs, return_dict=True, use_cache=False, fused_lm_head=True)
        state.has_fused |= "log_probs" in output
        return output

    def _prepare(self, trainer: Any, arguments: dict[str, Any], options: PatchOptions) -> None:
        """Installs the fused forward on the models that a trainer is created with."""
        policy, reference = arguments["model"], arguments["ref_model"]
        models = {"policy": policy} if reference in (None, policy) else {"policy": policy, "reference": reference}
        reason = _replaced_kernels(arguments.get("kwargs", {}).get("args"), *models.values())
        if reason is not None:
            leave_unpatched(trainer, self.integration, reason)
            return
        vars(trainer)[_OWN_STATE] = ScoringState()
        bases = ((role, base_of(model, self.integration)) for role, model in models.items())
        concatenated.install(bases, self.integration, options, statistics=("mean_logits",), groups=self._groups)


def scored_tokens(labels: Tensor, logps: Tensor) -> Tensor:
    """bool [R, L-1], where the next token is scored, on the device of log-probabilities."""
    return (labels[:, 1:] != IGNORE_INDEX).to(logps.device)


def mean_logits_of(logits: Tensor) -> Tensor:
    """`mean_logits` [R, L-1] from logits [R, L, V]."""
    return logits[:, :-1].detach().mean(-1)


class _RenamedLogits(dict):
    """Logs in which metrics `logits/*` get another name when they are added."""

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name.replace("logits/", "completion_logits/"), value)


def _replaced_kernels(args: Any, *models: nn.Module) -> Reason | None:
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
