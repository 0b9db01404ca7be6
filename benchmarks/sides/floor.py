"""A lower bound for a DPO step on this machine, made of the model's own layers and torch's kernels.

It runs, forward and backward for the policy and forward for the reference:

- the transformers backbone on the T distinct tokens of the batch, as one row without padding;
- causal `scaled_dot_product_attention` over every stored segment: a prompt with its chosen
  completion is one segment, the rejected completion another. The attention of the rejected
  completion to its prompt is a separate call, whose output is added without the correct weights;
- the bare matrix products of the head on the N scored rows, in tiles of `TILE` rows. Policy: `h
  W^T`, `G W` and, unless the head is frozen, `G^T h`, with the logits in place of their gradient G.
  Reference: `h W^T`.

It leaves out softmax, log-probs and their statistics, the loss, the packing and the trainer. A real
step does more work than this, and the numbers that it computes have no meaning.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from trl.trainer.dpo_trainer import DataCollatorForPreference

from benchmarks.cases import Arrays
from benchmarks.sides import workload as w
from benchmarks.sides.workload import Workload
from fastdpo import ops
from fastdpo.packing import Layout

TILE = 1024
ATTENTION = "floor"


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,
    attention_mask: None,
    rows: list[list[int]],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over `Layout.rows`, without the softmax over prefix and own tokens together."""
    lengths = [length for *_, length in rows]
    parts = list(zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True))
    by_start = {start: part for (_, _, start, _), part in zip(rows, parts, strict=True)}  # a prefix starts a row
    outs = []
    for (prefix, prefix_length, _, _), (q, k, v) in zip(rows, parts, strict=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if prefix_length:
            _, k, v = (x[:, :, :prefix_length] for x in by_start[prefix])
            out = out + F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        outs.append(out)
    return torch.cat(outs, 2).transpose(1, 2), None


class FloorStep:
    """One step of the lower bound."""

    def __init__(self, workload: Workload) -> None:
        AttentionInterface.register(ATTENTION, attend)
        AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
        self.lora = workload.lora
        self.model = self._build_policy(workload)
        self.policy = self.model.get_base_model() if self.lora else self.model
        self.reference = self.policy if self.lora else self._build_reference(workload)
        for model in filter(None, (self.policy, self.reference)):
            model.set_attn_implementation(ATTENTION)
        device = w.device()
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=workload.bf16)
        # On a CPU that emulates bfloat16, float32 products are far faster and give the lower bound.
        self.dtype = torch.bfloat16 if workload.bf16 and device.type != "cpu" else torch.float32
        self.batches = len(workload.batches)
        self.packed = [self._pack(workload, i, device) for i in range(self.batches)]

    def _build_policy(self, workload: Workload) -> Any:
        return w.build_policy(workload)

    def _build_reference(self, workload: Workload) -> Any:
        return w.build_model(workload, w.REFERENCE)

    def _pack(self, workload: Workload, batch: int, device: torch.device) -> tuple[Tensor, Layout]:
        """Packed ids [1, T] of a batch and their layout."""
        inputs = DataCollatorForPreference(w.PAD, workload.max_length)(workload.examples(batch))
        inputs = {name: x.to(device) for name, x in inputs.items()}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        layout = ops.pack_pairs(inputs["input_ids"], inputs["attention_mask"], labels)
        return layout.pack(inputs["input_ids"]), layout

    def check(self) -> Arrays:
        for batch in range(self.batches):
            self.step(batch)
            self.reset()
        return {}

    def step(self, batch: int) -> None:
        ids, layout = self.packed[batch]
        hidden = self._hidden(self.policy, ids, layout)
        hidden.backward(self._products(self.policy.lm_head.weight, hidden.detach()))
        with torch.no_grad():
            with self.model.disable_adapter() if self.lora else nullcontext():
                hidden = self._hidden(self.reference, ids, layout)
            weight = self.reference.lm_head.weight.to(self.dtype)
            for tile in hidden.to(self.dtype).split(TILE):
                tile @ weight.t()

    def _hidden(self, model: nn.Module, ids: Tensor, layout: Layout) -> Tensor:
        """Hidden states of the scored rows, [N, D]."""
        rows = layout.rows.tolist()
        with self.autocast:
            out = model.base_model(input_ids=ids, position_ids=layout.position_ids[None], use_cache=False, rows=rows)
            return out.last_hidden_state[0].index_select(0, layout.score_index)

    @torch.no_grad()
    def _products(self, weight: nn.Parameter, hidden: Tensor) -> Tensor:
        """The matrix products of the head. Sets `weight.grad` [V, D] if the head is trainable.

        Returns:
            A stand-in for the gradient of the hidden states, [N, D].
        """
        matrix = weight.to(self.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(matrix) if weight.requires_grad else None
        for start in range(0, len(hidden), TILE):
            rows = hidden[start : start + TILE].to(self.dtype)
            logits = rows @ matrix.t()
            grad_hidden[start : start + TILE] = logits @ matrix
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), rows)
        weight.grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def facts(self) -> dict[str, Any]:
        """Tokens per step, of policy and reference together, and scored rows per step."""
        passes = 1 if self.reference is None else 2
        return {
            "tokens": passes * sum(ids.numel() for ids, _ in self.packed) / self.batches,
            "scored_rows": sum(len(layout.targets) for _, layout in self.packed) / self.batches,
        }
