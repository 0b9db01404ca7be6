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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from ...models.calls import counting_calls_as
from ...reasons import Reason
from ..line import option_reason
from .fused_head import FusedHeadLine

_SCORES = "_get_per_token_logps_and_entropies"
_PARAMETERS = {
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    _SCORES: [
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        *("compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask"),
        *("spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    ],
}

DISABLING = ("use_liger_kernel", "use_transformers_continuous_batching", "use_transformers_paged")
"""Options that leave a trainer as it is.

Liger computes the loss from hidden states. The others generate with an attention that they select
by the name of the model's, which packing changes.
"""


class GroupLine(FusedHeadLine):
    """The line of one of the two trainers."""

    parameters = _PARAMETERS
    module_parameters = MappingProxyType({"use_adapter": ["model", "adapter_name"]})
    module_replaced = ("add_fused_lm_head", "use_adapter")
    path = ("compute_loss", "_compute_loss", _SCORES, "fused_lm_head")
    groups = "prompts"
    kind_without_gradient = "old_policy"

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        return option_reason(arguments.get("args"), DISABLING)

    @contextmanager
    def use_adapter(
        self, stock: Callable, model: Any, adapter_name: str | None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """TRL makes a policy with adapters act as its own reference here, and nowhere else."""
        with counting_calls_as("reference"), stock(model, adapter_name, *args, **kwargs):
            yield
