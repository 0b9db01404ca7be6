"""A model that is scored whole, and then sharded by FSDP2, on one rank."""

from collections import Counter

import pytest
import torch

import fastdpo
from fastdpo.models import forward
from fastdpo.models.examine import probe
from fastdpo.models.state import ForwardOptions
from tests.integrations.test_custom_loops import own_logps
from tests.support.models.planted import PLANTED, Scaled, in_layers
from tests.support.models.sharded import sharded
from tests.support.trl.dpo import tiny_model

NAME = "a model that is sharded later"


def test_a_model_is_examined_again_once_it_is_sharded(mesh):
    model, ids = tiny_model().eval(), torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    forward.install(model, ForwardOptions(NAME, "policy"), lambda rows, _: rows.logps.logps, prior_scores=False)
    whole = model(**inputs)
    torch.testing.assert_close(sharded(model, mesh)(**inputs), whole)
    paths = {path: n for (name, _, path), n in fastdpo.calls.items() if name == NAME}
    assert paths == {"fused": 2}


IN_UNITS = {
    **{name: set(planted.reasons) for name, planted in PLANTED.items()},
    **{name: {"changed-model"} for name in ("switched buffer", "changed entry", "changing attribute", "configuration")},
    "scale of lengths": {"different-calls"},
}
"""By what is planted, the reasons that a model has which ranks run together: they examine it once, by more tokens than
one of these scales applies to.
"""


@pytest.mark.parametrize("name", PLANTED)
def test_a_sharded_model_with_more_than_weights(mesh, name, caplog):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(97, (4, 30), generator=generator) for _ in range(3)]
    of_sides = []
    for is_ours in (False, True):
        model = tiny_model().double().train()
        PLANTED[name].plant(model)
        sharded(model, mesh)
        if is_ours:
            fastdpo.prepare(model)
        found = []
        for ids in batches:
            mask = torch.ones_like(ids)
            logps = fastdpo.score(model, ids, mask, ids).logps if is_ours else own_logps(model, ids, mask, ids)
            model.zero_grad()
            logps.sum().backward()
            gradients = {key: x.grad.full_tensor() for key, x in model.named_parameters() if x.grad is not None}
            found.append((logps.detach(), gradients))
        of_sides.append(found)
    torch.testing.assert_close(*of_sides, rtol=1e-5, atol=1e-5)  # rotary embeddings are in float32
    assert {x.rpartition("[")[2].rstrip("]") for x in caplog.messages if ": not fused, " in x} == IN_UNITS[name]


def test_sharded_layers_of_other_code_run_padded_where_they_were_not_examined(mesh, monkeypatch, caplog):
    monkeypatch.setattr(probe, "LONG", 100)
    model = tiny_model().train()
    in_layers(Scaled)(model)
    fastdpo.prepare(sharded(model, mesh))
    before = Counter(fastdpo.calls)
    for length in (20, 30):
        ids = torch.randint(97, (4, length), generator=torch.Generator().manual_seed(0))
        fastdpo.score(model, ids, torch.ones_like(ids), ids)
    assert {path: n for (*_, path), n in (fastdpo.calls - before).items()} == {"fused": 1, "padded": 1}
    assert "batches of more than 100 tokens were not examined" in caplog.text
