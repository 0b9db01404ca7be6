"""Recordings of passes that launch fastdpo's kernels, replayed for other batches."""

from types import SimpleNamespace

import torch
from torch import nn

from fastdpo.models import attention
from fastdpo.models.running import recording
from fastdpo.ops.attention.packed_attention import packed_attention
from fastdpo.packing import pack
from tests.kernels.interpreted.test_packed_attention import use_blocks
from tests.support.kernels import recorder


class Backbone(nn.Module):
    """Two layers of attention without anything else, one of them with a window."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.projections = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))

    def forward(self, input_ids, position_ids, attention_mask, use_cache):
        x = self.embedding(input_ids)[0] + torch.sin(position_ids[0].float())[:, None]
        for window, projection in zip((None, 7), self.projections, strict=True):
            query, key, value = projection(x).unflatten(1, (4, 16)).split([2, 1, 1], 1)
            x = x + packed_attention(query, key, value, attention_mask.flatten(0, 2), window=window).flatten(1)
        return SimpleNamespace(last_hidden_state=x[None])


def inputs(*lengths):
    """Of rows that all begin with the same 5 tokens."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, n in zip(ids, lengths, strict=True):
        row[:n] = torch.cat([torch.arange(1, 6), torch.randint(6, 50, (n,))])[:n]
    layout = pack(ids, ids != 0, ids.masked_fill(ids == 0, -100), groups="content")
    return attention.inputs_of(layout, ids)


def test_a_recording_replays_other_batches(monkeypatch):
    use_blocks(monkeypatch, (16, 16), least_turns=1)
    recorder.install(monkeypatch, dense=False)
    backbone = Backbone()
    trained = [*backbone.parameters()]
    first, *others = [inputs(21, 12, 9), inputs(13, 14, 13, 6), inputs(6, 6, 7, 8, 6, 7, 9, 10)]
    recorded = recording.Recording(backbone, recording.padded(first, 48), 1, trained, None)
    for given in (*others, first):
        hidden = recording.run_layers(backbone, recording.padded(given, 48))
        assert recorded.fill(given)
        n = given["input_ids"].shape[1]
        states, expected = recorded.states(given, torch.arange(n)), hidden[0, :n]
        assert torch.equal(states, expected)
        found = (torch.autograd.grad(x, trained, hidden[0, :n].detach().roll(1, -1)) for x in (states, expected))
        assert all(map(torch.equal, *found))
