"""`patch(max_tokens=...)` for TRL's DPOTrainer and RewardTrainer: optimizer steps are cut by a budget of tokens.

The functions are set on the trainer itself, in front of those of its class. A subclass that
overrides `training_step` therefore is called for one micro-batch at a time, as in TRL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ....data.columns import COLUMNS, column_names
from ....models.calls import outcomes
from ....models.parts import base_of
from ....models.state import SharePrompts
from ....models.support import rope_reason
from ...bypass import STATE, bypass_reason, is_overridden
from ...line import TrainerLine
from ...replacements import temporarily
from ..gathering import StepMetrics
from .learned_tokens import LearnedTokens, learning, shows_progress
from .loaders import DRAWS, require_supported, unsupported_loader_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ....lengths import PairLengths

NOT_A_MEAN_OVER_PAIRS = {"aot", "aot_unpaired", "sft"}


STEPS = (
    *(f"transformers.trainer:Trainer.{name}" for name in ("_run_epoch", "training_step", "_prepare_inputs")),
    "transformers.trainer:Trainer._maybe_log_save_evaluate",
    *(f"transformers.trainer:Trainer.{name}" for name in ("get_batch_samples", "_get_num_items_in_batch")),
    *(f"accelerate.accelerator:Accelerator.{name}" for name in ("backward", "no_sync")),
)
"""The functions that make steps of batches (see `TrainerLine.relies_on`)."""

RELIES_ON = (
    *(*STEPS, *DRAWS, "compute_loss", ":DataCollatorForPreference.torch_call"),
    *(f"transformers.trainer:Trainer.{name}" for name in ("floating_point_ops", "_track_num_input_tokens")),
    *(f"accelerate.data_loader:{name}" for name in ("DataLoaderShard.__iter__", "skip_first_batches")),
)
"""The functions that `max_tokens` relies on in these trainers."""

LOSS_FUNCTIONS = ("compute_loss", "_compute_loss", "compute_ref_log_probs", "_compute_kl_logps")
"""The functions in which TRL's trainers compute the loss of a batch. Each of them has some."""


