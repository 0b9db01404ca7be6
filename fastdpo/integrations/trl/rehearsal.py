"""`patch(longest_first=True)` for TRL's DPOTrainer: a rehearsal of the batch with the most tokens.

The batch runs after the first optimizer step, when the optimizer has its states, and before the next
batches are drawn. Where gradients are accumulated it runs twice, so that gradients are in memory as
in a step. Then everything that a step changes is put back, and the training goes on as without.

Every rank rehearses its own largest batch at the same time. Under FSDP2 the last run reduces
gradients as a step does, because the unreduced gradients take more memory. Under DDP nothing is
reduced.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ...logs import logger
from ...models import fallback, forward
from ...models.layouts import SharePrompts
from ..deferred_metrics import stored
from ..ledger import Ledger
from ..protocol import STATE
from ..replacements import temporarily
from .models import models_of
from .prompt_groups import require_supported
from .token_budget import lengths_of, shares_prompts, unreadable_reason

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from ...batching import StepPlanner
    from ...lengths import PairLengths

SMALL_BUFFER = 1 << 16
"""Elements of a buffer whose contents are put back. Larger ones are quantized weights."""


class Largest(NamedTuple):
    """The batch that is rehearsed.

    Attributes:
        pairs: their indices in the dataset.
        tokens: that a model computes for them.
        is_drawn: whether the training draws this batch. If not, its pairs are the largest of the
            dataset, or the largest that fit together into a budget of tokens.
    """

    pairs: list[int]
    tokens: int
    is_drawn: bool

    def __str__(self) -> str:
        kind = "the largest batch" if self.is_drawn else "a batch of the largest pairs"
        return f"{kind}, {len(self.pairs)} pairs with {self.tokens:,} tokens"


class Rehearsal:
    """Rehearses the largest batch of each training of one trainer.

    Args:
        share_prompts: the option of `patch`.
    """

    def __init__(self, share_prompts: SharePrompts):
        self._share_prompts: SharePrompts = share_prompts
        self._prepared: tuple[Any, PairLengths] | None = None  # the loader of a training that has not rehearsed yet
        self._is_called = False

    def install(self, trainer: Any) -> None:
        stock = trainer.get_train_dataloader

        def get_train_dataloader() -> Any:
            loader = stock()
            if vars(trainer).get(STATE) is not None:  # still patched
                self._prepare(trainer, loader)
            return loader

        vars(trainer)["get_train_dataloader"] = get_train_dataloader

    def _prepare(self, trainer: Any, loader: Any) -> None:
        require_supported("longest_first", unsupported_reason(trainer, loader))
        planner = _planner(loader)
        lengths = lengths_of(trainer) if planner is None else planner.lengths
        self._prepared = loader, lengths
        if not self._is_called:
            trainer.add_callback(_callback(self, trainer))
            self._is_called = True

    def run(self, trainer: Any) -> None:
        """Rehearses the largest batch, unless this was done or the trainer is not patched any more."""
        if self._prepared is None or vars(trainer).get(STATE) is None:
            return
        loader, lengths = self._prepared
        self._prepared = None
        largest = self._largest(trainer, loader, lengths)
        try:
            # No batch of the training shares less.
            with _without_traces(trainer), forward.sharing_in_pairs(models_of(trainer).values()):
                self._run(trainer, loader, largest)
        except RuntimeError as error:
            if _is_out_of_memory(error):
                error.add_note(
                    f"fastdpo: longest_first: memory ran out in {largest}, which ran after step "
                    f"{trainer.state.global_step}. Lower {_advice(loader)}"
                )
            raise
        peak = ""
        if trainer.args.device.type == "cuda":
            peak = f"; peak memory {torch.cuda.max_memory_allocated(trainer.args.device) / 2**30:.2f} GiB"
        logger.info("fastdpo: longest_first: memory suffices for %s%s", largest, peak)

    def _run(self, trainer: Any, loader: Any, largest: Largest) -> None:
        from ..drawn_batches import collated

        accelerator, model = trainer.accelerator, trainer.model_wrapped
        accumulates = trainer.args.gradient_accumulation_steps > 1 or _max_tokens(loader) is not None
        reduces_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for is_last in (False, True) if accumulates else (True,):
            reduces = accelerator.is_fsdp2 and (is_last or reduces_each)
            with nullcontext() if reduces else accelerator.no_sync(model):
                trainer.training_step(model, collated(loader, largest.pairs), None)

    def _largest(self, trainer: Any, loader: Any, lengths: PairLengths) -> Largest:
        from ..drawn_batches import drawn_batches, largest_pairs

        args = trainer.args
        if forward.is_fused(trainer.model):
            share = shares_prompts(self._share_prompts, trainer.model)
            sizes = lengths.packed(share=share, store_all=trainer.aux_loss_enabled)

            def tokens(pairs: list[int]) -> int:
                return int(sizes[pairs].sum())
        else:
            sizes = lengths.longest

            def tokens(pairs: list[int]) -> int:
                return 2 * len(pairs) * int(sizes[pairs].max())

        drawn = drawn_batches(loader, args.gradient_accumulation_steps, trainer.state.max_steps)
        if drawn is not None:
            pairs = max(drawn, key=tokens)
        else:
            ranks, max_tokens = trainer.accelerator.num_processes, _max_tokens(loader)
            n_pairs = trainer._train_batch_size
            if max_tokens is not None:
                n_pairs *= args.gradient_accumulation_steps * ranks
            if args.accelerator_config.split_batches:
                n_pairs //= ranks
            pairs = largest_pairs(sizes, n_pairs, max_tokens)
        return Largest(pairs, tokens(pairs), drawn is not None)


def _callback(rehearsal: Rehearsal, trainer: Any) -> TrainerCallback:
    from transformers import TrainerCallback

    class RehearsalCallback(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            is_over = control.should_training_stop
            if not is_over and not trainer.accelerator.optimizer_step_was_skipped:  # it has its states otherwise
                rehearsal.run(trainer)

    return RehearsalCallback()


def _planner(loader: Any) -> StepPlanner | None:
    """What cuts the steps of a loader by a budget of tokens, if anything does."""
    from ..budgeted_loader import StepSampler

    sampler = loader.batch_sampler
    return sampler.planner if isinstance(sampler, StepSampler) else None


def _max_tokens(loader: Any) -> int | None:
    planner = _planner(loader)
    return None if planner is None else planner.max_tokens


def _is_out_of_memory(error: RuntimeError) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def _advice(loader: Any) -> str:
    if _max_tokens(loader) is not None:
        return "max_tokens of fastdpo.patch, or max_length"
    return "per_device_train_batch_size or max_length, or set max_tokens of fastdpo.patch to fewer tokens"


def unsupported_reason(trainer: Any, loader: Any) -> str | None:
    """Why the largest batch of a trainer cannot be rehearsed, or None."""
    reason = None if _max_tokens(loader) is not None else unreadable_reason(trainer, loader)
    if reason is not None:
        return reason
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed, whose engine keeps what a backward pass computes"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "version 1 of FSDP"
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        return f"optim={optimizer!r}, which changes weights in the backward pass"
    if any(x._post_accumulate_grad_hooks for x in trainer.model.parameters()):
        return "hooks that run when a gradient is accumulated, which may change weights"
    return None


@contextmanager
def _without_traces(trainer: Any) -> Iterator[None]:
    """Puts back, after the block, what a step of a trainer changes except for data loader and optimizer."""
    state, metrics = vars(trainer)[STATE], stored(trainer, "_metrics")
    models = models_of(trainer).values()
    numbers = {name: x for name, x in vars(trainer).items() if isinstance(x, int | float)}
    with ExitStack() as undo:
        undo.enter_context(_same_random_states())
        undo.callback(vars(trainer).update, numbers)
        for counter in (fallback.calls, fallback.tokens):
            undo.callback(_refill, counter, counter.copy())
        for of_mode in metrics.values():
            undo.callback(_refill, of_mode, dict(of_mode))
            of_mode.clear()
        undo.enter_context(temporarily(state, ledger=Ledger(), memory=state.memory.scratch()))
        _put_back_modules(undo, [module for model in models for module in model.modules()])
        for parameter in trainer.model.parameters():
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        yield


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    container.update(contents)


@contextmanager
def _same_random_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the one that others draw from
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=list(cuda)):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _put_back_modules(undo: ExitStack, modules: Iterable[nn.Module]) -> None:
    """Registers what puts back buffers and attributes, such as those of rotary embeddings that
    grow with the longest row.
    """
    for module in modules:
        attributes = {name: x for name, x in vars(module).items() if isinstance(x, int | float | torch.Tensor | None)}
        undo.callback(vars(module).update, attributes)
        undo.callback(module._buffers.update, dict(module._buffers))
        for buffer in module._buffers.values():
            if buffer is not None and buffer.numel() <= SMALL_BUFFER:
                undo.callback(_copy_into, buffer, buffer.detach().clone())


@torch.no_grad()
def _copy_into(buffer: torch.Tensor, contents: torch.Tensor) -> None:
    if not torch.equal(buffer, contents):  # a write would change the version
        buffer.copy_(contents)
