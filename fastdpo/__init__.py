"""fastdpo: DPO training with packed batches, shared prompts and a fused LM head, and the same numbers.

`fastdpo.patch()` patches the trainers that are installed. For custom training loops, `fastdpo.ops` has the
parts, `fastdpo.attention` switches a transformers model to packed attention, `fastdpo.ref_logps` computes
reference log-probabilities, and `fastdpo.metrics` has means that are exact over all ranks.
"""

from . import metrics, ops
from .integrations.patching import PatchError, PatchReport, Seam, patch, patched, unpatch
from .models import attention
from .models.fallback import NotFused, calls
from .models.verification import VerificationError

__version__ = "0.1.0"

__all__ = [
    "NotFused",
    "PatchError",
    "PatchReport",
    "Seam",
    "VerificationError",
    "attention",
    "calls",
    "metrics",
    "ops",
    "patch",
    "patched",
    "unpatch",
]
