"""`GRPOTrainer.training_step` and `RLOOTrainer.training_step` without generation, on given completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from benchmarks.equality import FLOAT32_FLOOR
from benchmarks.sides import workload as w
from benchmarks.sides.exact import ExactStep, Results
from benchmarks.sides.trainer import STEPS_OF_LEARNING, TrainerStep, build_tokenizer, trainer_options
from benchmarks.sides.workload import COMPLETIONS, GroupWorkload
from fastdpo.accuracy import error
from fastdpo.models.calls import tokens

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


class GroupStep(TrainerStep):
    """Log-probabilities of old policy (RLOO) and reference, policy forward and backward. No optimizer.

    Args:
        workload: model, lengths and trainer.
        mode, max_tokens: see `TrainerStep`.
    """

    def __init__(self, workload: GroupWorkload, mode: str, max_tokens: Literal["auto"] | None = None) -> None:
        self.TRAINER = f"trl.{workload.trainer}Trainer"
        self.KINDS = "policy", "reference", *["old_policy"] * (workload.trainer == "RLOO")
        self.SHARES = workload.accumulation == 1
        super().__init__(workload, mode, max_tokens=max_tokens)
        for _ in range(STEPS_OF_LEARNING if max_tokens == "auto" else 0):
            self._run_all()

    def _build(self, workload: GroupWorkload, directory: Path, attention: str) -> GivenGRPO | GivenRLOO:
        policy = w.build_model(workload, w.POLICY, attention)
        w.build_model(workload, w.REFERENCE).save_pretrained(directory / "reference")
        policy.config._name_or_path = str(directory / "reference")
        options = trainer_options(workload, directory)
        del options["max_length"]  # an option of other trainers
        n = len(workload.batches[0]) * COMPLETIONS
        accumulation = workload.accumulation
        options["steps_per_generation"] = accumulation
        options |= {"per_device_train_batch_size": n // accumulation, "num_generations": COMPLETIONS, "beta": BETA}
        is_grpo = workload.trainer == "GRPO"
        return (GivenGRPO if is_grpo else GivenRLOO)(
            model=policy,
            reward_funcs=lambda prompts, **columns: rewards(len(prompts)),
            args=(GRPOConfig if is_grpo else RLOOConfig)(**options),
            train_dataset=Dataset.from_list([{"prompt": "<eos>"}] * n),
            processing_class=build_tokenizer(),
        )

    def _inputs(self, workload: GroupWorkload, batch: int) -> list[tuple[list[int], list[int]]]:
        return rows(workload, batch)

    @contextmanager
    def _recorded(self, record: Callable[[str, Tensor], None]) -> Iterator[None]:
        """TRL shuffles the rows; they are recorded in order."""
        of_rows: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)  # by name and tokens
        score, compute = self.trainer._get_per_token_logps_and_entropies, self.trainer._compute_loss

        def recorded_score(model: Any, ids: Tensor, mask: Tensor, width: int, *args: Any, **kwargs: Any) -> Any:
            computed = tokens[self.TRAINER, "computed"]
            scored = score(model, ids, mask, width, *args, **kwargs)
            if self.fused and tokens[self.TRAINER, "computed"] == computed:
                return scored  # known to the trainer, which computes metrics from them
            role = "policy" if torch.is_grad_enabled() else "old policy"
            role = "reference" if model is self.trainer.ref_model else role
            logps = [x[real.bool()] for x, real in zip(scored[0], mask[:, -width:], strict=True)]
            of_rows[f"log-probs of the {role}"].update(zip(_rows(ids, mask), logps, strict=True))
            return scored

        def recorded_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
            ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            of_rows["advantages"].update(zip(_rows(ids, mask), inputs["advantages"][:, None], strict=True))
            return compute(model, inputs)

        self.trainer._get_per_token_logps_and_entropies = recorded_score
        self.trainer._compute_loss = recorded_loss
        yield
        del self.trainer._get_per_token_logps_and_entropies, self.trainer._compute_loss
        for name, values in of_rows.items():
            record(name, torch.cat([values[(*prompt, *completion)] for prompt, completion in self.trainer.given]))

    def _run(self, batch: int) -> Tensor:
        self.trainer._step = 0  # new completions in every step
        self.trainer.given = self.inputs[batch]
        prompts = [{"prompt": "<eos>"}] * len(self.inputs[batch])
        losses = [self.trainer.training_step(self.model, prompts, None) for _ in range(self.accumulation)]
        self.trainer.state.global_step += 1
        return torch.stack(losses).sum()


def _rows(ids: Tensor, mask: Tensor) -> list[tuple[int, ...]]:
    """The tokens of each row of a padded batch."""
    return [tuple(row[real.bool()].tolist()) for row, real in zip(ids, mask, strict=True)]


class ExactGroupStep(ExactStep):
    """Ground truth of a step of GRPO or RLOO (see `benchmarks.sides.exact`)."""

    workload: GroupWorkload

    def _slack(self, plain: Results, exact: Results) -> Results:
        """That of RLOO, whose ratios and KL penalty are differences of sums of log-probs. Of the errors allowed in
        those sums, ratios pass the whole to each row's factor in the gradient, and the penalty passes BETA times as
        much to the advantages.
        """
        if self.workload.trainer == "GRPO":
            return {}
        roles = "log-probs of the old policy", "log-probs of the reference"
        errors = [2 * error(plain[x], exact[x]) + FLOAT32_FLOOR for x in roles]
        token_error = sum(e * float(exact[x].square().mean().sqrt()) for e, x in zip(errors, roles, strict=True))
        longest = max(length for batch in self.workload.batches for _, *lengths in batch for length in lengths)
        sum_error = token_error * longest**0.5
        scale = float(exact["advantages"].square().mean().sqrt())
        of_gradient = sum_error * (1 + BETA / scale)
        return {"advantages": torch.tensor(BETA * sum_error / scale), "gradient": torch.tensor(of_gradient)}

    def _results(self, *args: Any) -> Results:
        results = super()._results(*args)
        if self.workload.trainer == "RLOO":
            results["log-probs of the old policy"] = results["log-probs of the policy"]
            del results["loss"]  # the mean of the advantages, which is 0
        return results

    def _rows(self, batch: int) -> list[tuple[Tensor, int]]:
        return [(torch.tensor(p + c), len(p)) for p, c in rows(self.workload, batch)]

    def _loss_of_tokens(self, logps: list[Tensor], reference_logps: list[Tensor]) -> tuple[Tensor, Results]:
        """The loss, and the advantages [rows]."""
        reward = torch.tensor(rewards(len(logps)), dtype=logps[0].dtype, device=logps[0].device)
        if self.workload.trainer == "RLOO":
            sums, reference = (torch.stack([x.sum() for x in each]) for each in (logps, reference_logps))
            grouped = (reward - BETA * (sums.detach() - reference)).view(-1, COMPLETIONS)
            others = (grouped.sum(1, keepdim=True) - grouped) / (COMPLETIONS - 1)
            advantages = (grouped - others).flatten()
            return -((sums - sums.detach()).exp() * advantages).mean(), {"advantages": advantages}
        grouped = reward.view(-1, COMPLETIONS)
        scale = grouped.std(1, keepdim=True) + 1e-4
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / scale).flatten()
        total = logps[0].new_zeros(())
        for x, reference, advantage in zip(logps, reference_logps, advantages, strict=True):
            ratio = (x - x.detach()).exp()
            kl = (reference - x).exp() - (reference - x) - 1
            total = total + (ratio * (BETA * kl - advantage)).sum()
        return total / sum(map(len, logps)), {"advantages": advantages}
