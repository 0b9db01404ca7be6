"""What TRL's GRPOTrainer and RLOOTrainer share: groups of completions, which share their prompt.

Both compute the log-probabilities of completions by `_get_per_token_logps_and_entropies`: those of
the policy with gradients, and, before a batch is trained on, those of the old policy and of the
reference. All of them are fused. The trainer shuffles the completions of all prompts, so rows of a
batch share a prompt if they have the same one, wherever they are.

Positions count from the first real token, as during generation. TRL passes no positions, so that
behind left padding a model with learned positions, such as GPT-2, sees other positions than those
that it generated with.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ...models.fallback import counting_calls_as
from ...reasons import Reason
from ..concatenated import option_reason
from ..protocol import PatchOptions
from ..replacements import Replacements
from ..signatures import first_difference
from . import fused_head
from .created_trainers import CreatedTrainers

_SCORES = "_get_per_token_logps_and_entropies"
_PARAMETERS = {
    "create_accelerator_and_postprocess": ["self"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    _SCORES: [
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ],
}
_PATH = ("compute_loss", "_compute_loss", _SCORES, "fused_lm_head")

DISABLING = ("use_liger_kernel", "use_transformers_continuous_batching", "use_transformers_paged")
"""Options that leave a trainer as it is.

Liger computes the loss from hidden states. The others generate with an attention that they select
by the name of the model's, which packing changes.
"""


class GroupLine:
    """The line of one of the two trainers, a `protocol.TrainerLine`.

    Args:
        integration: name of the trainer, such as "trl.GRPOTrainer".
        module: the module of the trainer.
    """

    def __init__(self, integration: str, module: str):
        self._integration, self._module_name = integration, module
        self._replacements = Replacements()
        self._trainers = CreatedTrainers(integration, _PATH)

    def unsupported_reason(self) -> Reason | None:
        """Returns how TRL differs from the versions that this module was tested with, or None."""
        module = self._module()
        return (
            first_difference(self.trainer_class(), _PARAMETERS)
            or first_difference(module, {"use_adapter": ["model", "adapter_name"]})
            or fused_head.unsupported_reason(module)
        )

    def trainer_class(self) -> type:
        return getattr(self._module(), self._integration.partition(".")[2])

    def enable(self, options: PatchOptions) -> None:
        stock_use_adapter: Any = getattr(self._module(), "use_adapter")  # noqa: B009

        @contextmanager
        def use_adapter(model, adapter_name, *args, **kwargs):
            """TRL makes a policy with adapters act as its own reference here, and nowhere else."""
            with counting_calls_as("reference"), stock_use_adapter(model, adapter_name, *args, **kwargs):
                yield

        self._replacements.put(self._module(), "use_adapter", use_adapter)
        fused_head.replace(
            self._replacements,
            self._module(),
            self._integration,
            options,
            groups="prompts",
            kind_without_gradient="old_policy",
        )
        self._trainers.watch(self._replacements, self.trainer_class(), disabled_reason=_disabled_reason)

    def disable(self) -> None:
        self._replacements.undo()
        self._trainers.discard_states()

    def _module(self) -> ModuleType:
        return importlib.import_module(self._module_name)


def _disabled_reason(arguments: dict[str, Any]) -> Reason | None:
    return option_reason(arguments.get("args"), DISABLING)
