"""One run of `fastdpo check`, in a process of its own: `python -m fastdpo.commands.check.side SETTINGS.json`.

Trains with a learning rate of 0, so that each batch is an independent comparison at the same weights.
The policy is the model with 1 % of noise on its weights, or with a random adapter, so that it differs
from the reference as it does in the middle of a training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from torch import Tensor
from tqdm import tqdm

from ...accuracy import layers_of, perturbed, random_rounding, training_unit
from ...data.files import load_preferences
from ...integrations.callbacks import callback
from ...integrations.patching import patched
from ...models import calls, forward, gradients
from ...models.language_model import backbone
from ...models.wrapped import base_of
from ...plain_checks import suggested
from ...testing import float64_throughout
from .meters import PeakMemory, TokenCounter, timed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DPOConfig = DPOTrainer = Any  # TRL is imported where it is used

TRAINER = "trl.DPOTrainer"
STOCK, PATCHED, FLOAT64, PERTURBED = "stock", "patched", "float64", "perturbed"
LABELS = {
    STOCK: "TRL as shipped",
    PATCHED: "TRL with fastdpo",
    FLOAT64: "TRL in float64",
    PERTURBED: "TRL, rounded otherwise",
}
"""The runs, and what they are called in progress bars."""

OPTIONS = ("--model", "--dataset", "--tiny", "--batches", "--batch-size", "--lora", "--json", "--plot")
"""Those of the command that are no fields of `DPOConfig`."""

NOISE = 0.01
TIMED_BATCHES = 3
"""The least number of batches that are timed. The first one is left out of the median."""
TIMES = ("runtime", "per_second", "epoch", "flos", "learning_rate", "step_time", "num_input_tokens_seen")
"""Parts of the names of what is logged and does not depend on the computation."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `fastdpo check` that a run needs.

    Attributes:
        model: directory or Hub name of the model and its tokenizer.
        dataset: path of the preference pairs.
        batches: number of batches.
        batch_size: pairs a batch.
        lora: train a random LoRA adapter of all linear layers instead of the model.
        fields: command-line options that are fields of `DPOConfig`.
        directory: where the trainer may write.
    """

    model: str
    dataset: str
    batches: int
    batch_size: int
    lora: bool
    fields: list[str]
    directory: str


def parse_fields(fields: Sequence[str]) -> DPOConfig:
    """The configuration with the given options.

    Raises:
        ValueError: an option is unknown or malformed.
    """
    from transformers import HfArgumentParser
    from trl.trainer import dpo_config

    def fail(message: str) -> None:
        raise ValueError(message)

    parser: Any = HfArgumentParser(cast(Any, dpo_config.DPOConfig), allow_abbrev=False)
    parser.error = fail
    config, others = parser.parse_args_into_dataclasses([*fields], return_remaining_strings=True)
    if others:
        rule = "options must be those of `fastdpo check --help` or fields of DPOConfig"
        raise ValueError(f"{rule}; got {others[0]}{suggested(others[0], (*parser._option_string_actions, *OPTIONS))}")
    return config


def _config(settings: Settings) -> DPOConfig:
    own = [f"--output_dir={settings.directory}"]
    own += [f"--per_device_train_batch_size={settings.batch_size}", f"--max_steps={settings.batches}"]
    own += ["--learning_rate=0", "--weight_decay=0", "--optim=sgd", "--lr_scheduler_type=constant"]
    own += ["--max_grad_norm=1e9", "--logging_steps=1", "--save_strategy=no", "--report_to=none"]
    own += ["--disable_tqdm=true"]
    defaults = ["--bf16=false"]  # TRL's default is autocast to bfloat16
    if not torch.accelerator.is_available():
        defaults += ["--use_cpu=true", "--dataloader_pin_memory=false"]
    return parse_fields([*defaults, *settings.fields, *own])


class _Recorder:
    """Records what a trainer computes in each batch."""

    def __init__(self, trainer: DPOTrainer, bar: tqdm):
        policy = base_of(trainer.model, "check")
        given = (trainer.model,) if trainer.ref_model is None else (trainer.model, trainer.ref_model)
        models = {id(x): x for x in (base_of(model, "check") for model in given)}
        self.logps: dict[str, list[Tensor]] = {"policy": [], "reference": []}
        self.gradients: list[dict[str, Tensor]] = []
        self.logs: list[dict[str, float]] = []
        self.tokens = 0
        self.counters: dict[torch.nn.Module, TokenCounter] = {
            model: TokenCounter(backbone(model)) for model in models.values()
        }
        for model in models.values():
            model.register_forward_hook(self._keep)
        groups = gradients.groups_of(policy)

        def on_pre_optimizer_step(*args: Any, **kwargs: Any) -> None:
            named = ((name, p.grad) for name, p in policy.named_parameters() if p.grad is not None)
            self.gradients.append(gradients.sketches(named, groups))

        def on_log(*args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            numbers = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, int | float)}
            numbers = {k: v for k, v in numbers.items() if not any(x in k for x in (*TIMES, "train_loss"))}
            if numbers:
                self.logs.append(numbers)
                bar.update()

        trainer.add_callback(callback(on_pre_optimizer_step=on_pre_optimizer_step, on_log=on_log))

    def _keep(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        logps = getattr(output, "log_probs", None)
        if logps is not None:
            role = "policy" if torch.is_grad_enabled() else "reference"
            self.logps[role].append(logps.detach()[output.label_mask].double().cpu())
            self.tokens += self.counters[module].last  # without those of a probe


def measure(settings: Settings, side: str, file: TextIO | None = None) -> dict[str, Any]:
    """One run, and what it has computed and cost.

    Args:
        settings: of all runs.
        side: one of `LABELS`.
        file: where a progress bar is drawn; None for none.
    """
    from transformers import PrinterCallback, set_seed

    set_seed(0)
    with ExitStack() as stack:
        if side == PATCHED:
            stack.enter_context(patched(TRAINER))
        before = Counter(calls.calls)
        trainer = _trainer(settings, in_float64=side == FLOAT64)
        trainer.remove_callback(PrinterCallback)
        if side == FLOAT64:
            stack.enter_context(float64_throughout())
        bar = stack.enter_context(tqdm(total=settings.batches, desc=LABELS[side], file=file, disable=file is None))
        recorder = _Recorder(trainer, bar)
        seconds: list[float] = []
        trainer.training_step = timed(trainer.training_step, seconds)
        policy = base_of(trainer.model, "check")
        dtype = policy.dtype
        peak = PeakMemory()
        with peak.watched(), _perturbed(trainer) if side == PERTURBED else nullcontext():
            trainer.train()
        counted = Counter(calls.calls) - before
        return {
            "model": type(policy).__name__,
            "dtype": str(dtype).removeprefix("torch."),
            "autocast": trainer.accelerator.mixed_precision,
            "parameters": sum(p.numel() for p in policy.parameters()),
            "unit": _unit(trainer, policy),
            "pairs": settings.batch_size,
            "beta": float(trainer.args.beta),
            "logps": {role: torch.cat(x) for role, x in recorder.logps.items() if x},
            "gradients": recorder.gradients,
            "logs": recorder.logs,
            "calls": {f"{kind} {path}": n for (name, kind, path), n in counted.items() if name == TRAINER},
            "reasons": sorted(_reasons(trainer)),
            "tokens": recorder.tokens / settings.batches,
            "seconds": median(seconds[1:]) if len(seconds) >= TIMED_BATCHES else None,
            "memory": peak.bytes,
            "memory_kind": peak.kind,
        }


def _unit(trainer: DPOTrainer, policy: PreTrainedModel) -> float:
    with trainer.accelerator.autocast():
        return training_unit(policy)


def _reasons(trainer: DPOTrainer) -> set[str]:
    models = [x for x in (trainer.model, trainer.ref_model) if x is not None]
    return {reason for model in models for reason in forward.logged_reasons(model, TRAINER)}


@contextmanager
def _perturbed(trainer: DPOTrainer) -> Iterator[None]:
    with ExitStack() as stack:
        for model in (trainer.model, trainer.ref_model):
            if model is not None:
                base = base_of(model, "check")
                stack.enter_context(perturbed(layers_of(base), random_rounding, _unit(trainer, base)))
        yield


def _trainer(settings: Settings, in_float64: bool) -> DPOTrainer:
    from peft import LoraConfig
    from transformers import AutoProcessor, set_seed
    from trl.trainer import dpo_trainer
    from trl.trainer.utils import create_model_from_path

    config = _config(settings)
    options: dict[str, Any] = {"device_map": None, "dtype": "auto", "trust_remote_code": config.trust_remote_code}
    options |= config.model_init_kwargs or {}
    config.model_init_kwargs = None
    models = [create_model_from_path(settings.model, **options) for _ in range(1 if settings.lora else 2)]
    if not settings.lora:
        _add_noise(models[0])
    dataset = load_preferences(Path(settings.dataset))
    models = [_double(model) if in_float64 else model for model in models]
    set_seed(0)  # for the adapter
    trainer = dpo_trainer.DPOTrainer(
        model=models[0],
        ref_model=None if settings.lora else models[1],
        args=config,
        train_dataset=dataset.take(min(settings.batches * settings.batch_size, len(dataset))),
        processing_class=AutoProcessor.from_pretrained(settings.model),
        peft_config=LoraConfig(target_modules="all-linear", init_lora_weights=False) if settings.lora else None,
    )
    if in_float64:
        cast(torch.nn.Module, trainer.model).double()  # with its adapter
    return trainer


def _add_noise(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
            parameter.mul_(1 + NOISE * noise)


def _double(model: PreTrainedModel) -> PreTrainedModel:
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")  # the grouped implementation has no float64
    return model.double()


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    out = Path(arguments["out"])
    try:
        result = measure(Settings(**arguments["settings"]), arguments["side"], sys.stdout)
    except Exception as error:  # of any kind: a model, a tokenizer, data or a configuration may be at fault
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        torch.save({"error": f"{type(error).__name__}: {lines[0]}"}, out)
        sys.exit(1)
    torch.save(result, out)


if __name__ == "__main__":
    main()
