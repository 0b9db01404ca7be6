"""Ground truth of a DPO step: row by row in float64, without padding, packing or fused ops."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.cases import Arrays
from benchmarks.equality import FLOAT32_FLOOR
from benchmarks.float64 import float64_throughout
from benchmarks.sides import workload as w
from benchmarks.sides.workload import Workload
from fastdpo.accuracy import error

BETA = 0.1  # the default of DPOConfig

Results = dict[str, Tensor]


class ExactStep:
    """Computes a step in float64 ("exact") and in the workload's precision ("plain")."""

    COMPLETIONS = ("chosen_ids", "rejected_ids")
    """The completions of each example; a batch has all rows of the first one before those of the second."""
    SCORES = "log-probs"
    """What is compared of each model."""
    HAS_REFERENCE = True

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.batches = len(workload.batches)

    def check(self) -> Arrays:
        plain, exact = self._run(exact=False), self._run(exact=True)
        kinds = {"exact": exact, "plain": plain, "slack": self._slack(plain, exact)}
        return {f"{kind}/{name}": x.numpy() for kind, results in kinds.items() for name, x in results.items()}

    def _slack(self, plain: Results, exact: Results) -> Results:
        """A margin is a difference of sums of scores. The errors allowed in those sums change the loss, and relatively
        each pair's factor in the gradient, by at most this much.
        """
        names = [name for name in exact if name.startswith(self.SCORES)]
        errors = [(2 * error(plain[x], exact[x]) + FLOAT32_FLOOR) * float(exact[x].norm()) for x in names]
        margin_error = torch.tensor(self._scale() * sum(errors))
        return {"gradient": margin_error, "loss": margin_error / float(exact["loss"].norm())}

    def _scale(self) -> float:
        """By which the loss multiplies a margin."""
        return BETA

    def _run(self, exact: bool) -> Results:
        policy = self._build_policy()
        reference = policy if self.workload.lora or not self.HAS_REFERENCE else self._build(w.REFERENCE)
        if exact:
            if self.workload.quantized:
                policy.get_base_model().dequantize()  # to the numbers that the codes stand for, as trainable weights
                for name, x in policy.named_parameters():
                    x.requires_grad_("lora_" in name)
            policy.double()
            reference.double()
        if self.workload.checkpointing:
            policy.train().gradient_checkpointing_enable({"use_reentrant": False})
        with float64_throughout() if exact else nullcontext():
            return self._results(policy, reference, exact)

    def _results(self, policy: nn.Module, reference: nn.Module, exact: bool) -> Results:
        """Scores, losses and more of all batches, and the gradient of the first batch."""
        found: defaultdict[str, list[Tensor]] = defaultdict(list)
        gradient = None
        for batch in range(self.batches):
            rows, reference_logps = self._rows(batch), []
            with torch.no_grad():
                policy_logps = [self._logps(policy, *row, exact) for row in rows]
                if self.HAS_REFERENCE:
                    with policy.disable_adapter() if self.workload.lora else nullcontext():
                        reference_logps = [self._logps(reference, *row, exact) for row in rows]
            leaves = [x.detach().requires_grad_() for x in policy_logps]
            loss, more = self._loss_of_tokens(leaves, reference_logps)
            if gradient is None:
                for row, factors in zip(rows, torch.autograd.grad(loss, leaves), strict=True):
                    (self._logps(policy, *row, exact) * factors).sum().backward()
                gradient = w.gradient_of(policy)
            for role, logps in (("policy", policy_logps), ("reference", reference_logps)):
                found[f"{self.SCORES} of the {role}"] += self._compared(logps)
            for name, x in {"loss": loss.detach()[None], **more}.items():
                found[name].append(x)
        return {name: torch.cat(x).cpu() for name, x in found.items() if x} | {"gradient": gradient}

    def _compared(self, logps: list[Tensor]) -> list[Tensor]:
        """The parts of the rows' log-probs that sides are compared in."""
        return logps

    def _loss_of_tokens(self, logps: list[Tensor], reference_logps: list[Tensor]) -> tuple[Tensor, Results]:
        """The loss, given the log-probs of each row, and further quantities to compare."""
        sums, reference = (torch.stack([x.sum() for x in each]) for each in (logps, reference_logps))
        return self._loss(sums - reference), {}

    def _loss(self, ratios: Tensor) -> Tensor:
        """The loss, given the differences between policy and reference in the log-prob of each row."""
        margins = ratios.view(2, -1)
        return -F.logsigmoid(BETA * (margins[0] - margins[1])).mean()

    def _rows(self, batch: int) -> list[tuple[Tensor, int]]:
        """The ids of each row and the start of its completion."""
        pairs = self._examples(batch)
        ids = [(pair["prompt_ids"], pair[name]) for name in self.COMPLETIONS for pair in pairs]
        return [(torch.tensor((p + c)[: self.workload.max_length]), len(p)) for p, c in ids]

    def _examples(self, batch: int) -> list[dict[str, list[int]]]:
        return self.workload.examples(batch)

    def _build(self, seed: int) -> PreTrainedModel:
        return w.build_model(self.workload, seed)

    def _build_policy(self) -> nn.Module:
        return w.build_policy(self.workload)

    def _inputs(self, ids: Tensor, exact: bool) -> dict[str, Tensor]:
        """Further arguments of the model for a row, whose ids are [1, L]."""
        return {}

    def _logps(self, model: torch.nn.Module, ids: Tensor, start: int, exact: bool) -> Tensor:
        """Log-probs of the completion's tokens, from full logits."""
        bf16, ids = self.workload.bf16 and not exact, ids.to(w.device())
        causal = model.get_base_model() if self.workload.lora else model
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            inputs = dict(input_ids=ids[None], use_cache=False) | self._inputs(ids[None], exact)
            hidden = causal.base_model(**inputs).last_hidden_state[0, start - 1 : -1]
        weight = causal.lm_head.weight
        if bf16:  # bfloat16 in and out, summed in float32: far faster than a bfloat16 product on a CPU that emulates it
            logits = (hidden.bfloat16().float() @ weight.bfloat16().float().t()).bfloat16().float()
        else:
            logits = hidden @ weight.t()
        return logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]


class ExactCompletions(ExactStep):
    """Log-probs are summed over each completion, for sides that return no others."""

    def _compared(self, logps: list[Tensor]) -> list[Tensor]:
        return [x.sum()[None] for x in logps]
