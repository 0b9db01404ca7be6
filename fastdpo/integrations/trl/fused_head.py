"""The functions of models that TRL's trainer modules import since TRL 1.15. They are replaced there.

`add_fused_lm_head`, by which trainers prepare their models, gives them the fused forward, with TRL's own fused forward
behind it for calls that are not supported. What trainers ask about a model in every step, `is_peft_model` and
`disable_gradient_checkpointing`, is answered without a walk over its modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from ...models import forward
from ...models.identity.functions import closure_contents, inner_function, module_of
from ...models.parts import is_transformers_model, text_config
from ...models.scoring import router_loss
from ...models.state import MODELS, MakeOutput, ScoredBatch, state_of
from ..line import TrainerLine
from ..replacements import temporarily

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_STATISTICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_PARAMETERS = {
    ":add_fused_lm_head": ["model", "temperature", "cast_lm_head_to_fp32", "outputs"],
    # A call whose output holds a field that a newer version has added falls back.
    "trl.trainer.utils:FusedCausalLMOutput.__init__": [
        *("self", "loss", "log_probs", *_STATISTICS, "label_mask", "aux_loss"),
    ],
}


class FusedHeadLine(TrainerLine):
    """A trainer that prepares its models by `add_fused_lm_head`, which its module imports.

    Attributes:
        kind_without_gradient: the kind that calls of the policy without gradients are counted as (see
            `ForwardOptions`), as are `images`.
    """

    kind_without_gradient: ClassVar[str] = "policy"
    images: ClassVar[bool] = False

    def expected_parameters(self) -> dict[str, list[str]]:
        return {**_PARAMETERS, **super().expected_parameters()}

    def replace(self) -> None:
        self.replacements.wrap(self.module(), "add_fused_lm_head", self.add_fused_lm_head)
        for function in (is_peft_model, disable_gradient_checkpointing):
            if hasattr(self.module(), function.__name__):
                self.replacements.wrap(self.module(), function.__name__, function)
        super().replace()  # around these

    def install(self, trainer: Any, role: str, model: nn.Module, base: PreTrainedModel) -> None:
        """Does nothing before TRL has given the model to `add_fused_lm_head`, which models of rewards never are."""
        if role == "reward":
            super().install(trainer, role, model, base)
        head = head_of_trl(base)
        if head is not None:
            self._install_head(trainer, base, *head)

    def add_fused_lm_head(
        self,
        stock: Callable,
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: Sequence[str] = ("log_probs",),
        *args: Any,  # of a newer TRL, as everywhere in these lines
        **kwargs: Any,
    ) -> None:
        # The models of a trainer that is left unpatched stay as TRL prepares them.
        is_fused = self.creating is None or self.state_of(self.creating) is not None
        if is_fused:
            model = getattr(model, "_orig_mod", model)  # TRL would give its head to the wrapper of torch.compile
        forward.uninstall(model)  # otherwise the fused forward of another trainer would stay inside TRL's
        stock(model, temperature, cast_lm_head_to_fp32, outputs, *args, **kwargs)
        if is_fused:
            self._install_head(self.creating, model, temperature, cast_lm_head_to_fp32, outputs)

    def _install_head(
        self, trainer: Any, model: Any, temperature: float, float32: bool, outputs: Sequence[str]
    ) -> None:
        role = "policy" if len(outputs) > 1 else "reference"  # only the policy's statistics feed metrics
        options = self.request(trainer, role)._replace(
            kind_without_gradient=self.kind_without_gradient,
            outputs=tuple(name for name in outputs if name in _STATISTICS),
            temperature=temperature,
            float32_head=float32,
            images=self.images,
        )
        self.install_options(model, options, prior_scores=True)

    def make_output(self, model: Any) -> MakeOutput:
        return functools.partial(_make_output, text_config(model))


def head_of_trl(model: PreTrainedModel) -> list[Any] | None:
    """The temperature, whether the head computes in float32, and the outputs with which TRL has prepared a model."""
    for function in map(inner_function, forward.forwards_below(model)):
        if module_of(function) == "trl.trainer.utils":
            found = dict(zip(function.__code__.co_freevars, closure_contents(function), strict=True))
            names = _PARAMETERS[":add_fused_lm_head"][1:]
            return [found[name] for name in names] if found.keys() >= {*names} else None
    return None


def _make_output(config: PretrainedConfig, scored: ScoredBatch, kwargs: dict) -> object:
    from trl.trainer.utils import FusedCausalLMOutput

    count, aux_loss = kwargs.get("num_items_in_batch"), router_loss(config, scored)
    if count is None:
        count = scored.label_mask.sum().clamp(min=1)
    tokens = scored.logps
    loss = -tokens.logps.sum() / count
    if aux_loss is not None:
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=tokens.logps,
        label_mask=scored.label_mask,
        aux_loss=aux_loss,
        **{name: getattr(tokens, name) for name in _STATISTICS},
    )


def is_peft_model(stock: Callable, model: Any) -> bool:
    """What accelerate returns, by the class of a model that no engine has wrapped.

    accelerate parses the metadata of PEFT and walks all modules.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return True
    is_fused = isinstance(model, nn.Module) and state_of(model) is not None
    return not (is_fused or is_transformers_model(model)) and stock(model)


@contextmanager
def disable_gradient_checkpointing(stock: Callable, model: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """TRL's context. To enable checkpointing again, transformers would visit all modules and add one more hook to the
    embeddings in every step, for which a compiled model is compiled again.
    """
    base = next((x for x in model.modules() if x in MODELS), None)
    fused = state_of(base)
    with ExitStack() as stack:
        if base is None or fused is None or fused.unsupported_reason() is not None:
            stack.enter_context(stock(model, *args, **kwargs))
        else:
            for layer in fused.structure.modules_of(base, "gradient_checkpointing"):
                if layer.gradient_checkpointing:
                    stack.enter_context(temporarily(layer, gradient_checkpointing=False))
        yield
