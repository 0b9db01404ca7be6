"""A training step of TRL's `DPOTrainer` on prepared batches.

The trainer runs as shipped, on labelled positions only as on CUDA, or patched.
"""

from __future__ import annotations

import os
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest import mock

import torch
from datasets import Dataset
from datasets import disable_progress_bars as quiet_datasets
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_4_available, is_liger_kernel_available
from trl import DPOConfig, DPOTrainer
from trl.trainer import utils as trl_utils

import fastdpo
from benchmarks import messages
from benchmarks.cases import Arrays, Unavailable
from benchmarks.sides import workload as w
from benchmarks.sides.workload import Workload
from benchmarks.tokens import TokenCounter
from fastdpo.models.calls import tokens
from fastdpo.models.running.pace import Pace

SEEN = 2
"""How often each number of tokens must be seen before all of its batches are replayed."""

STEPS_LEFT, SETTLING = 22_926, 110
"""Steps of a training by TRL's defaults, three epochs of the 61,135 pairs of UltraFeedback, 8 a step; and how many of
them it takes until `compile="auto"` has decided, and has seen that steps are not slower. The turns of others would be.
"""

STEPS_OF_LEARNING = 3
"""After which steps of equal lengths have the micro-batches that `max_tokens="auto"` has chosen."""

FLASH: dict[str, Callable[[], bool]] = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_4": is_flash_attn_4_available,
}
"""Attention implementations of transformers that need a package, and whether it is there."""


