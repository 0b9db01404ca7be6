"""`patch(max_tokens="auto")`: how many tokens a micro-batch may have, learned from the memory that steps have taken.

A step has micro-batches of n tokens: those of the largest batch that TRL would have run in it, or a larger number that
was learned. The peak of memory in a step, above what was in use before its largest micro-batch, bounds what these take
(`memory.Demand`), next to what is in use when the step ends, when weights, gradients and the states of the optimizer
are present. Where memory is proportional to the tokens, each round leaves the square root of the room that the one
before had, and a few rounds come close to the limit.

The peak is that since the process began: it is not reset, since other code may read it. One that something else has
caused, such as a generation, can only keep the number smaller.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ....logs import logger
from ....models.parts import base_of
from ....models.running import pace
from ....ops import memory
from ....ops.memory import Demand, MemoryReport, Size

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


EMPTY = dict(tokens=0, is_final=False, known=[], used=0, room=0.0)
"""What is known when a training begins: the number of tokens, whether it is final, what micro-batches take
(`memory.Demand`), and, when the latest step ended, the bytes that were used, and those that were left.
"""


class LearnedTokens:
    """The tokens of the micro-batches of one trainer.

    What was learned is a part of the trainer's state, which checkpoints save (see `EMPTY`).

    Args:
        trainer: the trainer.
        name: of its line.
        is_own: whether no micro-batch may have more tokens than the trainer's own largest padded batch so far. Each
            rank then learns by itself.
    """

    def __init__(self, trainer: Any, name: str, *, is_own: bool = False):
        self._trainer, self._name, self._is_own = trainer, name, is_own
        self._device = trainer.accelerator.device
        args = trainer.args  # an engine for generation takes memory back that it has given
        self._has_engine = getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", "") == "colocate"
        self._ran: Size = (0, 1)  # of the largest micro-batch of the step
        self._demand, self._room = Demand(), 0.0  # in the step: what is known, and the bytes of a micro-batch
        self._before: MemoryReport | None = None  # the largest micro-batch of the step
        self._key = ""

    def of_step(self, packed: int, padded: int = 0) -> int:
        """The tokens that a micro-batch of the step may have, by the memory that is free now.

        Args:
            packed: those of the largest batch that TRL would run in it.
            padded: the same with padding.
        """
        if self._has_engine:
            return packed
        saved = self._saved()
        self._demand = Demand(saved["known"])
        now = memory.report(self._device) if saved["known"] else None
        self._room = 0.0 if now is None else now.limit - max(saved["used"], now.used)
        fitting = self._demand.within(self._room)
        if self._is_own:
            saved["tokens"] = max(saved["tokens"], padded)
            return max(packed, min(saved["tokens"], fitting, self._useful))
        tokens = saved["tokens"] if saved["is_final"] else max(saved["tokens"], packed, padded)
        return tokens if now is None or self._room >= saved["room"] else max(packed, min(tokens, fitting))

    def fits(self, size: Size) -> bool:
        """Whether a micro-batch fits that has as many tokens as the step may have, and others that are scored."""
        return not self._is_own or self._has_engine or self._demand.of(size) <= self._room

    def ran(self, size: Size, *, is_alone: bool = False) -> None:
        """Takes note of the size of the largest micro-batch of a step on this rank, and whether it is the only one.
        While larger ones may follow, no CUDA graph is recorded.
        """
        self._ran = size
        pace.training().is_growing = not is_alone and self._is_growing()

    def _is_growing(self) -> bool:
        """Whether later steps may have larger micro-batches, on a device that reports its memory."""
        step, saved = self._trainer.state.global_step, self._saved()
        is_known = bool(saved["known"]) or step > 2 if self._is_own else saved["is_final"]
        return not self._has_engine and not is_known and memory.report(self._device) is not None

    def _is_learning(self) -> bool:
        """Whether the end of the step says more: not in the first one, in which the optimizer has no states."""
        saved = self._saved()
        is_known = not self._is_own and saved["is_final"]
        return self._trainer.state.global_step > 0 and not self._has_engine and not is_known

    def begin_largest(self) -> None:
        """Takes note of the memory before the largest micro-batch of a step."""
        self._before = memory.report(self._device) if self._is_learning() else None

    def learn(self) -> None:
        """Learns the tokens of later steps, on all ranks together, when the last micro-batch of a step has ended."""
        if not self._is_learning():
            return
        fitting, limit, after = self._ran[0], "the device reports no peak of memory", memory.report(self._device)
        is_skipped, saved = self._trainer.accelerator.optimizer_step_was_skipped, self._saved()  # states may be missing
        if self._before is not None and after is not None:
            limit = "more would not fit"
            used = max(self._before.used, after.used)
            taken, room = after.peak - self._before.used, after.limit - used
            memory.hold(self._device, "micro-batches", taken, f"of up to {self._ran[0]:,} tokens")
            demand = Demand(saved["known"])
            demand.note(self._ran, taken)
            fitting = demand.within(room)
            if not is_skipped:
                saved |= dict(known=[*demand.known.items()], used=used, room=room)
        if self._is_own:
            return
        fitting, ran = self._of_ranks(-1 if is_skipped else fitting, self._ran[0])
        if fitting < 0:
            return
        ran = max(ran, saved["tokens"])
        saved["tokens"] = tokens = max(ran, min(fitting, self._useful))
        saved["is_final"] = tokens >= self._useful or fitting < LEAST_GROWTH * ran
        if saved["is_final"] and self._trainer.accelerator.is_main_process:
            why = "more would not be faster" if tokens >= self._useful else limit
            text = f'max_tokens="auto" is {tokens} from here on, since {why}; max_tokens={tokens} repeats it'
            logger.info("fastdpo: %s: %s", self._name, text)

    @cached_property
    def _useful(self) -> int:
        return useful_tokens(base_of(self._trainer.model, "max_tokens"), self._device)

    def _of_ranks(self, fitting: int, ran: int) -> tuple[int, int]:
        """What fits on every rank, and the most that any has run."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1 or self._is_own:
            return fitting, ran
        numbers = accelerator.gather(torch.tensor([[fitting, -ran]], device=self._device)).amin(0).tolist()
        return numbers[0], -numbers[1]

    def _saved(self) -> dict[str, Any]:
        """What was learned with as many ranks on such a device."""
        if not self._key:
            report = memory.report(self._device)
            total, _ = self._of_ranks(0 if report is None else report.total, 0)
            what = "own" if self._is_own else "auto"
            self._key = f"fastdpo: {what} tokens on {self._trainer.accelerator.num_processes} ranks with {total} bytes"
        return self._trainer.state.stateful_callbacks.setdefault(self._key, dict(EMPTY))
