"""Wrong arguments of the ops: the error says which argument, what it must be, and what it is.

`tests/test_malformed.py` gives each argument everything that it must not be, and reads its name only.
"""

import pytest
import torch
import torch.distributed as dist
from torch import full, ones, tensor, zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastdpo import ops
from fastdpo.ops import PreferenceObjective, pack, pack_pairs
from fastdpo.packing import NotPackable

NAN, INF = float("nan"), float("inf")
LOGITS, TARGETS, BOUNDS = zeros(3, 5), zeros(3, dtype=torch.long), tensor([0, 2, 3])
HEAD = dict(hidden=zeros(3, 4), weight=zeros(5, 4), targets=TARGETS)
ROWS = tensor([[0, 0, 0, 3], [0, 2, 3, 1]], dtype=torch.int32)
IDS = ones(2, 4, dtype=torch.long)
TWO, FOUR, PAIRS = zeros(2), zeros(4), zeros(4, 3)
LOGPS = ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
RIGHT = {  # a function: arguments of a call that is right
    ops.token_logps: dict(logits=LOGITS, targets=TARGETS),
    ops.linear_logps: HEAD,
    ops.sequence_logps: dict(logits=LOGITS, targets=TARGETS, cu_seqlens=BOUNDS),
    ops.linear_sequence_logps: HEAD | dict(cu_seqlens=BOUNDS),
    ops.linear_preference_loss: HEAD
    | dict(cu_seqlens=tensor([0, 1, 2, 2, 3]), ref_chosen_logps=TWO, ref_rejected_logps=TWO),
    ops.packed_attention: dict(query=zeros(4, 4, 8), key=zeros(4, 2, 8), value=zeros(4, 2, 8), rows=ROWS),
    ops.preference_loss: dict.fromkeys(LOGPS, FOUR),
    PreferenceObjective: {},
    ops.length_desensitized_logps: dict(logps=PAIRS, mask=ones(4, 3), ld_alpha=0.5),
    ops.wpo_weights: dict(logps=PAIRS, log_sum_sq_probs=PAIRS, mask=ones(4, 3)),
    pack: dict(input_ids=IDS, attention_mask=IDS, labels=IDS),
    pack_pairs: dict(input_ids=IDS, attention_mask=IDS, labels=IDS),
}


def rows(*values):
    return dict(rows=tensor(values, dtype=torch.int32))


def batch(ids):
    return dict(input_ids=ids, attention_mask=ids, labels=ids)


