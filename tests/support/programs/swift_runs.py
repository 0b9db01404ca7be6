"""ms-swift's command, and its pipeline in this process, on a tiny model and data made in place."""

# pyright: reportMissingImports=false
# Types are checked in an environment without ms-swift.

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import swift.rlhf_trainers.dpo_trainer  # noqa: F401  makes TRL 0.28 importable next to transformers 5

import fastdpo
from tests.support.comparison import double
from tests.support.programs.workload import Workload
from tests.support.trl.dpo import Gradients, Run, numbers

OPTIONS = {
    "model_type": "llama",
    "template": "default",
    "torch_dtype": "float32",
    "split_dataset_ratio": 0,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "load_from_cache_file": False,
    "check_model": False,
    "add_version": False,
    "tuner_type": "full",
    "logging_steps": 1,
    "gradient_accumulation_steps": 1,
    "optim": "sgd",  # Adam's normalized steps would amplify rounding errors
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "max_grad_norm": 1e9,
    "report_to": "none",
    "save_only_model": True,
    "bf16": False,
    "fp16": False,
}
VARIED = Workload(pairs=12, batch=4)
LORA = {"tuner_type": "lora", "lora_rank": 4, "lora_dropout": 0}


def write_data(directory: Path, workload: Workload, *, labelled: bool = False) -> Path:
    """Writes preference pairs, or for KTO one of the two answers to each prompt and its label."""
    rows = []
    for i, pair in enumerate(workload.pairs_of_text()):
        answer = pair["rejected" if labelled and i % 3 == 1 else "chosen"]
        messages = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": answer}]
        rows.append(
            {"messages": messages, **({"label": i % 3 != 1} if labelled else {"rejected_response": pair["rejected"]})}
        )
    path = directory / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def arguments(output: Path, workload: Workload, kind: str, *, reference: bool, **options: Any) -> list[str]:
    """The arguments of `swift rlhf`. Writes models and data next to the output."""
    directory = output.parent
    if not (directory / "model").exists():
        workload.write_model(directory / "model")
        workload.write_model(directory / "reference", seed=1)
        write_data(directory, workload, labelled=kind == "kto")
    named = {
        "rlhf_type": kind,
        "model": directory / "model",
        **({"ref_model": directory / "reference", "ref_model_type": "llama"} if reference else {}),
        "dataset": directory / "train.jsonl",
        "output_dir": output,
        "per_device_train_batch_size": workload.batch,
        "max_steps": workload.steps,
        "save_steps": workload.steps,
        **OPTIONS,
        **options,
    }
    return [str(x) for name, value in named.items() for x in (f"--{name}", value)]


def train(
    directory: Path,
    kind: str = "dpo",
    *,
    reference: bool | None = None,
    prepare: Callable[[Any], None] = lambda pipeline: None,
    before_training: Callable[[Any], None] = lambda trainer: None,
    workload: Workload = VARIED,
    **options: Any,
) -> Run:
    """Runs ms-swift's pipeline in this process, with the patches that are active.

    Args:
        directory: for models, data and output.
        kind: `rlhf_type`.
        reference: whether there is a reference model with other weights. Default: if the kind has
            one and there is no adapter.
        prepare: called with the pipeline before its trainer is built.
        before_training: called with the trainer.
        workload: the model and the data.
        options: of the command.
    """
    from swift.pipelines.train.rlhf import SwiftRLHF

    run, trainers = Run([]), []
    if reference is None:
        reference = kind in ("dpo", "kto") and options.get("tuner_type") != "lora"

    class Pipeline(SwiftRLHF):
        def train(self, trainer):
            trainers.append(trainer)
            trainer.add_callback(Gradients(run.gradients))
            before_training(trainer)
            return super().train(trainer)

    directory.mkdir(exist_ok=True)
    before = Counter(fastdpo.calls)
    pipeline = Pipeline(arguments(directory / "out", workload, kind, reference=reference, **options))
    prepare(pipeline)
    pipeline.main()
    (trainer,) = trainers
    run.steps = trainer.state.global_step
    run.logs = [numbers(log) for log in trainer.state.log_history]
    run.calls = Counter({key[1:]: n for key, n in (fastdpo.calls - before).items()})
    return run


def train_both(directory: Path, kind: str = "dpo", **options: Any) -> tuple[Run, Run]:
    """Trains stock, then patched, from the same weights."""
    stock = train(directory / "stock", kind, **options)
    stock.in_float64 = lambda: train(directory / "float64", kind, **{**options, "prepare": _in_float64(options)})
    with fastdpo.patched("swift"):
        return stock, train(directory / "patched", kind, **options)


def _in_float64(options: dict[str, Any]) -> Callable[[Any], None]:
    def prepare(pipeline: Any) -> None:
        for model in filter(None, (pipeline.model, pipeline.ref_model)):
            double(model)
        options.get("prepare", lambda pipeline: None)(pipeline)

    return prepare


def join_rows(pipeline: Any) -> None:
    """Sets what `padding_free` sets, for any attention. The option itself requires flash-attn."""
    pipeline.template.padding_free = True


def pack_rows(pipeline: Any) -> None:
    """Sets what `packing` sets, for any attention. An example of a batch is then several pairs."""
    join_rows(pipeline)
    pipeline.args.packing, pipeline.args.packing_length = True, 128


def assert_packed(trainer: Any) -> None:
    assert len(trainer.train_dataset) < VARIED.pairs / 2


PACKING = dict(prepare=pack_rows, before_training=assert_packed)


def scale_logits(pipeline: Any) -> None:
    """Hooks the heads, which then cannot be fused."""
    for model in filter(None, (pipeline.model, pipeline.ref_model)):
        scale_head(model)


def scale_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)


def join_rows_and_scale_logits(pipeline: Any) -> None:
    join_rows(pipeline)
    scale_logits(pipeline)


def use_trainer(monkeypatch: pytest.MonkeyPatch, trainer: type) -> None:
    """Makes ms-swift's pipeline build trainers of this class."""
    from swift.trainers import TrainerFactory

    monkeypatch.setattr(TrainerFactory, "get_trainer_cls", lambda args: trainer)
