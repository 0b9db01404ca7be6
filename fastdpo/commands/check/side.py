"""One run of `fastdpo check`, in a process of its own: `python -m fastdpo.commands.check.side SETTINGS.json`.

Trains with a learning rate of 0, so that each batch is an independent comparison at the same weights.
The policy of a DPOTrainer is the model with 1 % of noise on its weights, or with a random adapter, so that it
differs from the reference as it does in the middle of a training.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ...accuracy import layers_of, perturbed, random_rounding, training_unit
from ...checks import suggested
from ...data.files import load_preferences
from ...integrations.collating import CollatedBatch, with_layout
from ...integrations.patching import patched
from ...integrations.training_events import callback
from ...models import calls, forward
from ...models.examine import gradients
from ...models.parts import backbone, base_of
from .meters import PeakMemory, tell_tokens, timed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Config = Trainer = Any  # those of TRL, which is imported where it is used

TRAINERS = "trl.DPOTrainer", "trl.RewardTrainer"
"""The trainer of a causal LM, and that of a reward model."""
STOCK, PATCHED, PERTURBED = "stock", "patched", "perturbed"
LABELS = {STOCK: "TRL as shipped", PATCHED: "TRL with fastdpo", PERTURBED: "TRL, rounded otherwise"}
"""The runs, and what they are called in progress bars."""

OPTIONS = ("--model", "--dataset", "--tiny", "--batches", "--batch-size", "--lora", "--json")
"""Those of the command that are no fields of the trainer's configuration."""

NOISE = 0.01
TIMED_BATCHES = 3
"""The least number of batches that are timed. The first one is left out of the median."""
EPOCH_SAMPLE = 1024
"""The number of pairs from which the tokens of an epoch are estimated; of a smaller dataset, all are counted."""
TIMES = ("runtime", "per_second", "epoch", "flos", "learning_rate", "step_time", "num_input_tokens_seen")
"""Parts of the names of what is logged and does not depend on the computation."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `fastdpo check` that a run needs.

    Attributes:
        model: directory or Hub name of the model and its tokenizer.
        dataset: path of the preference pairs.
        directory: where the trainer may write.
        rewards: whether the model is a reward model.
        batches: number of batches.
        batch_size: pairs a batch.
        lora: train a random LoRA adapter of all linear layers instead of the model.
        fields: command-line options that are fields of the trainer's configuration.
    """

    model: str
    dataset: str
    directory: str
    rewards: bool
    batches: int
    batch_size: int
    lora: bool
    fields: list[str]

    @property
    def trainer(self) -> str:
        return TRAINERS[self.rewards]


def parse_fields(fields: Sequence[str], rewards: bool = False) -> Config:
    """The configuration of the trainer, that of reward models or of others, with the given options.

    Raises:
        ValueError: an option is unknown or malformed.
    """
    from transformers import HfArgumentParser
    from trl.trainer import dpo_config, reward_config

    def fail(message: str) -> None:
        raise ValueError(message)

    kind = reward_config.RewardConfig if rewards else dpo_config.DPOConfig
    parser: Any = HfArgumentParser(cast(Any, kind), allow_abbrev=False)
    parser.error = fail
    config, others = parser.parse_args_into_dataclasses([*fields], return_remaining_strings=True)
    if others:
        rule = f"options must be those of `fastdpo check --help` or fields of {kind.__name__}"
        raise ValueError(f"{rule}; got {others[0]}{suggested(others[0], (*parser._option_string_actions, *OPTIONS))}")
    return config


def own_fields(settings: Settings) -> dict[str, Any]:
    """The fields of the trainer's configuration that a check sets itself."""
    return dict(
        output_dir=settings.directory,
        max_steps=settings.batches,
        num_train_epochs=1,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=0,
        weight_decay=0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm="true",
    )


def _config(settings: Settings) -> Config:
    own = [f"--{name}={value}" for name, value in own_fields(settings).items()]
    defaults = ["--bf16=false"]  # TRL's default is autocast to bfloat16
    if not torch.accelerator.is_available():
        defaults += ["--use_cpu=true", "--dataloader_pin_memory=false"]
    return parse_fields([*defaults, *settings.fields, *own], settings.rewards)


