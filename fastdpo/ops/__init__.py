"""The parts: log-probabilities from logits or from hidden states, packed attention, and the packing itself.

Each op is a `torch.autograd.Function` over two custom ops (`torch.ops.fastdpo.*`), so that it differentiates, compiles
with `fullgraph=True` and keeps its hands on its own memory. What an op means is in `fastdpo.ops.reference`.
"""

from ..packing import IGNORE_INDEX, Layout, NotPackable, pack, pack_pairs
from . import reference
from .linear_logps import MEMORY_BUDGET, linear_logps
from .packed_attention import packed_attention
from .results import SequenceLogps, TokenLogps
from .sequence_logps import linear_sequence_logps, sequence_logps
from .token_logps import token_logps

__all__ = [
    "IGNORE_INDEX",
    "MEMORY_BUDGET",
    "Layout",
    "NotPackable",
    "SequenceLogps",
    "TokenLogps",
    "linear_logps",
    "linear_sequence_logps",
    "pack",
    "pack_pairs",
    "packed_attention",
    "reference",
    "sequence_logps",
    "token_logps",
]