WRONG_TYPES = {  # a function: the message behind its name, as a pattern, and the argument that is wrong
    ops.token_logps: {
        "logits must be float16, bfloat16, .* got torch.int64": dict(logits=LOGITS.long()),
        "targets must be int32 or int64; got torch.float32": dict(targets=TARGETS.float()),
    },
    ops.linear_logps: {
        "hidden must be float16, .* got torch.int64": dict(hidden=zeros(3, 4).long()),
        "weight must be float16, .* got torch.int32": dict(weight=zeros(5, 4).int()),
        "bias must be float16, .* got torch.bool": dict(bias=zeros(5).bool()),
        "targets must be int32 or int64; got torch.float32": dict(targets=zeros(3)),
    },
    ops.sequence_logps: {
        "cu_seqlens must be int32 or int64; got torch.float32": dict(cu_seqlens=BOUNDS.float()),
    },
    ops.packed_attention: {
        "query must be float16, .* got torch.int32": dict(query=zeros(4, 4, 8).int()),
        "key .*torch.float32.* got .*torch.float16": dict(key=zeros(4, 2, 8).half()),
        ".*value .*torch.float32.* got .*torch.float16": dict(value=zeros(4, 2, 8).half()),
        "rows must be int32; got torch.int64": dict(rows=ROWS.long()),
        "window must be an int or None; got 2.5": dict(window=2.5),
        "sinks must be float16, .* got torch.int32": dict(sinks=zeros(4).int()),
    },
    ops.preference_loss: {
        "rejected_logps must be float16, .*; got torch.int64": dict(rejected_logps=FOUR.long()),
    },
    ops.wpo_weights: {
        "log_sum_sq_probs must be float16, .*; got torch.int64": dict(log_sum_sq_probs=PAIRS.long()),
    },
    pack: {
        "input_ids must be int32 or int64; got torch.float32": dict(input_ids=IDS.float()),
        "input_ids must be int32 or int64; got torch.bool": dict(input_ids=IDS.bool()),
        "attention_mask must be bool, int or floating point; got torch.complex64": dict(attention_mask=IDS.cfloat()),
        "labels must be int32 or int64; got torch.float64": dict(labels=IDS.double()),
        "labels must be int32 or int64; got torch.bool": dict(labels=IDS.bool()),
        "groups must be int32 or int64; got torch.float32": dict(groups=TWO),
        "reach must be an int or None; got 6.5": dict(reach=6.5),
        "reach must be an int or None; got True": dict(reach=True),
        "tokens must be an int or None; got 6.5": dict(tokens=6.5),
    },
}
TILE = r"rows must tile \[0, 4\)"
OF_BOUNDS = {
    r"cu_seqlens must increase from 0 to 3; got \[0, 3, 2, 3\]": dict(cu_seqlens=tensor([0, 3, 2, 3])),
    r"cu_seqlens must increase from 0 to 3; got \[1, 3\]": dict(cu_seqlens=tensor([1, 3])),
    r"cu_seqlens must increase from 0 to 3; got \[0, 2\]": dict(cu_seqlens=tensor([0, 2])),
    r"cu_seqlens must increase from 0 to 3; got \[0, 4\]": dict(cu_seqlens=tensor([0, 4])),
}
NO_MASK = "attention_mask must be bool, int, or floating point with values 0 and 1; got another value"
WRONG_VALUES = {
    ops.token_logps: {
        r"logits must be \[..., V\], V > 0; got \[\]": dict(logits=LOGITS[0, 0]),
        r"logits must be .* V > 0; got \[3, 0\]": dict(logits=LOGITS[:, :0]),
        r"targets must have shape \[3\]; got \[2\]": dict(targets=TARGETS[:2]),
        "targets must be -100 or ids below 5; got 5": dict(targets=TARGETS + 5),
        "targets must be -100 or ids below 5; got -1": dict(targets=TARGETS - 1),
        r"targets must be on the device of logits \(cpu\); got meta": dict(targets=TARGETS.to("meta")),
        "temperature must be positive and finite; got 0.0": dict(temperature=0.0),
        "temperature must be positive and finite; got -1.0": dict(temperature=-1.0),
        "softcap must be positive and finite or None; got 0.0": dict(softcap=0.0),
        r"outputs must be a sequence of names .* got \('logp',\)": dict(outputs=("logp",)),
        "outputs must be a sequence of names .* got logps": dict(outputs="logps"),
    },
    ops.linear_logps: {
        r"hidden must be \[N, D\], D > 0; got \[1, 3, 4\]": dict(hidden=zeros(1, 3, 4)),
        r"weight must be \[V, 4\].* got \[5, 3\]": dict(weight=zeros(5, 3)),
        r"weight must be .*ZeRO-3.* got \[0\]": dict(weight=zeros(0)),  # its placeholder
        r"weight must be .*FSDP.* got \[20\]": dict(weight=zeros(20)),  # its flat shard
        r"weight must .* got \[0, 4\]": dict(weight=zeros(0, 4, requires_grad=True), targets=full((3,), -100)),
        r"bias must be \[5\]; got \[4\]": dict(bias=FOUR),
        r"targets must have shape \[3\]; got \[4\]": dict(targets=FOUR.long()),
        "targets must be -100 or ids below 5; got 5": dict(targets=TARGETS + 5),
        "targets must be -100 or ids below 5; got -1": dict(targets=TARGETS - 1),
        r"weight must be on the device of hidden \(cpu\); got meta": dict(weight=zeros(5, 4, device="meta")),
        r"main_grad must be \[5, 4\] in torch.float32; got \[5, 4\] torch.b": dict(main_grad=zeros(5, 4).bfloat16()),
        "temperature must be positive and finite; got 0.0": dict(temperature=0.0),
        "softcap must be positive and finite or None; got -30.0": dict(softcap=-30.0),
        "memory_budget must be .* 0 or more, or None; got -1": dict(memory_budget=-1),
        r"outputs must be a sequence of .* got \('logits',\)": dict(outputs=("logits",)),
        "outputs must be a sequence of names .* got entropy": dict(outputs="entropy"),
    },
    ops.sequence_logps: {
        r"logits must be \[T, V\] with cu_seqlens; got \[1, 3, 5\]": dict(logits=zeros(1, 3, 5)),
        r"logits must be \[B, L, V\] without cu_seqlens; got \[3, 5\]": dict(cu_seqlens=None),
        r"cu_seqlens must be \[S \+ 1\]; got \[0\]": dict(cu_seqlens=BOUNDS[:0]),
        r"cu_seqlens must be \[S \+ 1\]; got \[1, 3\]": dict(cu_seqlens=BOUNDS[None]),
        **OF_BOUNDS,
    },
    ops.linear_sequence_logps: OF_BOUNDS,
    ops.linear_preference_loss: {
        r"cu_seqlens must be \[2P \+ 1\], P > 0; got \[2\]": dict(cu_seqlens=tensor([0, 3])),
        r"cu_seqlens must be \[2P \+ 1\], P > 0; got \[1\]": dict(cu_seqlens=tensor([0])),
    },
    ops.packed_attention: {
        r"query must be \[T, H, D\], H > 0, D > 0; got \[1, 4, 4, 8\]": dict(query=zeros(1, 4, 4, 8)),
        r"key must be \[.*H_kv.*; got \[3, 2, 8\]": dict(key=zeros(3, 2, 8)),
        r"key must be \[.*H_kv.*; got \[4, 2, 6\]": dict(key=zeros(4, 2, 6)),
        "key must .*heads.* 4; got 3": dict(key=zeros(4, 3, 8)),
        "key must .*heads.* 4; got 0": dict(key=zeros(4, 0, 8), value=zeros(4, 0, 8)),
        r"value must be \[.*D_v.*; got \[4, 4, 8\]": dict(value=zeros(4, 4, 8)),
        r"key must be on the device of query \(cpu\); got meta": dict(key=zeros(4, 2, 8, device="meta")),
        r"rows must be \[S, 4\]; got \[2, 3\]": dict(rows=ROWS[:, :3]),
        r"rows must be on the CPU or the device of query \(cpu\); got meta": dict(rows=ROWS.to("meta")),
        "scale must be finite or None; got nan": dict(scale=NAN),
        "scale must be finite or None; got -inf": dict(scale=-INF),
        "window must be at least 1 or None; got 0": dict(window=0),
        "softcap must be positive and finite or None; got 0.0": dict(softcap=0.0),
        r"sinks must be \[4\], one .*; got \[2\]": dict(sinks=TWO),
        r"sinks must be on the device of query \(cpu\); got meta": dict(sinks=zeros(4, device="meta")),
        rf"{TILE}.*got \(0, 2, 3, 1\)": rows([0, 0, 0, 2], [0, 2, 3, 1]),  # a gap
        rf"{TILE}.*got \(0, 2, 2, 2\)": rows([0, 0, 0, 3], [0, 2, 2, 2]),  # an overlap
        rf"{TILE}.*got \(0, 2, 3, 1\).*": dict(rows=ROWS.flip(0)),
        rf"{TILE}.*\(0, 2, 4, 0\)": rows([0, 0, 0, 4], [0, 2, 4, 0]),  # an empty row
        rf"{TILE}; got \[0, 3\)": dict(rows=ROWS[:1]),  # tokens of no row
        TILE: rows([0, 0, 0, 3], [0, 2, 3, 2]),  # rows beyond the tokens
        rf"{TILE} in order, each after its prefix; got \(0, 3, 2, 2\)": rows([0, 0, 0, 2], [0, 3, 2, 2]),
        r"rows must have prefixes that other rows begin with; got \(1, 2, 3, 1\)": rows([0, 0, 0, 3], [1, 2, 3, 1]),
        rf"{TILE}.*got \(-1, 2, 3, 1\)": rows([0, 0, 0, 3], [-1, 2, 3, 1]),
    },
    ops.preference_loss: {
        r"chosen_logps must be \[P\], P > 0; got \[0\]": dict(chosen_logps=FOUR[:0]),
        r"chosen_logps must be \[P\], P > 0; got \[4, 2\]": dict(chosen_logps=zeros(4, 2)),
        r"chosen_logps must be \[4\]; got \[3\]": dict(chosen_logps=FOUR[:3]),
        r"chosen_logps must be on the device of rejected_logps \(cpu\); got": dict(chosen_logps=FOUR.to("meta")),
        r"ref_rejected_logps must be \[4\]; got \[3\]": dict(ref_rejected_logps=FOUR[:3]),
        r"weights must be on the device of chosen_logps \(cpu\)": dict(weights=FOUR.to("meta")),
        r"chosen_lengths must be \[4\]; got \[\]": dict(chosen_lengths=tensor(3)),
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
        "loss_type must be one or several of sigmoid, .*; got dpo": dict(loss_type="dpo"),
        r"loss_type must .*; got \('sft', 'kto'\)": dict(loss_type=("sft", "kto")),
        r"loss_type must .*; got \(\)": dict(loss_type=()),
        r"loss_weights must have one weight for each of 1 losses; got \(1, 2\)": dict(loss_weights=(1, 2)),
        "loss_weights must have one weight for each of 2": dict(loss_type=("sft", "ipo"), loss_weights=(1,)),
        "beta must be positive and finite; got 0.0": dict(beta=0.0),
        "discopop_tau must be positive and finite; got -1": dict(discopop_tau=-1),
        r"label_smoothing must lie in \[0, 1\); got 1": dict(loss_type="aot", label_smoothing=1.0),
        "label_smoothing must be 0 without one of exo_pair, robust, aot": dict(label_smoothing=0.1),
        "label_smoothing must be above 0 for exo_pair; got 0.0": dict(loss_type="exo_pair"),
        "label_smoothing must be below 0.5 for robust; got 0.5": dict(loss_type="robust", label_smoothing=0.5),
        "f_divergence_type must be one of reverse_kl, .*, alpha_divergence; got kl": dict(f_divergence_type="kl"),
        "f_divergence_type must be reverse_kl with bco_pair, aot; got forward_kl": dict(
            loss_type=("sigmoid", "bco_pair", "aot"), f_divergence_type="forward_kl"
        ),
    },
    ops.length_desensitized_logps: {
        r"logps must be \[2P, L\]; got \[3, 3\]": dict(logps=PAIRS[:3], mask=ones(3, 3)),
        r"mask must have shape \[4, 3\]; got \[4, 2\]": dict(mask=ones(4, 2)),
        r"ld_alpha must lie in \[0, 1\]; got 1.5": dict(ld_alpha=1.5),
    },
    ops.wpo_weights: {
        r"logps must be \[2P, L\]; got \[4\]": dict.fromkeys(("logps", "log_sum_sq_probs", "mask"), FOUR),
    },
    pack: {
        r"attention_mask must have the shape of input_ids \[2, 4\]; got \[2, 3\]": dict(attention_mask=IDS[:, :3]),
        r"labels must have the shape of input_ids \[2, 4\]; got \[1, 4\]": dict(labels=IDS[:1]),
        r"input_ids must be \[R, L\]; got \[4\]": batch(IDS[0]),
        r"groups must be \[2\]; got \[3\]": dict(groups=zeros(3)),
        NO_MASK: dict(attention_mask=IDS / 0 * 0),
        f"{NO_MASK}$": dict(attention_mask=IDS * -1e9),  # to be added to scores
        rf"labels must be -100 or token ids below 2\*\*31; got {2**61}": dict(labels=IDS * 2**61),
        "labels must be -100 or token ids; got -1": dict(labels=IDS.index_fill(1, tensor([2]), -1)),
        """groups must be a tensor, "prompts", "content", "pairs" or None; got 'halves'""": dict(groups="halves"),
    },
    pack_pairs: {
        "input_ids must have an even number of rows; got 1": batch(IDS[:1]),
    },
}
CASES = [
    pytest.param(function, message, kind, wrong, id=f"{function.__name__}: {message}")
    for kind, of_kind in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES))
    for function, cases in of_kind.items()
    for message, wrong in cases.items()
]


@pytest.mark.parametrize(("function", "message", "kind", "wrong"), CASES)
def test_misuse_raises(function, message, kind, wrong):
    name = "preference_loss" if function is PreferenceObjective else function.__name__
    with torch.device("cpu"), pytest.raises(kind, match=f"^{name}: {message}") as caught:
        function(**RIGHT[function] | wrong)
    assert not isinstance(caught.value, NotPackable)


def test_a_sharded_weight_raises():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(HEAD["weight"], init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match=r"^linear_logps: weight must be a whole tensor.*full_tensor.*DTensor"):
            ops.linear_logps(**HEAD | dict(weight=weight))
    finally:
        dist.destroy_process_group()
