"""`patch(max_tokens="auto")`: how many tokens a micro-batch may have, learned from the memory that steps have taken.

A step has micro-batches of n tokens: those of the largest batch that TRL would have run in it, or a larger number that
was learned. The peak of memory in a step, above what was in use before its largest micro-batch, bounds what n tokens
take. They take it next to what is in use before the last micro-batch, when weights, gradients and the states of the
optimizer are present. For n' > n tokens, that is at most (n' / n)^2 times as much, since attention that stores its
scores grows with the square of the tokens, and all else in proportion. So

    n' = n * sqrt((limit - before) / taken)

stays within the limit. Where memory is proportional to the tokens, each round leaves the square root of the room that
the one before had, and a few rounds come close to the limit.

The peak is that since the process began: it is not reset, since other code may read it. One that something else has
caused, such as a generation, can only keep the number smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from ....logs import logger
from ....models.parts import base_of
from ....models.running import pace
from ....ops.memory import MemoryReport, hold
from ....ops.memory import report as memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_GROWTH = 1.25
"""The factor from which another round is worth other micro-batches."""

USEFUL_TOKENS = 16_384
"""The tokens from which a larger micro-batch of Qwen2.5-0.5B gains nothing on an H200 (benchmarks/results/gpu):
DPO steps of 2,406 to 10,519 tokens of the policy took 0.15 s each, which the host needs to launch them, and those of
16,185 and 22,653 took 12.0 and 11.8 us a token.
"""
WEIGHTS_OF_A_LAYER = 14.9e6
"""Of that model. The host takes as long for a layer of any model, and the device as long as its weights are many."""
USEFUL_RANGE = 4096, 65_536
"""Where that is applied: products of fewer rows are slower per row, and more tokens were not measured."""

USEFUL_ON_CPU = 4096
"""On a CPU, a micro-batch gains nothing by its size, but by what its rows share. A DPO step of 16 pairs of a Llama with
6 layers took 5.9, 5.7, 5.6, 5.8 and 5.7 s of a core in micro-batches of 200, 400, 800, 1,600 and 3,200 tokens. In one
of 4,931, whose activations are further beyond the caches, it took 6.2 s.
"""


def fitting_tokens(ran: int, taken: int, now: MemoryReport, used: int) -> int:
    """The tokens of a micro-batch that fits, where one of `ran` tokens takes `taken` bytes next to those that this
    process has `used`. Where that is less than what was taken, memory that is proportional to the tokens is the most.
    """
    ratio = max(now.limit - used, 1) / max(taken, 1)
    return int(ran * min(ratio, math.sqrt(ratio)))


def useful_tokens(model: PreTrainedModel, device: torch.device) -> int:
    """The tokens from which a larger micro-batch gains nothing, by arithmetic from what was measured."""
    if device.type == "cpu":
        return USEFUL_ON_CPU
    tables = [x for x in (model.get_input_embeddings(), model.get_output_embeddings()) if x is not None]
    ends = {id(x) for table in tables for x in table.parameters()}
    weights = sum(getattr(x, "ds_numel", x.numel()) for x in model.parameters() if id(x) not in ends)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    least, most = USEFUL_RANGE
    return int(min(max(USEFUL_TOKENS * WEIGHTS_OF_A_LAYER * layers / max(weights, 1), least), most))


class LearnedTokens:
    """The tokens of the micro-batches of one trainer.

    What was learned is a part of the trainer's state, which checkpoints save: the number of tokens, those of the
    largest micro-batch that was measured, the bytes that it took, those that were used before the last one of its step,
    the bytes that were left for both, and whether the number is final.

    Args:
        trainer: the trainer.
        name: of its line.
        is_own: whether no micro-batch may have more tokens than the trainer's own largest padded batch so far. Each
            rank then learns by itself.
    """

    def __init__(self, trainer: Any, name: str, *, is_own: bool = False):
        self._trainer, self._name, self._is_own = trainer, name, is_own
        args = trainer.args  # an engine for generation takes memory back that it has given
        self._has_engine = getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", "") == "colocate"
        self._ran = 0  # tokens of the largest micro-batch so far
        self._used = math.inf  # before the largest micro-batch of the step
        self._useful = 0
        self._key = ""

    @property
    def device(self) -> torch.device:
        return self._trainer.accelerator.device

    def of_step(self, packed: int, padded: int = 0) -> int:
        """The tokens that a micro-batch of the step may have, by the memory that is free now.

        Args:
            packed: those of the largest batch that TRL would run in it.
            padded: the same with padding.
        """
        if self._has_engine:
            return packed
        saved = self._saved()
        own, measured, taken, used, room, is_final = saved
        now = memory(self.device) if measured else None
        used = used if now is None else max(used, now.used)
        fitting = 0 if now is None else fitting_tokens(measured, taken, now, used)
        if self._is_own:
            saved[0] = max(own, padded)
            return max(packed, min(saved[0], fitting, self._useful_tokens()))
        tokens = own if is_final else max(own, packed, padded)
        return tokens if now is None or now.limit - used >= room else max(packed, min(tokens, fitting))

    def ran(self, tokens: int, *, is_alone: bool = False) -> None:
        """Takes note of the tokens of the largest micro-batch of a step on this rank, and whether it is the only one.
        While larger ones may follow, no CUDA graph is recorded.
        """
        self._ran = max(self._ran, tokens)
        pace.training().is_growing = not is_alone and self._is_growing()

    def _is_growing(self) -> bool:
        """Whether later steps may have larger micro-batches, on a device that reports its memory."""
        step, saved = self._trainer.state.global_step, self._saved()
        is_known = bool(saved[1]) or step > 2 if self._is_own else saved[-1]
        return not self._has_engine and not is_known and memory(self.device) is not None

    def is_learning(self) -> bool:
        """Whether the end of the step says more: not in the first one, in which the optimizer has no states."""
        saved = self._saved()
        is_known = self._ran <= saved[1] if self._is_own else saved[-1]
        return self._trainer.state.global_step > 0 and not self._has_engine and not is_known

    def begin_largest(self) -> None:
        """Takes note of the memory before the largest micro-batch of a step."""
        now = memory(self.device) if self.is_learning() else None
        self._used = math.inf if now is None else now.used

    def learn(self, before: MemoryReport | None, after: MemoryReport | None) -> None:
        """Learns the tokens of later steps, on all ranks together, from the memory before and after the last
        micro-batch of a step.
        """
        fitting, limit = self._ran, "the device reports no peak of memory"
        is_skipped, saved = self._trainer.accelerator.optimizer_step_was_skipped, self._saved()  # states may be missing
        if before is not None and after is not None:
            limit = "more would not fit"
            taken = int(after.peak - min(self._used, before.used))
            fitting = fitting_tokens(self._ran, taken, after, before.used)
            hold(self.device, "micro-batches", taken, f"of up to {self._ran:,} tokens")
            is_shown = not self._is_own or after.peak > saved[2] + saved[3]  # the peak of kept activations may hide it
            if is_shown and not is_skipped:
                saved[1:5] = self._ran, taken, before.used, int(after.limit - before.used)
        if self._is_own:
            return
        fitting, ran = self._of_ranks(-1 if is_skipped else fitting, self._ran)
        if fitting < 0:
            return
        useful = self._useful_tokens()
        ran = max(ran, saved[0])
        saved[0] = tokens = max(ran, min(fitting, useful))
        saved[-1] = tokens >= useful or fitting < LEAST_GROWTH * ran
        if saved[-1]:
            why = "more would not be faster" if tokens >= useful else limit
            text = f'max_tokens="auto" is {tokens} from here on, since {why}; max_tokens={tokens} repeats it'
            say(self._trainer, f"fastdpo: {self._name}: {text}")

    def _useful_tokens(self) -> int:
        self._useful = self._useful or useful_tokens(base_of(self._trainer.model, "max_tokens"), self.device)
        return self._useful

    def _of_ranks(self, fitting: int, ran: int) -> tuple[int, int]:
        """What fits on every rank, and the most that any has run."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1 or self._is_own:
            return fitting, ran
        numbers = accelerator.gather(torch.tensor([[fitting, -ran]], device=self.device)).amin(0).tolist()
        return numbers[0], -numbers[1]

    def _saved(self) -> list[int]:
        """What was learned with as many ranks on such a device."""
        if not self._key:
            report = memory(self.device)
            total, _ = self._of_ranks(0 if report is None else report.total, 0)
            what = "own max_tokens" if self._is_own else "max_tokens"
            self._key = f"fastdpo: {what} on {self._trainer.accelerator.num_processes} ranks with {total} bytes"
        return self._trainer.state.stateful_callbacks.setdefault(self._key, [0] * 6)


@contextmanager
def learning(learned: LearnedTokens | None) -> Iterator[None]:
    """Runs the last micro-batch of a step, and learns from it."""
    if learned is None or not learned.is_learning():
        yield
        return
    before = memory(learned.device)
    yield
    learned.learn(before, memory(learned.device))


def say(trainer: Any, text: str) -> None:
    """Shows a text on the main process, next to its progress bars or in the log."""
    if not trainer.accelerator.is_main_process:
        return
    if trainer.args.disable_tqdm:
        logger.info("%s", text)
    else:
        tqdm.write(text)
