"""How packed calls run the backbone of a model: its layers as they are, compiled, or CUDA graphs of either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from .compiled import CompiledLayers
from .graphs import Graphs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .structure import Structure


class Runner:
    """Runs the backbone of one model.

    Args:
        integration: name under which calls are counted.
        role: of the model, for log lines.
        compiles: whether layers are compiled.
        records: whether CUDA graphs are recorded.

    Attributes:
        compiled: the layers, if they are compiled.
        graphs: the CUDA graphs, if there may be any.
    """

    def __init__(self, integration: str, role: str, compiles: bool, records: bool) -> None:
        self.compiled = CompiledLayers(f"{integration} ({role})") if compiles else None
        self.graphs = Graphs(integration, role) if records else None

    def begin(
        self,
        model: PreTrainedModel,
        structure: Structure,
        backbone: PreTrainedModel,
        verdict: object,
        kind: str,
        obstacle: str | None,
    ) -> bool:
        """Prepares a packed call, and returns whether it may replay a graph.

        Args:
            model: the model.
            structure: as it is now.
            backbone: of the model.
            verdict: the same object for as long as the model is what it was.
            kind: of the call (see `calls.calls`).
            obstacle: what the model does in the call that cannot be recorded, or None.
        """
        if self.compiled is not None:
            self.compiled.begin(model, structure, kind)
        return self.graphs is not None and self.graphs.begin(model, backbone, verdict, kind, obstacle)

    def replayed(self, verdict: object, inputs: dict[str, Any], index: Tensor) -> Tensor | None:
        """The states [N, D] of some tokens of a batch, if the call may replay a graph; None if the layers run."""
        return cast(Graphs, self.graphs).states(verdict, inputs, index)

    def restore(self) -> None:
        """Makes all calls run the layers as they are."""
        if self.compiled is not None:
            self.compiled.restore()
        if self.graphs is not None:
            self.graphs.forget()
