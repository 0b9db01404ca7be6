"""Which states of prompts are kept for the backward pass: those of all layers, or of one at a time."""

import functools
import weakref
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from fastdpo.models import attention
from fastdpo.models.mixers import finding
from fastdpo.models.mixers.known import Scan
from tests.support.models.families import tiny_family
from tests.support.models.mixer_errors import pairs, results

MIXERS = 3
LAYERS = dict(num_hidden_layers=MIXERS + 1, layer_types=["linear_attention"] * MIXERS + ["full_attention"])
SIZES = {
    "qwen3_5_text": ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "kimi_linear": ("linear_num_heads", "linear_head_dim", "linear_head_dim"),
}
"""Maps a family to the names of its heads, key size and value size."""


@dataclass
class Kept:
    """The states that branches begin with, while their memory is in use.

    Attributes:
        alive: number of scans whose states are in use.
        largest: the largest such number.
        bytes: of a state of one sequence and layer.
    """

    alive: int = 0
    largest: int = 0
    bytes: set[int] = field(default_factory=set)

    def add(self, states: Tensor) -> None:
        self.alive += 1
        self.largest = max(self.largest, self.alive)
        self.bytes.add(states[0].numel() * states.element_size())
        weakref.finalize(states.untyped_storage(), self._free)

    def _free(self) -> None:
        self.alive -= 1


@pytest.fixture
def kept(monkeypatch) -> Kept:
    found, stock = Kept(), Scan.run

    def run(self, original, *args, **kwargs):
        @functools.wraps(original)
        def recording(*of_scan, **named):
            if (states := named.get(self.initial_state)) is not None:
                found.add(states)
            return original(*of_scan, **named)

        return stock(self, recording, *args, **kwargs)

    monkeypatch.setattr(Scan, "run", run)
    return found


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["stored", "reentrant", "recomputed"])
@pytest.mark.parametrize("name", SIZES)
def test_checkpointing_keeps_the_states_of_one_layer(kept, name, use_reentrant):
    model = tiny_family(name, **LAYERS).train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    attention.switch(model)
    assert len(finding.mixers_of(model)) == MIXERS
    results(model, *pairs(), packed=True)
    assert kept.largest == (MIXERS if use_reentrant is None else 1)
    assert not kept.alive
    heads, key, value = (getattr(model.config, size) for size in SIZES[name])
    assert kept.bytes == {4 * heads * key * value}
