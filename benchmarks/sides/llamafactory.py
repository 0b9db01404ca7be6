"""A training step of LLaMA-Factory's DPO stage on prepared batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llamafactory.data import PairwiseDataCollatorWithPadding, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.train.dpo.trainer import CustomDPOTrainer
from torch import Tensor

from benchmarks.sides import workload as w
from benchmarks.sides.trainer import TrainerStep, build_tokenizer
from benchmarks.sides.workload import Workload
from fastdpo.packing import IGNORE_INDEX


class LlamaFactoryStep(TrainerStep):
    """Policy forward and backward, reference forward. No optimizer."""

    TRAINER = "llamafactory.DPOTrainer"

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
        return CustomDPOTrainer(
            model=policy,
            ref_model=None if workload.lora else w.build_model(workload, w.REFERENCE, attention),
            finetuning_args=finetuning,
            processor=None,
            args=training,
            data_collator=collator,
            tokenizer=tokenizer,
        )

    def _examples(self, workload: Workload, batch: int) -> list[dict[str, Any]]:
        return [_tokenized(pair, workload.max_length) for pair in workload.examples(batch)]

    @contextmanager
    def _recorded(self, record: Callable[[str, Tensor], None]) -> Iterator[None]:
        stock_forward = self.trainer.concatenated_forward

        def forward(model: Any, batch: Any, is_ref_model: bool = False) -> Any:
            results = stock_forward(model, batch, is_ref_model)
            for name in ("chosen_logps", "rejected_logps"):
                record(f"log-probs of the {'reference' if is_ref_model else 'policy'}", results[name])
            return results

        self.trainer.concatenated_forward = forward
        yield
        del self.trainer.concatenated_forward

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.trainer._stored_metrics.clear()


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
