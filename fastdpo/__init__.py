"""fastdpo: packed, prompt-sharing, fused-head DPO training. The same numbers, several times faster.

`fastdpo.patch()` enters the trainers that are installed. For loops of one's own `fastdpo.ops` are the parts, and
`fastdpo.metrics` are means that are exact over all ranks.
"""

from . import metrics, ops
from .integrations.fused_forward import NotFused, calls
from .integrations.patching import PatchError, PatchReport, Seam, patch, patched, unpatch

__version__ = "0.1.0"

__all__ = ["NotFused", "PatchError", "PatchReport", "Seam", "calls", "metrics", "ops", "patch", "patched", "unpatch"]
