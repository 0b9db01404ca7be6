"""A training step of LLaMA-Factory's DPO stage on prepared batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llamafactory.data import PairwiseDataCollatorWithPadding, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.train.dpo.trainer import CustomDPOTrainer
from torch import Tensor

import fastdpo
from benchmarks.cases import Arrays
from benchmarks.sides import workload as w
from benchmarks.sides.exact import ExactStep
from benchmarks.sides.trainer import TrainerStep, build_tokenizer
from benchmarks.sides.workload import Workload
from fastdpo.packing import IGNORE_INDEX


class LlamaFactoryStep(TrainerStep):
    """Policy forward and backward, reference forward. No optimizer."""

    TRAINER = "llamafactory.DPOTrainer"
    FUSED = frozenset({("llamafactory.DPOTrainer", kind, "fused") for kind in ("policy", "reference")})

    def _build(self, workload: Workload, directory: Path, attention: str) -> CustomDPOTrainer:
        arguments = dict(
            model_name_or_path="built here",
            stage="dpo",
            do_train=True,
            finetuning_type="lora" if workload.lora else "full",
            dataset="built here",
            template="empty",
            output_dir=str(directory / "out"),
            per_device_train_batch_size=len(workload.batches[0]),
            bf16=workload.bf16,
            use_cpu=not torch.accelerator.is_available(),
            report_to="none",
            disable_tqdm=True,
        )
        _, data, training, finetuning, _ = get_train_args(arguments)
        policy, tokenizer = w.build_policy(workload), build_tokenizer()
        template = get_template_and_fix_tokenizer(tokenizer, data)
        collator = PairwiseDataCollatorWithPadding(
            template=template, model=policy, pad_to_multiple_of=8, label_pad_token_id=IGNORE_INDEX, tokenizer=tokenizer
        )
        trainer = CustomDPOTrainer(
            model=policy,
            ref_model=None if workload.lora else w.build_model(workload, w.REFERENCE, attention),
            finetuning_args=finetuning,
            processor=None,
            args=training,
            data_collator=collator,
            tokenizer=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    def _examples(self, workload: Workload, batch: int) -> list[dict[str, Any]]:
        return [_tokenized(pair, workload.max_length) for pair in workload.examples(batch)]

    def check(self) -> Arrays:
        """Log-probs of all completions, losses of all batches, gradient of the first batch."""
        logps: dict[bool, list[Tensor]] = {False: [], True: []}
        stock_forward = self.trainer.concatenated_forward

        def record(model: Any, batch: Any, is_ref_model: bool = False) -> Any:
            results = stock_forward(model, batch, is_ref_model)
            logps[is_ref_model] += [results[name].detach().float() for name in ("chosen_logps", "rejected_logps")]
            return results

        self.trainer.concatenated_forward = record
        losses, gradient = [], None
        for batch in range(self.batches):
            losses.append(self._run(batch))
            gradient = w.gradient_of(self.model) if gradient is None else gradient
            self.reset()
        del self.trainer.concatenated_forward
        if self.fused and set(fastdpo.calls) != self.FUSED:
            raise RuntimeError(f"expected fused calls only; got {dict(fastdpo.calls)}")
        for counter in self.counters:
            counter.take()
        arrays = {f"log-probs of the {role}": torch.cat(x) for role, x in zip(ROLES, logps.values(), strict=True)}
        arrays |= {"loss": torch.stack(losses), "gradient": gradient}
        return {name: value.cpu().numpy() for name, value in arrays.items()}

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.trainer._stored_metrics.clear()


class ExactCompletions(ExactStep):
    """Log-probs are summed over each completion, since LLaMA-Factory returns no others."""

    def _compared(self, logps: list[Tensor]) -> list[Tensor]:
        return [x.sum()[None] for x in logps]


ROLES = ("policy", "reference")


def _tokenized(pair: dict[str, list[int]], longest: int) -> dict[str, Any]:
    """A pair in the format of LLaMA-Factory's collator."""
    example: dict[str, Any] = dict.fromkeys(("images", "videos", "audios"))
    for name in ("chosen", "rejected"):
        prompt, completion = pair["prompt_ids"], pair[f"{name}_ids"]
        ids = (prompt + completion)[:longest]
        example |= {
            f"{name}_input_ids": ids,
            f"{name}_attention_mask": [1] * len(ids),
            f"{name}_labels": ([IGNORE_INDEX] * len(prompt) + completion)[:longest],
        }
    return example
