"""What a DPO step means: every row by itself, without padding, packing or fusing, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Arrays
from benchmarks.equality import FLOOR
from benchmarks.sides import workload as w
from benchmarks.sides.workload import Workload
from fastdpo.testing import error

BETA = 0.1  # DPOConfig's default


class Results(NamedTuple):
    """Of all batches; the gradient of the first."""

    policy: Tensor
    reference: Tensor
    loss: Tensor
    gradient: Tensor


class ExactStep:
    """The numbers in float64 and, by the same lines, in the workload's precision: "exact" and "plain"."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.batches = len(workload.batches)

    def check(self) -> Arrays:
        plain, exact = self._run(exact=False), self._run(exact=True)
        names = ("log-probs of the policy", "log-probs of the reference", "loss", "gradient")
        arrays = {f"exact/{name}": value.numpy() for name, value in zip(names, exact, strict=True)}
        arrays |= {f"plain/{name}": value.numpy() for name, value in zip(names, plain, strict=True)}
        # A margin is a difference of sums over tokens. Errors allowed of those move the loss by at most as much, and
        # each pair's factor of the gradient relatively by at most as much.
        moved = BETA * sum(
            (2 * error(p, e) + FLOOR) * float(e.norm()) for p, e in zip(plain[:2], exact[:2], strict=True)
        )
        arrays["slack/gradient"] = torch.tensor(moved).numpy()
        arrays["slack/loss"] = torch.tensor(moved / float(exact.loss.norm())).numpy()
        return arrays

    def _run(self, exact: bool) -> Results:
        policy = w.build_policy(self.workload)
        reference = policy if self.workload.lora else w.build_model(self.workload, w.REFERENCE)
        if exact:
            policy.double()
            reference.double()
        if self.workload.checkpointing:
            policy.train().gradient_checkpointing_enable({"use_reentrant": False})
        of_policy, of_reference, losses, gradient = [], [], [], None
        for batch in range(self.batches):
            rows = self._rows(batch)
            with torch.no_grad():
                policy_logps = [self._logps(policy, *row, exact) for row in rows]
                with policy.disable_adapter() if self.workload.lora else nullcontext():
                    reference_logps = [self._logps(reference, *row, exact) for row in rows]
            sums = torch.stack([x.sum() for x in policy_logps]).requires_grad_()
            margins = (sums - torch.stack([x.sum() for x in reference_logps])).view(2, -1)
            loss = -F.logsigmoid(BETA * (margins[0] - margins[1])).mean()
            of_policy += policy_logps
            of_reference += reference_logps
            losses.append(loss.detach())
            if gradient is None:
                (factors,) = torch.autograd.grad(loss, sums)
                for row, factor in zip(rows, factors, strict=True):
                    (self._logps(policy, *row, exact).sum() * factor).backward()
                gradient = w.gradient_of(policy)
        found = torch.cat(of_policy), torch.cat(of_reference), torch.stack(losses), gradient
        return Results(*(x.cpu() for x in found))

    def _rows(self, batch: int) -> list[tuple[Tensor, int]]:
        """Ids of each row, chosen answers first, and where its answer begins."""
        pairs = w.examples(self.workload, batch)
        ids = [(pair["prompt_ids"], pair[answer]) for answer in ("chosen_ids", "rejected_ids") for pair in pairs]
        return [(torch.tensor((p + a)[: self.workload.max_length]), len(p)) for p, a in ids]

    def _logps(self, model: torch.nn.Module, ids: Tensor, start: int, exact: bool) -> Tensor:
        """Log-probabilities of the answer's tokens, of full logits."""
        narrow, ids = self.workload.bf16 and not exact, ids.to(w.device())
        causal = model.get_base_model() if self.workload.lora else model
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=narrow):
            hidden = causal.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, start - 1 : -1]
        weight = causal.lm_head.weight
        if narrow:  # bfloat16 in and out, summed in float32; as one product that is unbearable on CPUs without bfloat16
            logits = (hidden.bfloat16().float() @ weight.bfloat16().float().t()).bfloat16().float()
        else:
            logits = hidden @ weight.t()
        return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]
