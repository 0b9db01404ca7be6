"""The parts: log-probabilities from logits or from hidden states, packed attention, the packing itself, and the losses.

Each op is a `torch.autograd.Function` over two custom ops (`torch.ops.fastdpo.*`), so that it differentiates, compiles
with `fullgraph=True` and keeps its hands on its own memory. What an op means is in `fastdpo.ops.reference`. The losses
are plain PyTorch over [P] log-probabilities: they are their own definition.
"""

from ..packing import IGNORE_INDEX, Layout, NotPackable, pack, pack_pairs
from . import reference
from .linear_logps import MEMORY_BUDGET, linear_logps
from .packed_attention import packed_attention
from .preference_loss import (
    PreferenceLoss,
    PreferenceObjective,
    length_desensitized_logps,
    preference_loss,
    wpo_weights,
)
from .results import SequenceLogps, TokenLogps
from .sequence_logps import linear_sequence_logps, sequence_logps
from .token_logps import token_logps

__all__ = [
    "IGNORE_INDEX",
    "MEMORY_BUDGET",
    "Layout",
    "NotPackable",
    "PreferenceLoss",
    "PreferenceObjective",
    "SequenceLogps",
    "TokenLogps",
    "length_desensitized_logps",
    "linear_logps",
    "linear_sequence_logps",
    "pack",
    "pack_pairs",
    "packed_attention",
    "preference_loss",
    "reference",
    "sequence_logps",
    "token_logps",
    "wpo_weights",
]