class TokenBudget:
    """Cuts the steps of one trainer of a line."""

    def __init__(self, line: TrainerLine):
        self._line, self._options = line, line.options
        self._rewards = line.rewards is not None
        self._metrics = StepMetrics()
        self._learned: LearnedTokens | None = None

    def install(self, trainer: Any) -> None:
        is_known = hasattr(trainer, "_track_num_input_tokens")
        require_supported("max_tokens", None if is_known else "the training loop of transformers before version 5")
        require_supported("max_tokens", own_loss_reason(trainer, self._line.trainer_class()))
        for name, function in {
            "get_train_dataloader": self._get_train_dataloader,
            "training_step": self._training_step,
            "floating_point_ops": _of_micro_batches,
            "_track_num_input_tokens": _of_micro_batches,
        }.items():
            vars(trainer)[name] = functools.partial(function, trainer, getattr(trainer, name))

    def _get_train_dataloader(self, trainer: Any, stock: Callable[[], Any]) -> Any:
        from ....batching import CostModel, StepPlanner
        from .budgeted_loader import with_token_budget

        loader = stock()
        if vars(trainer).get(STATE) is None:  # unpatched since
            return loader
        require_supported("max_tokens", unsupported_reason(trainer, loader, self._rewards))
        self._metrics.start_step()
        options = self._options
        lengths, model = lengths_of(trainer, self._rewards), base_of(trainer.model, "max_tokens")
        width = widest_batch(trainer.data_collator, lengths.longest)
        require_supported("max_tokens", width_reason(model, width))
        share = shares_prompts(options.share_prompts, trainer.model)
        longest = int(lengths.packed(share=share).max(initial=1))
        planner = StepPlanner(
            lengths,
            longest if options.max_tokens == "auto" else cast(int, options.max_tokens),
            ranks=trainer.accelerator.num_processes,
            cost=CostModel.of_model(model),
            share_prompts=share,
            op="patch",
        )
        accumulation = trainer.args.gradient_accumulation_steps
        if options.max_tokens == "auto":
            drawn = 1 + loader.num_workers * (loader.prefetch_factor or 0)  # items of the loader, before they are due
            self._learned = LearnedTokens(trainer, self._line.name, longest, ahead=-(-drawn // accumulation))
        rank = trainer.accelerator.process_index
        return with_token_budget(loader, planner, accumulation, rank, self._learned)

    def _training_step(
        self, trainer: Any, stock: Callable[..., Tensor], model: nn.Module, inputs: Any, *args
    ) -> Tensor:
        from .budgeted_loader import MicroBatches

        if not isinstance(inputs, MicroBatches):
            return stock(model, inputs, *args)
        loss = torch.zeros((), device=trainer.args.device)
        ends_step = trainer.accelerator.sync_gradients
        is_patched = vars(trainer).get(STATE) is not None
        outcomes[self._line.name, "steps"] += ends_step
        outcomes[self._line.name, "micro-batches"] += len(inputs)
        for i, (batch, share) in enumerate(inputs):
            is_last = i == len(inputs) - 1
            with (
                temporarily(trainer, current_gradient_accumulation_steps=1 / share),  # the loss is divided by it
                without_sync(trainer, model) if ends_step and not is_last else nullcontext(),
                learning(self._learned) if ends_step and is_last else nullcontext(),
                nullcontext() if self._learned is None else self._learned.counting(),
                self._metrics.micro_batch(trainer, ends_step and is_last) if is_patched else nullcontext(),
            ):
                loss = loss + stock(model, batch, *args)
        return loss


@contextmanager
def without_sync(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without reducing them, as the Trainer does before the end of a step."""
    accelerator = trainer.accelerator
    before = accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(False)  # read by accelerate's backward pass for DeepSpeed
    try:
        with nullcontext() if trainer.is_deepspeed_enabled else accelerator.no_sync(model):
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(before)


def _of_micro_batches(trainer: Any, stock: Callable[[Any], Any], inputs: Any) -> Any:
    """Calls a function for each micro-batch, and adds up what it returns."""
    from .budgeted_loader import MicroBatches

    if not isinstance(inputs, MicroBatches):
        return stock(inputs)
    return sum(stock(batch) or 0 for batch, _ in inputs)


def lengths_of(trainer: Any, rewards: bool) -> PairLengths:
    """The lengths of the pairs of a trainer, as its collator truncates them, which that of RewardTrainer does not."""
    from ....lengths import pair_lengths

    collator = trainer.data_collator
    truncation = () if rewards else (collator.max_length, collator.truncation_mode)
    return pair_lengths(
        trainer.train_dataset, *truncation, rewards=rewards, op="patch", progress=shows_progress(trainer)
    )


def shares_prompts(option: SharePrompts, model: nn.Module) -> bool:
    """Whether an option of `patch` computes prompts once in every step. With "deterministic", prompts
    may be computed twice in models with dropout.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return option is True or bool(option and not any(module.p > 0 for module in modules))


def widest_batch(collator: Any, lengths: np.ndarray) -> int:
    """The width of the widest batch of rows.

    Args:
        collator: of the trainer.
        lengths: [N], numbers of tokens of rows after truncation.
    """
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    return -(-int(lengths.max(initial=0)) // multiple) * multiple


def width_reason(model: PreTrainedModel, width: int) -> str | None:
    """Why micro-batches, which may be narrower than the batches of the trainer, have other results if one of these is
    that wide, or None.
    """
    reason = rope_reason(model, width)
    return None if reason is None else f"batches of up to {width} tokens, since {reason}; truncate by max_length"


def unsupported_reason(trainer: Any, loader: Any, rewards: bool) -> str | None:
    """Why the steps of a trainer cannot be cut, or None."""
    reason = unsupported_loader_reason(trainer, loader) or unsupported_processes_reason(trainer)
    if reason is not None:
        return reason
    if not (rewards or hasattr(trainer, "aux_loss_enabled")):
        return "TRL before 1.8"
    columns = COLUMNS[1:] if rewards else COLUMNS
    if not column_names(loader.dataset).issuperset(columns):
        return f"datasets without the columns {', '.join(columns)}, such as those with images"
    if not (rewards or hasattr(trainer.data_collator, "truncation_mode")):
        return f"the data collator {type(trainer.data_collator).__name__}, whose truncation is not known"
    if trainer.args.auto_find_batch_size:
        return "auto_find_batch_size=True; max_tokens bounds the memory of a batch by itself"
    if rewards:
        return None
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of routers, which is not a mean over pairs"
    losses = NOT_A_MEAN_OVER_PAIRS & set(trainer.loss_types)
    if losses:
        return f"loss_type={sorted(losses)[0]!r}, which is not a mean over pairs"
    return None


def own_loss_reason(trainer: Any, stock: type) -> str | None:
    """Why rows may weigh more in one micro-batch than in another, if the class of a trainer overrides the loss or the
    steps of TRL's; or None.
    """
    is_own = is_overridden(trainer, stock, (name for name in LOSS_FUNCTIONS if hasattr(stock, name)))
    if not is_own and not bypass_reason(trainer, stock, ("training_step",)):
        return None
    return f"{type(trainer).__name__}, which overrides the loss or the steps of {stock.__name__}"


def unsupported_processes_reason(trainer: Any) -> str | None:
    """Why the processes of a trainer cannot train on micro-batches of any size, or None."""
    if trainer.args.n_gpu > 1:
        return "torch.nn.DataParallel; start one process for each GPU"
    if trainer.accelerator.parallelism_config is not None:
        return "parallelism_config"
    if trainer.accelerator.num_processes > 1 and not trainer.args.accelerator_config.even_batches:
        return "even_batches=False on several ranks"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "models that transformers shards while it loads them"
    return None
