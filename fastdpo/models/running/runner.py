"""How packed calls run the backbone of a model: its layers as they are, compiled, or CUDA graphs of either.

Graphs come first: they take a second, and are kept where a replay is measured to be faster (`graphs`). Layers are
compiled where that pays in what is left of a training (`pace`), and if they are measured to be faster. That is decided
between two steps of the optimizer. A training whose checkpoint or whose notes say what was decided begins with it.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ...distributed import Ballot, rank_and_world_size
from ...logs import logger
from ...ops.choice import notes
from ...ops.choice.notes import Compiled
from ..examine.comparable import forked_random_state
from . import graphs, pace
from .activations import KeptActivations
from .compiled import CompiledLayers, trainer_compiles
from .graphs import Graphs, Inputs
from .pace import LEAST_SAVING, MARGIN, Pace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..identity.structure import Structure

Compile = Literal["auto"] | bool
"""The option: whether layers are compiled, and graphs recorded where these pay. "auto": both where they pay."""

PAIRS = 3
"""Number of forward passes of compiled layers that are measured, each next to one of the layers as they are."""

GRAPHS = 3
"""Number of graphs that training compiles for a layer, where a forward without gradients compiles one."""


class Runner:
    """Runs the backbone of one model.

    Args:
        integration: name under which calls are counted.
        role: of the model, for log lines.
        compile: the option.

    Attributes:
        device: the type of devices on which it decides what pays; None if it decides nothing.
        compiled: the layers, if they are compiled.
        graphs: the CUDA graphs, if there may be any.
        kept: decides which layers keep their activations.
        may_replay: whether the call may replay one.
    """

    def __init__(self, integration: str, role: str, compile: Compile) -> None:
        self._given, self._name = (integration, role, compile), f"{integration} ({role})"
        self._compile = compile
        self.device = graphs.DEVICE if compile == "auto" else None
        self.compiled = CompiledLayers(self._name) if compile is True else None
        self.graphs = Graphs(integration, role) if compile else None
        self.kept = KeptActivations(self._name)
        self._begin(pace.training())

    def _begin(self, training: pace.Training) -> None:
        """Decides anew, for a training that begins."""
        if self._compile == "auto":
            self._run_as_they_are()
        if self.graphs is not None:
            self.graphs.begin_training()
        self._training, self._step = training, 0
        is_alone = rank_and_world_size()[1] == 1
        self._paces = {x: Pace(training, has_backward=x, is_alone=is_alone) for x in (True, False)}
        self._pace = self._paces[True]
        self._is_decided = self._compile != "auto"
        self._ballots = [Ballot(f"{self._name}: {x}") for x in ("compile", "keep")]
        self._is_tried = self.may_replay = False
        self._saving: float | None = None
        self._key = ""

    def __reduce__(self) -> tuple:
        """A copy of a model begins anew."""
        return Runner, self._given

    def is_on(self) -> bool:
        """Whether calls on such a device are run by this object."""
        return bool(self._compile) and (self.device is None or (pace.is_on() and not trainer_compiles()))

    def begin(
        self,
        model: PreTrainedModel,
        structure: Structure,
        backbone: PreTrainedModel,
        verdict: object,
        kind: str,
        obstacle: str | None,
    ) -> None:
        """Prepares a packed call.

        Args:
            model: the model.
            structure: as it is now.
            backbone: of the model.
            verdict: the same object for as long as the model is what it was.
            kind: of the call (see `calls.calls`).
            obstacle: what the model does in the call that cannot be recorded, or None.
        """
        if self._training is not pace.training():
            self._begin(pace.training())
        self._pace = self._paces[torch.is_grad_enabled()]
        self._pace.call()
        if not self._is_decided and self._training.done != self._step and self._pace is self._deciding:
            self._step = self._training.done
            self._decide(model)
        elif self._pace.saved_by_change is not None:
            self._note_saving(model.device)
        if self.compiled is not None:
            self.compiled.begin(model, structure)
            if self.compiled.reason is not None and not self._is_decided:
                self._settle(False, self.compiled.reason.named)
        self.may_replay = self.graphs is not None and self.graphs.begin(model, backbone, verdict, kind, obstacle)

    def states(self, verdict: Any, inputs: Inputs, index: Tensor) -> Tensor | None:
        """The states [N, D] of some tokens of a batch, if the call replays a graph; None if the layers run."""
        if self._is_tried and self._pace is self._deciding:
            self._try(verdict.backbone, inputs)
        states = None
        if self.graphs is not None and self.may_replay and not self._is_tried:
            states = self.graphs.states(verdict, inputs, index, self._pace)
        self._pace.take(inputs["input_ids"].shape[1], is_replayed=states is not None)
        return states

    def interrupt(self) -> None:
        """Leaves out the time since the call was prepared, in which something else was done."""
        self._pace.interrupt()

    def release(self) -> bool:
        """Gives the memory of recordings back, after there was no more. Returns whether there were any."""
        self.may_replay = False
        return self.graphs is not None and self.graphs.release()

    def restore(self) -> None:
        """Makes all calls run the layers as they are."""
        if self.compiled is not None:
            self.compiled.restore()
        if self.graphs is not None:
            self.graphs.forget()

    @property
    def _deciding(self) -> Pace:
        """The calls by which layers are compiled: those with gradients, if there are any."""
        return self._paces[True] if self._paces[True].calls else self._paces[False]

    def _decide(self, model: PreTrainedModel) -> None:
        """Compiles the layers if that is known to pay, or has them tried if it is expected to, on all ranks alike."""
        settled = self._training.settled.get(self._name)
        if settled is not None:
            self._settle(settled, "as the checkpoint says")
            return
        if self._saving is None and not self._is_tried:
            self._ask(model)
        saving = None if self._saving is None else self._ballots[1].smallest(self._step, self._saving)
        if saving is not None:
            pays = saving > LEAST_SAVING
            self._settle(pays, f"which saves {saving:.0%} of a step" if pays else "which would not pay")

    def _ask(self, model: PreTrainedModel) -> None:
        """If layers are expected to pay on all ranks, takes what they save from the notes, or has them tried."""
        if not self._key:
            self._parameters = sum(x.numel() for x in model.parameters())
            self._key = f"{type(model).__name__} of {self._parameters} parameters in {model.dtype}"
            self._noted = notes.read(model.device).layers.get(self._key)
        gain = self._deciding.gain_of_compiling(self._parameters, self._noted)
        if self._ballots[0].smallest(self._step, gain if gain > 0 else None) is None:
            return
        if self._noted is not None:  # which other ranks may lack
            self._saving = self._noted.saving
        else:
            self.compiled, self._is_tried = CompiledLayers(self._name, is_asked=False), True

    def _try(self, backbone: nn.Module, inputs: Inputs) -> None:
        """Measures by forward passes without gradients what compiled layers save of one batch. An error decides for the
        layers as they are, and is not noted.
        """
        compiled, self._is_tried, self._saving = self.compiled, False, 0.0
        if compiled is None or compiled.reason is not None:
            return
        try:
            first, before, after = self._times(compiled, backbone, inputs)
        except Exception as error:  # no training ends by a trial
            compiled.fail(backbone, error)
        else:
            if compiled.reason is None:
                saving, cost = self._pace.saving(before, after), GRAPHS * first
                notes.note(inputs["input_ids"].device, layers={self._key: Compiled(cost, saving)})
                left = self._pace.between * self._training.further(self._pace.calls)
                self._saving = saving if saving * left > MARGIN * (cost - first) else 0.0
                self._pace.lost += 0.0 if self._saving > LEAST_SAVING else first
        self._pace.interrupt()
        self._run_as_they_are()

    def _times(self, compiled: CompiledLayers, backbone: nn.Module, inputs: Inputs) -> tuple[float, float, float]:
        """The seconds of a forward pass that compiles layers, of one by the layers as they are, and of one by those.
        Where calls replay graphs, these do too, since compiled layers then save nothing of the host's time.
        """
        device, other = inputs["input_ids"].device, self.graphs
        with forked_random_state(), torch.no_grad():
            run = partial(backbone, **inputs)
            first = pace.seconds(run, device)
            after = (other and other.forward(backbone, inputs)) or run
            with compiled.as_they_are():
                before = (other and other.forward(backbone, inputs)) or run
            pairs = []
            for _ in range(PAIRS):
                of_compiled = pace.seconds(after, device)
                with compiled.as_they_are():
                    pairs.append((pace.seconds(before, device), of_compiled))
        before_median, after_median = (median(x) for x in zip(*pairs, strict=True))
        return first, before_median, after_median

    def _note_saving(self, device: torch.device) -> None:
        """Notes for later processes what compiled layers save of whole steps, which a trial has guessed."""
        saving, self._pace.saved_by_change = self._pace.saved_by_change, None
        noted = notes.read(device).layers.get(self._key)
        if noted is not None and saving is not None and self._pace is self._deciding:
            notes.note(device, layers={self._key: noted._replace(saving=saving)})

    def _run_as_they_are(self) -> None:
        if self.compiled is not None:
            self.compiled.restore()
            self.compiled = None

    def _settle(self, compiles: bool, why: str) -> None:
        self._is_decided, self._training.settled[self._name] = True, compiles
        if not compiles:
            self._run_as_they_are()
        else:
            self.compiled = self.compiled or CompiledLayers(self._name, is_asked=False)
            for each in self._paces.values():
                each.change()
            if self.graphs is not None:
                self.graphs.forget()
        state, other = ("compiled", False) if compiles else ("not compiled", True)
        logger.info(
            "fastdpo: %s: layers are %s from step %d on, %s; compile=%s decides otherwise, and FASTDPO_AUTO=0 nothing",
            *(self._name, state, self._step + 1, why, other),
        )
