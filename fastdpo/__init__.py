"""fastdpo: packed, prompt-sharing, fused-head DPO training. The same numbers, several times faster.

`fastdpo.patch()` enters the trainers that are installed; `fastdpo.ops` are the parts, for loops of one's own.
"""

from . import ops
from .integrations.fused_forward import NotFused, calls
from .integrations.patching import PatchError, PatchReport, Seam, patch, patched, unpatch

__version__ = "0.1.0"

__all__ = ["NotFused", "PatchError", "PatchReport", "Seam", "calls", "ops", "patch", "patched", "unpatch"]
