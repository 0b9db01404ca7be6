"""How the backbone runs.

A `Runner` is all that other packages know of it: nothing outside names a graph or a compiled layer.

    runner.py        runs it by its layers, by compiled layers, or by a CUDA graph of either
    pace.py          finds whether one of them pays, by the clock
    compiled.py      compiled layers
    graphs.py        when a CUDA graph is recorded and replayed
    recording.py     a recording of one shape, with cuts.py (which layers it holds)
    captures.py      what CUDA records, and its memory
    recordable.py    what rules a recording out
    activations.py   which layers keep their activations where the trainer has them computed again
"""

from .runner import Compile, Runner

__all__ = ["Compile", "Runner"]
