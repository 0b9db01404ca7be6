"""`GRPOTrainer.training_step` and `RLOOTrainer.training_step` without generation, on given completions."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import fastdpo
from benchmarks.cases import Arrays
from benchmarks.equality import FLOAT32_FLOOR
from benchmarks.sides import workload as w
from benchmarks.sides.exact import ExactStep
from benchmarks.sides.trainer import STEPS_OF_LEARNING, build_tokenizer, score_labelled_positions, trainer_options
from benchmarks.sides.workload import COMPLETIONS, GroupWorkload
from fastdpo.models.calls import tokens
from fastdpo.testing import error

BETA = 0.05  # the default of RLOOConfig. That of GRPOConfig is 0, without a reference


def rows(workload: GroupWorkload, batch: int) -> list[tuple[list[int], list[int]]]:
    """The ids of prompt and completion of each row of a batch."""
    generator = torch.Generator().manual_seed(batch)

    def ids(n: int) -> list[int]:
        return torch.randint(w.FIRST_REGULAR_TOKEN, workload.size.vocabulary, (n,), generator=generator).tolist()

    groups = [(ids(prompt), list(map(ids, completions))) for prompt, *completions in workload.batches[batch]]
    return [(prompt, completion) for prompt, completions in groups for completion in completions]


def rewards(n: int) -> list[float]:
    """Different rewards for the completions of a prompt."""
    return [(5 * i + i // COMPLETIONS) % COMPLETIONS / COMPLETIONS for i in range(n)]


class GivenCompletions:
    """Uses the completions of the workload in place of generated ones."""

    given: list[tuple[list[int], list[int]]]

    def _generate(self, prompts: Any) -> tuple:
        prompt_ids, completion_ids = map(list, zip(*self.given, strict=True))
        texts = [""] * len(self.given)
        if isinstance(self, RLOOTrainer):
            return prompt_ids, completion_ids, texts
        return prompt_ids, completion_ids, None, texts, None, {}, None, []


class GivenGRPO(GivenCompletions, GRPOTrainer): ...


class GivenRLOO(GivenCompletions, RLOOTrainer): ...


class GroupStep:
    """Log-probabilities of old policy (RLOO) and reference, policy forward and backward. No optimizer.

    Args:
        workload: model, lengths and trainer.
        mode: "stock", "labelled" or "fastdpo" (see `benchmarks.sides.trainer.TrainerStep`).
        max_tokens: as in `fastdpo.patch`.
    """

    def __init__(self, workload: GroupWorkload, mode: str, max_tokens: Literal["auto"] | None = None) -> None:
        self.workload, self.fused, self.batches = workload, mode == "fastdpo", len(workload.batches)
        self._policy_tokens = 0  # computed by `check`
        self.name = f"trl.{workload.trainer}Trainer"
        if self.fused:
            os.environ["FASTDPO_STRICT"] = "1"
            fastdpo.patch(self.name, max_tokens=max_tokens)
        if mode == "labelled":
            score_labelled_positions()
        with TemporaryDirectory() as directory:
            self.trainer = self._build(Path(directory))
        self.model = self.trainer.accelerator.prepare_model(self.trainer.model)
        self.rows = [rows(workload, batch) for batch in range(self.batches)]
        for _ in range(STEPS_OF_LEARNING if max_tokens == "auto" else 0):
            self.step(0)
            self.reset()

    def _build(self, directory: Path) -> GivenGRPO | GivenRLOO:
        policy = w.build_model(self.workload, w.POLICY)
        w.build_model(self.workload, w.REFERENCE).save_pretrained(directory / "reference")
        policy.config._name_or_path = str(directory / "reference")
        options = trainer_options(self.workload, directory)
        del options["max_length"]  # an option of other trainers
        n = len(self.workload.batches[0]) * COMPLETIONS
        accumulation = self.workload.accumulation
        options["steps_per_generation"] = accumulation
        options |= {"per_device_train_batch_size": n // accumulation, "num_generations": COMPLETIONS, "beta": BETA}
        is_grpo = self.workload.trainer == "GRPO"
        trainer = (GivenGRPO if is_grpo else GivenRLOO)(
            model=policy,
            reward_funcs=lambda prompts, **columns: rewards(len(prompts)),
            args=(GRPOConfig if is_grpo else RLOOConfig)(**options),
            train_dataset=Dataset.from_list([{"prompt": "<eos>"}] * n),
            processing_class=build_tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = accumulation
        return trainer

    def check(self) -> Arrays:
        """See `benchmarks.sides.trainer.TrainerStep.check`. TRL shuffles the rows; here they are in order."""
        of_rows: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)  # by role and tokens
        score, compute = self.trainer._get_per_token_logps_and_entropies, self.trainer._compute_loss

        def recorded_score(model: Any, ids: Tensor, mask: Tensor, width: int, *args: Any, **kwargs: Any) -> Any:
            computed = tokens[self.name, "computed"]
            scored = score(model, ids, mask, width, *args, **kwargs)
            role = "policy" if torch.is_grad_enabled() else "old policy"
            role = "reference" if model is self.trainer.ref_model else role
            computed = tokens[self.name, "computed"] - computed
            if self.fused and not computed:  # known to the trainer, which computes metrics from them
                return scored
            self._policy_tokens += computed * (role == "policy")
            logps = [x[real.bool()] for x, real in zip(scored[0].detach().float(), mask[:, -width:], strict=True)]
            of_rows[f"log-probs of the {role}"].update(zip(_rows(ids, mask), logps, strict=True))
            return scored

        def recorded_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
            ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            of_rows["advantages"].update(zip(_rows(ids, mask), inputs["advantages"][:, None], strict=True))
            return compute(model, inputs)

        self.trainer._get_per_token_logps_and_entropies = recorded_score
        self.trainer._compute_loss = recorded_loss
        losses, gradient = [], None
        for batch in range(self.batches):
            losses.append(self._training_step(batch))
            gradient = w.gradient_of(self.model) if gradient is None else gradient
            self.reset()
        given = [(*prompt, *completion) for rows in self.rows for prompt, completion in rows]
        del self.trainer._get_per_token_logps_and_entropies, self.trainer._compute_loss
        kinds = {name.removeprefix("log-probs of the ").replace(" ", "_") for name in of_rows.keys() - {"advantages"}}
        if self.fused and set(fastdpo.calls) != {(self.name, kind, "fused") for kind in kinds}:
            raise RuntimeError(f"expected fused calls only; got {dict(fastdpo.calls)}")
        arrays = {name: torch.cat([values[row] for row in given]) for name, values in of_rows.items()}
        arrays |= {"gradient": gradient, "loss": torch.stack(losses)}
        return {name: x.cpu().numpy() for name, x in arrays.items()}

    def _training_step(self, batch: int) -> Tensor:
        self.trainer._step = 0  # new completions in every step
        self.trainer.given = self.rows[batch]
        inputs = [{"prompt": "<eos>"}] * len(self.rows[batch])
        losses = [self.trainer.training_step(self.model, inputs, None) for _ in range(self.workload.accumulation)]
        self.trainer.state.global_step += 1
        return torch.stack(losses).sum()

    def step(self, batch: int) -> None:
        self._training_step(batch)

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.trainer._metrics["train"].clear()

    def facts(self) -> dict[str, Any]:
        """The tokens of all batches that the policy computes, and those of their prefix trees."""
        if not self.fused:
            return {}
        return {"policy_tokens": self._policy_tokens, "distinct_tokens": sum(self.workload.distinct_tokens)}


def _rows(ids: Tensor, mask: Tensor) -> list[tuple[int, ...]]:
    """The tokens of each row of a padded batch."""
    return [tuple(row[real.bool()].tolist()) for row, real in zip(ids, mask, strict=True)]


class ExactGroupStep(ExactStep):
    """Ground truth of a step of GRPO or RLOO (see `benchmarks.sides.exact`)."""

    workload: GroupWorkload

    def check(self) -> Arrays:
        exact, plain = self._results(exact=True), self._results(exact=False)
        arrays = {f"exact/{name}": x.cpu().numpy() for name, x in exact.items()}
        arrays |= {f"plain/{name}": x.cpu().numpy() for name, x in plain.items()}
        if self.workload.trainer == "RLOO":
            # Its ratios and its KL penalty are differences of sums of log-probs. Of the errors allowed in those sums,
            # ratios pass the whole to each row's factor in the gradient, and the penalty passes BETA times as much to
            # the advantages.
            roles = "log-probs of the old policy", "log-probs of the reference"
            errors = [2 * error(plain[x], exact[x]) + FLOAT32_FLOOR for x in roles]
            token_error = sum(e * float(exact[x].square().mean().sqrt()) for e, x in zip(errors, roles, strict=True))
            longest = max(length for batch in self.workload.batches for _, *lengths in batch for length in lengths)
            sum_error = token_error * longest**0.5
            scale = float(exact["advantages"].square().mean().sqrt())
            arrays["slack/advantages"] = torch.tensor(BETA * sum_error / scale).numpy()
            arrays["slack/gradient"] = torch.tensor(sum_error * (1 + BETA / scale)).numpy()
        return arrays

    def _results(self, exact: bool) -> dict[str, Tensor]:
        policy, reference = (w.build_model(self.workload, seed) for seed in (w.POLICY, w.REFERENCE))
        if exact:
            policy.double()
            reference.double()
        results: dict[str, list[Tensor]] = {"policy": [], "reference": [], "advantages": [], "loss": []}
        gradient = None
        for batch in range(self.batches):
            inputs = [(torch.tensor(p + c), len(p)) for p, c in rows(self.workload, batch)]
            with torch.no_grad():
                logps = [self._logps(policy, *row, exact) for row in inputs]
                reference_logps = [self._logps(reference, *row, exact) for row in inputs]
            leaves = [x.detach().requires_grad_() for x in logps]
            loss, advantages = self._loss(leaves, reference_logps)
            new = {"policy": logps, "reference": reference_logps, "advantages": [advantages], "loss": [loss.detach()]}
            for name, values in new.items():
                results[name] += values
            if gradient is None:
                for row, factors in zip(inputs, torch.autograd.grad(loss, leaves), strict=True):
                    (self._logps(policy, *row, exact) * factors).sum().backward()
                gradient = w.gradient_of(policy)
        arrays = {f"log-probs of the {role}": torch.cat(results[role]) for role in ("policy", "reference")}
        if self.workload.trainer == "RLOO":
            arrays["log-probs of the old policy"] = arrays["log-probs of the policy"]
        else:  # that of RLOO is the mean of the advantages, which is 0
            arrays["loss"] = torch.stack(results["loss"])
        return arrays | {"advantages": torch.cat(results["advantages"]), "gradient": gradient}

    def _loss(self, logps: list[Tensor], reference_logps: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss, and the advantages [rows]."""
        reward = torch.tensor(rewards(len(logps)), dtype=logps[0].dtype, device=logps[0].device)
        if self.workload.trainer == "RLOO":
            sums, reference = (torch.stack([x.sum() for x in each]) for each in (logps, reference_logps))
            grouped = (reward - BETA * (sums.detach() - reference)).view(-1, COMPLETIONS)
            others = (grouped.sum(1, keepdim=True) - grouped) / (COMPLETIONS - 1)
            advantages = (grouped - others).flatten()
            return -((sums - sums.detach()).exp() * advantages).mean(), advantages
        grouped = reward.view(-1, COMPLETIONS)
        scale = grouped.std(1, keepdim=True) + 1e-4
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / scale).flatten()
        total = logps[0].new_zeros(())
        for x, reference, advantage in zip(logps, reference_logps, advantages, strict=True):
            ratio = (x - x.detach()).exp()
            kl = (reference - x).exp() - (reference - x) - 1
            total = total + (ratio * (BETA * kl - advantage)).sum()
        return total / sum(map(len, logps)), advantages