class Tokenized:
    """A trainer that accepts a dataset that is already tokenized."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return dataset


class TokenizedTrainer(Tokenized, DPOTrainer): ...


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for its special tokens only; it never sees text."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": w.PAD, "<eos>": w.EOS}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def trainer_options(workload: Workload, directory: Path) -> dict[str, Any]:
    """Options that the configurations of all TRL trainers share."""
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": len(workload.batches[0]) // workload.accumulation,
        "gradient_accumulation_steps": workload.accumulation,
        "max_length": workload.max_length,
        "bf16": workload.bf16,
        "gradient_checkpointing": workload.checkpointing,
        "use_cpu": not torch.accelerator.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
    }


def build_trainer(workload: Workload, directory: Path, attention: str, **options: Any) -> DPOTrainer:
    """A `DPOTrainer` with the default loss (sigmoid, beta 0.1). `options` are fields of `DPOConfig`."""
    config = DPOConfig(**trainer_options(workload, directory), **options)
    trainer = TokenizedTrainer(
        model=w.build_model(workload, w.POLICY, attention),
        ref_model=None if workload.lora else w.build_model(workload, w.REFERENCE, attention),
        args=config,
        train_dataset=Dataset.from_list(workload.examples(0)),
        processing_class=build_tokenizer(),
        peft_config=w.lora_config() if workload.lora else None,
    )
    if workload.lora:
        w.fill_adapters(trainer.model)
    # What `train()` does before its first step.
    if config.use_liger_kernel:
        apply_liger(trainer)
    if workload.checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def apply_liger(trainer: DPOTrainer) -> None:
    """Replaces layers of the policy, as `train()` does with `use_liger_kernel=True`.

    Raises:
        RuntimeError: no layer was replaced.
    """
    apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
    if not any(module.forward.__module__.startswith("liger_kernel") for module in trainer.model.modules()):
        raise RuntimeError(f"Liger must replace layers of {type(trainer.model).__name__}; it has replaced none")


def score_labelled_positions() -> Counter[str]:
    """From now on, TRL's head scores labelled positions only, as it does on CUDA.

    Returns:
        How often the head has asked where it runs, under "asked".

    Raises:
        Unavailable: the head of this TRL cannot be told.
    """
    if not hasattr(trl_utils, "_use_triton"):
        raise Unavailable("this TRL version does not select positions by `_use_triton`")
    seen: Counter[str] = Counter()

    def use_triton(device: torch.device) -> bool:
        seen["asked"] += 1
        return True

    trl_utils._use_triton = use_triton
    return seen


class TrainerStep:
    """Policy forward and backward, reference forward. No optimizer.

    Args:
        workload: model and lengths.
        mode: "stock", TRL as shipped; "labelled", TRL whose head scores labelled positions only, as
            it does on CUDA; "fastdpo", patched.
        share_prompts: option of `fastdpo.patch`.
        attention: attention implementation of the model.
        max_tokens: option of `fastdpo.patch`.
        layers_compiled: whether fastdpo compiles the layers.
        graphs: whether fastdpo replays CUDA graphs, for all batches once they are checked.
        decides: whether fastdpo decides about both by itself, in a training that is `SETTLING` steps old.
        compiled: whether the trainer compiles the models, as with `DPOConfig(torch_compile=True)`.
        liger: whether Liger's kernels replace layers of the policy, as with `DPOConfig(use_liger_kernel=True)`.
    """

    TRAINER = "trl.DPOTrainer"
    KINDS: tuple[str, ...] = ("policy", "reference")
    """The fused calls that a patched trainer must have made, and no others."""
    SHARES = True
    """Whether rows of a batch have a prompt in common."""
    SCORES = "log-probs"
    """What is compared of each model."""
    LAUNCHES = True
    """Whether the kernels of a step are launched."""

    def __init__(
        self,
        workload: Workload,
        mode: str,
        share_prompts: bool = True,
        attention: str = "sdpa",
        max_tokens: int | Literal["own", "auto"] | None = None,
        layers_compiled: bool = False,
        graphs: bool = False,
        decides: bool = False,
        compiled: bool = False,
        liger: bool = False,
    ) -> None:
        if attention in FLASH and not FLASH[attention]():
            raise Unavailable(f"transformers finds no package for {attention}")
        if liger and not (torch.cuda.is_available() and is_liger_kernel_available()):
            raise Unavailable("Liger's layers need a GPU and liger-kernel")
        if (graphs or decides) and self.LAUNCHES and not torch.cuda.is_available():
            raise Unavailable("CUDA graphs need a GPU")
        self.options = {"use_liger_kernel": liger, "torch_compile": compiled}
        self.fused, self.graphs, self.decides = mode == "fastdpo", graphs, decides
        if self.fused:
            os.environ["FASTDPO_STRICT"] = "1"  # a call that is not fused raises
            compile = layers_compiled or ("auto" if graphs or decides else False)
            if not decides:
                chosen = mock.patch.multiple(Pace, is_recorded=lambda *_: graphs, is_kept=lambda *_: graphs)
                chosen.start()  # where they pay is not the question
                weakref.finalize(self, chosen.stop)
            fastdpo.patch(self.TRAINER, share_prompts=share_prompts, max_tokens=max_tokens, compile=compile)
        self.attention, self.shares, self.compiles = attention, share_prompts, compiled or layers_compiled
        self.four_bit_weights = len(w.PROJECTIONS) * workload.size.layers if workload.quantized else 0
        self.accumulation = workload.accumulation
        self.labelled = score_labelled_positions() if mode == "labelled" else None
        quiet_datasets()
        with TemporaryDirectory() as directory:
            self.trainer = self._build(workload, Path(directory), attention)
        self.trainer.current_gradient_accumulation_steps = self.accumulation  # as `train()` does
        self.model = self.trainer.accelerator.prepare_model(self.trainer.model)
        self.batches = len(workload.batches)
        self.inputs = [self._inputs(workload, i) for i in range(self.batches)]
        policy = self.trainer.model.get_base_model() if workload.lora else self.trainer.model
        self.reference = getattr(self.trainer, "ref_model", None)  # none with adapters, and none of a RewardTrainer
        references = [] if self.reference is None else [self.reference]
        self.counters = [TokenCounter(model.base_model) for model in (policy, *references)]
        self.tokens_of_batches: dict[int, int] = {}  # by batch, those of its last step
        self.messages = self.settled = list[str]()
        self.calls = fastdpo.calls.copy()

    def _build(self, workload: Workload, directory: Path, attention: str) -> Any:
        return build_trainer(workload, directory, attention, **self.options)

    def _examples(self, workload: Workload, batch: int) -> list[dict[str, Any]]:
        """The examples of a batch in the format of the trainer's collator."""
        return workload.examples(batch)

    def _inputs(self, workload: Workload, batch: int) -> Any:
        """What a step of a batch is given."""
        return self.trainer.data_collator(self._examples(workload, batch))

    def _scores_of(self, output: Any) -> torch.Tensor:
        """What is compared of the output of a model: the log-probs of its labelled tokens."""
        return output.log_probs[output.label_mask]

    def _in_order(self, calls: list[torch.Tensor]) -> torch.Tensor:
        """The log-probs of all calls of a model in one step, in the order of the ground truth."""
        return torch.cat(calls)

    @contextmanager
    def _recorded(self, record: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
        """During a step, gives `record` what is compared of each call of a model, with its name. A hook would see that
        accumulated batches are merged.
        """
        reference = self.reference
        models = [self.model] if reference is None else [self.model, reference]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = nn.Module.__call__(module, *args, **kwargs)
            if any(module is x for x in models):
                is_reference = not torch.is_grad_enabled() if reference is None else module is reference
                record(f"{self.SCORES} of the {'reference' if is_reference else 'policy'}", self._scores_of(output))
            return output

        with ExitStack() as patches:
            for kind in {*map(type, models)}:
                patches.enter_context(mock.patch.object(kind, "__call__", call))
            yield

    def check(self) -> Arrays:
        """Log-probs of all labelled tokens, losses of all batches, gradient of the first batch."""
        if self.options["torch_compile"] or self.graphs or self.decides:
            self.count_once()
        if self.decides:
            self.trainer.state.max_steps = STEPS_LEFT
            self._say("on_train_begin")
            self.messages = messages.collected()
        for _ in range(-(-SETTLING // self.batches) if self.decides else SEEN if self.graphs else 0):
            self._run_all()
        arrays = self._check()
        self.settled = self.decided()
        for counter in self.counters:
            counter.take()
        return arrays

    def _check(self) -> Arrays:
        scores: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        losses, gradient = [], None
        for batch in range(self.batches):
            calls: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
            with self._recorded(lambda name, x, calls=calls: calls[name].append(x.detach().float())):
                losses.append(self._run(batch))
            for name, of_batch in calls.items():
                scores[name].append(self._in_order(of_batch))
            gradient = w.gradient_of(self.model) if gradient is None else gradient
            self.reset()
        paths = ["fused", *["replayed"] * self.graphs] if self.fused else []
        made = {call for call in fastdpo.calls if not self.decides or call[-1] != "replayed"}
        if made != {(self.TRAINER, kind, path) for kind in self.KINDS for path in paths}:
            raise RuntimeError(f"the calls must be {' and '.join(paths) or 'stock'} only; got {dict(fastdpo.calls)}")
        self.calls = fastdpo.calls.copy()
        arrays = {name: torch.cat(values) for name, values in scores.items()}
        arrays |= {"loss": torch.stack(losses), "gradient": gradient}
        return {name: value.cpu().numpy() for name, value in arrays.items()}

    def _run(self, batch: int) -> torch.Tensor:
        """The loss."""
        if self.decides:
            self._say("on_step_begin")
            self.trainer.state.global_step += 1
        return self.trainer.training_step(self.model, dict(self.inputs[batch]))

    def _say(self, event: str) -> None:
        """Has the trainer call its callbacks, as `train()` does."""
        getattr(self.trainer.callback_handler, event)(self.trainer.args, self.trainer.state, self.trainer.control)

    def step(self, batch: int) -> None:
        self._run(batch)
        self._count(batch)

    def count_once(self) -> None:
        """Counts the tokens of all batches and removes the hooks that count. For a number that changes in each call,
        models would be compiled anew, and models with hooks are not recorded.
        """
        with torch.compiler.set_stance("force_eager"), mock.patch.dict(os.environ, FASTDPO_STRICT="0"):
            for batch in 2 * [*range(self.batches)]:  # in the first steps, fastdpo examines models
                self.step(batch)
                self.reset()
        for counter in self.counters:
            counter.remove()
        self.counters = []

    def _run_all(self) -> None:
        for batch in range(self.batches):
            self._run(batch)
            self.reset()

    def _count(self, batch: int) -> None:
        if not self.counters:
            return
        self.tokens_of_batches[batch] = sum(counter.take() for counter in self.counters)

    def reset(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.trainer._metrics["train"].clear()

    def decided(self) -> list[str]:
        """What fastdpo has said about the decisions of this process, with what it has measured."""
        return [x for x in self.messages if re.search("layers|CUDA graphs", x)]

    def prove(self) -> None:
        """Checks that the steps were those that the side is named after, as far as their numbers do not show it.

        Raises:
            RuntimeError: they were others.
        """
        timed = fastdpo.calls - self.calls
        fused, replayed = (sum(n for (*_, path), n in timed.items() if path == x) for x in ("fused", "replayed"))
        if self.graphs and replayed < 0.9 * fused:
            raise RuntimeError(f"the side must replay graphs; of {fused} calls since the check it replayed {replayed}")
        if self.compiles and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            raise RuntimeError("the side must run compiled code; nothing was compiled")
        if self.labelled is not None and not self.labelled["asked"]:
            raise RuntimeError("the side must score labelled positions only; TRL's head was not told")
        if self.decides and not self.settled:
            raise RuntimeError("the side must decide by itself; fastdpo has decided nothing")
        runs = self.trainer.model.config._attn_implementation
        if self.attention in FLASH and runs != self.attention:
            raise RuntimeError(f"the side must run {self.attention}; its model runs {runs}")
        unshared, computed = (tokens[self.TRAINER, kind] for kind in ("unshared", "computed"))
        shared = computed < unshared
        if self.fused and shared != self.shares and (shared or self.SHARES):
            rule = "prompts" if self.shares else "no prompts"
            raise RuntimeError(f"the side must share {rule}; of {unshared} tokens it computed {computed}")
        states = [state for x in self.model.parameters() if (state := getattr(x, "quant_state", None))]
        if len(states) != self.four_bit_weights or any(state.quant_type != "nf4" for state in states):
            raise RuntimeError(f"{self.four_bit_weights} weights of the side must be quantized; {len(states)} are")

    def facts(self) -> dict[str, Any]:
        """Tokens per step in the backbones of policy and reference, including padding, and what was decided."""
        self.prove()
        of_batches = [self.tokens_of_batches[batch] for batch in sorted(self.tokens_of_batches)]
        found = {"tokens": sum(of_batches) / max(len(of_batches), 1), "tokens_of_batches": of_batches}
        decided = {"decided": self.settled, "decided_while_timed": self.decided()[len(self.settled) :]}
        return found | (decided if self.decides else {})