class _Recorder:
    """Records what a trainer computes in each batch."""

    def __init__(self, trainer: Trainer, bar: tqdm, rewards: bool):
        self.rewards = rewards
        models = _models(trainer)
        self.scores: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.gradients: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.logs: list[dict[str, float]] = []
        self.tokens = 0
        self.computed: dict[torch.nn.Module, int] = {}  # by model, the tokens of the latest call of its backbone
        for model in models:
            tell_tokens(backbone(model), partial(self.computed.__setitem__, model))
            model.register_forward_hook(self._keep)

        def on_pre_optimizer_step(*args: Any, **kwargs: Any) -> None:
            found = ((name, p.grad) for name, p in models[0].named_parameters())
            own = {name: gradients.sketch(name, x) for name, x in found if x is not None}
            for group, x in gradients.by_group(own, models[0]).items():
                self.gradients[group].append(x)

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
            name, scores = f"log-probabilities of the {role}", logps[output.label_mask]
        elif self.rewards:
            name, scores = "rewards", output.logits
        else:
            return
        self.scores[name].append(scores.detach().double().cpu())
        self.tokens += self.computed[module]  # without those of a probe


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
            stack.enter_context(patched(settings.trainer))
        before = Counter(calls.calls)
        trainer = _trainer(settings, counts_epoch=side == PATCHED)
        trainer.remove_callback(PrinterCallback)
        bar = stack.enter_context(tqdm(total=settings.batches, desc=LABELS[side], file=file, disable=file is None))
        recorder = _Recorder(trainer, bar, settings.rewards)
        seconds: list[float] = []
        trainer.training_step = timed(trainer.training_step, seconds)
        policy, *_ = _models(trainer)
        dtype = policy.dtype
        peak = PeakMemory()
        for model in _models(trainer) if side == PERTURBED else ():
            stack.enter_context(perturbed(layers_of(model), random_rounding, _unit(trainer, model)))
        with peak.watched():
            trainer.train()
        counted = Counter(calls.calls) - before
        reasons = {reason for model in _models(trainer) for reason in forward.logged_reasons(model, settings.trainer)}
        return {
            "model": type(policy).__name__,
            "dtype": str(dtype).removeprefix("torch."),
            "autocast": trainer.accelerator.mixed_precision,
            "unit": _unit(trainer, policy),
            "pairs": settings.batch_size,
            "beta": float(getattr(trainer.args, "beta", 1.0)),
            "scores": {name: torch.cat(x) for name, x in recorder.scores.items()},
            "gradients": {group: torch.cat(x) for group, x in recorder.gradients.items()},
            "logs": recorder.logs,
            "calls": {f"{kind} {path}": n for (name, kind, path), n in counted.items() if name == settings.trainer},
            "reasons": sorted(map(str, reasons)),  # which are loaded as plain values
            "tokens": recorder.tokens / settings.batches,
            "seconds": median(seconds[1:]) if len(seconds) >= TIMED_BATCHES else None,
            "memory": peak.bytes,
            "epoch": _tokens_of_epoch(trainer, settings) if trainer.eval_dataset is not None else None,
        }


def _tokens_of_epoch(trainer: Trainer, settings: Settings) -> dict[str, int] | None:
    """The tokens of an epoch in random order: "padded", "packed" and, where beginnings are "shared", with the number of
    "pairs" and of those that are "counted". None if batches cannot be packed before a model is called.
    """
    pairs, counted = trainer.eval_dataset, Counter[str]()
    padding = trainer.processing_class.pad_token_id if settings.rewards else None
    for collated in DataLoader(pairs, settings.batch_size, collate_fn=trainer.data_collator):
        batch = with_layout(collated, "content", padding)
        if not isinstance(batch, CollatedBatch) or batch.packed is None:
            return None
        (layout,) = batch.packed.layouts.values()
        counted.update(padded=math.prod(layout.padded_shape), packed=layout.unshared, shared=len(layout.token_index))
    total = len(load_preferences(Path(settings.dataset)))
    of_all = {name: round(n * total / len(pairs)) for name, n in counted.items()}
    return {"pairs": total, "counted": len(pairs), **of_all}


def _unit(trainer: Trainer, policy: PreTrainedModel) -> float:
    with trainer.accelerator.autocast():
        return training_unit(policy)


def _models(trainer: Trainer) -> list[PreTrainedModel]:
    """The transformers models of the policy and, if it is another one, of the reference."""
    models = trainer.model, getattr(trainer, "ref_model", None)
    return [*dict.fromkeys(base_of(x, "check") for x in models if x is not None)]


def _trainer(settings: Settings, counts_epoch: bool) -> Trainer:
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification, AutoProcessor, set_seed
    from trl.trainer import dpo_trainer, reward_trainer
    from trl.trainer.utils import create_model_from_path

    config = _config(settings)
    options: dict[str, Any] = {"device_map": None, "dtype": "auto", "trust_remote_code": config.trust_remote_code}
    options |= config.model_init_kwargs or {}
    config.model_init_kwargs = None
    if settings.rewards:
        options |= {"architecture": AutoModelForSequenceClassification, "num_labels": 1}
    has_reference = not (settings.lora or settings.rewards)
    models = [create_model_from_path(settings.model, **options) for _ in range(1 + has_reference)]
    if has_reference:
        _add_noise(models[0])
    dataset = load_preferences(Path(settings.dataset))
    sampled = None
    if counts_epoch and not getattr(config, "precompute_ref_log_probs", False):  # which would compute those of all
        sampled = dataset.shuffle(seed=0, keep_in_memory=True).take(min(EPOCH_SAMPLE, len(dataset)))
    set_seed(0)  # for the adapter
    kind: Any = reward_trainer.RewardTrainer if settings.rewards else dpo_trainer.DPOTrainer
    lora = LoraConfig(
        target_modules="all-linear", init_lora_weights=False, task_type="SEQ_CLS" if settings.rewards else None
    )
    return kind(
        model=models[0],
        **({"ref_model": models[1]} if has_reference else {}),
        args=config,
        train_dataset=dataset.take(min(settings.batches * settings.batch_size, len(dataset))),
        eval_dataset=sampled,
        processing_class=AutoProcessor.from_pretrained(settings.model),
        peft_config=lora if settings.lora else None,
    )


def _add_noise(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
            parameter.mul_(1 + NOISE * noise)


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
