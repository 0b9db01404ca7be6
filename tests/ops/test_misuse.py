"""Arguments that do not fit together, and errors with advice: each names argument, rule and what came.

`tests/test_malformed.py` gives each argument alone everything that it must not be.
"""

import pytest
import torch
import torch.distributed as dist
from torch import ones, tensor, zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastdpo import ops
from fastdpo.ops import PreferenceObjective, pack, pack_pairs
from fastdpo.packing import NotPackable

LOGITS, TARGETS = zeros(3, 5), zeros(3, dtype=torch.long)
HEAD = dict(hidden=zeros(3, 4), weight=zeros(5, 4), targets=TARGETS)
ROWS = tensor([[0, 0, 0, 3], [0, 2, 3, 1]], dtype=torch.int32)
IDS = ones(2, 4, dtype=torch.long)
TWO, FOUR = zeros(2), zeros(4)
BATCH = ("input_ids", "attention_mask", "labels")
LOGPS = ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
RIGHT = {  # a function: arguments of a call that is right
    ops.linear_logps: HEAD,
    ops.sequence_logps: dict(logits=LOGITS, targets=TARGETS, cu_seqlens=tensor([0, 2, 3])),
    ops.linear_preference_loss: HEAD | dict(ref_chosen_logps=TWO, ref_rejected_logps=TWO),
    ops.packed_attention: dict(query=zeros(4, 4, 8), key=zeros(4, 2, 8), value=zeros(4, 2, 8), rows=ROWS),
    ops.preference_loss: dict.fromkeys(LOGPS, FOUR),
    PreferenceObjective: {},
    pack: dict.fromkeys(BATCH, IDS),
    pack_pairs: {},
}
NO_MASK = "attention_mask must be bool, int, or floating point with values 0 and 1; got another value"
WRONG = {  # a function: the message behind its name, as a pattern, and what is wrong
    ops.linear_logps: {
        r"weight must be .*ZeRO-3.* got \[0\]": dict(weight=zeros(0)),  # its placeholder
        r"weight must be .*FSDP.* got \[20\]": dict(weight=zeros(20)),  # its flat shard
        r"hidden must be \[N, D\], D > 0; got \[3, 0\]": dict(hidden=zeros(3, 0), weight=zeros(5, 0)),
    },
    ops.sequence_logps: {r"logits must be \[B, L, V\] without cu_seqlens; got \[3, 5\]": dict(cu_seqlens=None)},
    ops.linear_preference_loss: {r"cu_seqlens must be \[2P \+ 1\], P > 0; got \[1\]": dict(cu_seqlens=tensor([0]))},
    ops.packed_attention: {
        "key .*torch.float32.* got .*torch.float16": dict(key=zeros(4, 2, 8).half()),
        ".*value .*torch.float32.* got .*torch.float16": dict(value=zeros(4, 2, 8).half()),
        "key must .*heads.* 4; got 3": dict(key=zeros(4, 3, 8)),
        "key must .*heads.* 4; got 0": dict(key=zeros(4, 0, 8), value=zeros(4, 0, 8)),
        r"query must be \[T, H, D\], H > 0, D > 0; got \[4, 0, 8\]": dict.fromkeys(
            ("query", "key", "value"), zeros(4, 0, 8)
        ),
    },
    ops.preference_loss: {
        "chosen_lengths must be given for the loss sft; got None": dict(objective=PreferenceObjective("sft")),
        "chosen_lengths must be given for the loss ipo; got None": dict(objective=PreferenceObjective("ipo")),
        "rejected_lengths must be given for the loss sigmoid_norm; got None": dict(
            objective=PreferenceObjective("sigmoid_norm"), chosen_lengths=FOUR.long()
        ),
        "weights must be None with aot and aot_unpaired, which sort; got weights of pairs": dict(
            objective=PreferenceObjective(("sigmoid", "aot")), weights=FOUR
        ),
    },
    PreferenceObjective: {
        "label_smoothing must be 0 without one of exo_pair, robust, aot": dict(label_smoothing=0.1),
        "label_smoothing must be above 0 for exo_pair; got 0.0": dict(loss_type="exo_pair"),
        "f_divergence_type must be reverse_kl with bco_pair, aot; got forward_kl": dict(
            loss_type=("sigmoid", "bco_pair", "aot"), f_divergence_type="forward_kl"
        ),
    },
    pack: {
        NO_MASK: dict(attention_mask=IDS / 0 * 0),
        f"{NO_MASK}$": dict(attention_mask=IDS * -1e9),  # to be added to scores
        """groups must be a tensor, "content", "pairs" or None; got 'halves'""": dict(groups="halves"),
        'input_ids must have an even number of rows for groups="pairs"; got 1': dict.fromkeys(BATCH, IDS[:1])
        | dict(groups="pairs"),
    },
    pack_pairs: {"input_ids must have an even number of rows; got 1": dict.fromkeys(BATCH, IDS[:1])},
}
CASES = [
    pytest.param(function, message, wrong, id=f"{function.__name__}: {message}")
    for function, cases in WRONG.items()
    for message, wrong in cases.items()
]


@pytest.mark.parametrize(("function", "message", "wrong"), CASES)
def test_misuse_raises(function, message, wrong):
    name = "preference_loss" if function is PreferenceObjective else function.__name__
    with torch.device("cpu"), pytest.raises((TypeError, ValueError), match=f"^{name}: {message}") as caught:
        function(**RIGHT[function] | wrong)
    assert not isinstance(caught.value, NotPackable)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (ops.linear_logps, ("hidden", "weight", "targets")),
        (ops.sequence_logps, ("logits", "targets")),
        (ops.packed_attention, ("query", "key", "value", "rows")),
        (pack, BATCH),
    ],
)
def test_a_sharded_tensor_raises(function, arguments):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        right = RIGHT[function]
        for name in arguments:
            sharded = distribute_tensor(right[name], init_device_mesh("cpu", (1,)), [Shard(0)])
            with pytest.raises(ValueError, match=rf"^\w+: {name} must be a whole tensor.*full_tensor.*DTensor"):
                function(**right | {name: sharded})
    finally:
        dist.destroy_process_group()
