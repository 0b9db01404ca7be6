"""The definition of every op: eager PyTorch for any dtype and device, a few lines each.

The tests compare each op with these definitions: in float64 they are the exact values, and in the
op's dtype they give the error of plain PyTorch. They are neither fast nor memory-efficient. The
library calls them to check itself, and for gradients that are differentiated again.
"""

from .attention.definitions import packed_attention
from .head.definitions import linear_logps, token_logps
from .losses.definitions import linear_sequence_logps, sequence_logps

__all__ = ["linear_logps", "linear_sequence_logps", "packed_attention", "sequence_logps", "token_logps"]
