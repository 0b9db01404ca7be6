"""Ops for custom training loops: log-probabilities, attention, packing, preference losses.

Every op with kernels is a `torch.autograd.Function` over two custom ops (`torch.ops.fastdpo.*`),
one for the forward and one for the backward. It is differentiable, compiles with `fullgraph=True`
and controls its own memory. `fastdpo.ops.definitions` defines each of these ops in plain PyTorch. The
losses are plain PyTorch over log-probabilities [P] and serve as their own definition.
"""

from ..packing import IGNORE_INDEX, Layout, NotPackable, pack, pack_pairs
from . import definitions
from .attention.packed_attention import packed_attention
from .head.linear_logps import MEMORY_BUDGET, linear_logps
from .head.results import SequenceLogps, TokenLogps
from .head.token_logps import token_logps
from .losses.linear_preference_loss import linear_preference_loss
from .losses.objectives import PreferenceObjective
from .losses.preference_loss import PreferenceLoss, preference_loss
from .losses.sequence_logps import linear_sequence_logps, sequence_logps

__all__ = [
    "IGNORE_INDEX",
    "MEMORY_BUDGET",
    "Layout",
    "NotPackable",
    "PreferenceLoss",
    "PreferenceObjective",
    "SequenceLogps",
    "TokenLogps",
    "definitions",
    "linear_logps",
    "linear_preference_loss",
    "linear_sequence_logps",
    "pack",
    "pack_pairs",
    "packed_attention",
    "preference_loss",
    "sequence_logps",
    "token_logps",
]
