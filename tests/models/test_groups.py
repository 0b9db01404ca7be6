"""Rows in groups of any size score as they do in plain transformers: exactly, in float64."""

import functools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from fastdpo.models import forward
from fastdpo.models.scoring import router_loss
from fastdpo.models.state import ForwardOptions
from fastdpo.ops.attention import pieces
from fastdpo.packing import IGNORE_INDEX
from tests.support.comparison import double
from tests.support.models.families import FUSED, HYBRID, kind
from tests.support.models.watching import as_of_an_engine
from tests.support.trl.dpo import tiny_model

EXACT = 1e-12
"""Relative difference of sums in another order."""
IN_FLOAT32 = 1e-6
"""Routers and scans compute in float32, whatever the model's dtype is."""

FAMILIES = FUSED | HYBRID


@pytest.fixture(autouse=True)
def _attention_by_products(monkeypatch):
    """Torch's flash attention on the CPU has a float32 log-sum-exp also for float64."""
    monkeypatch.setattr(pieces, "flash_supports_scale", lambda scale: False)


def batch_of(prompt: int) -> dict[str, torch.Tensor]:
    """Three rows of one prompt, three of another that begins with it, one with a short common
    beginning, one of its own, one that occurs before, and one that continues another.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(2, 97, (n,), generator=generator).tolist()

    first = tokens(prompt)
    second = first + tokens(prompt // 2)
    prompts = [first, second, first, first[:2] + tokens(4), second, tokens(5), second, first]
    answers = [tokens(n) for n in (3, 5, 4, 6, 1, 2, 7, 3)]
    prompts += [first, second]
    answers += [answers[0], answers[4] + tokens(3)]
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    shape = len(rows), max(map(len, rows))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORE_INDEX)
    for i, (row, start) in enumerate(zip(rows, map(len, prompts), strict=True)):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        labels[i, start : len(row)] = ids[i, start : len(row)]
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def model_of(name: str) -> PreTrainedModel:
    """With norms in float64, which transformers computes in float32."""
    options = FAMILIES[name][1] if name in FAMILIES else {}
    model = double(tiny_model(kind(name) if name in FAMILIES else name, **options | dict(max_position_embeddings=512)))
    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "MistralRMSNorm"):
            module.forward = functools.partial(as_of_an_engine(_rms_norm), module)
    return model.eval()


def _rms_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def outcome(model: PreTrainedModel, logps: torch.Tensor, aux_loss: torch.Tensor | None):
    """Log-probabilities and router loss, and gradients of their weighted sum."""
    weights = torch.randn(logps.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = (logps * weights).sum() + (0 if aux_loss is None else 10 * aux_loss)
    parameters = [x for x in model.parameters() if x.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    gradient = torch.cat([x.flatten() for x in gradients if x is not None])
    return [logps.detach(), gradient] + ([] if aux_loss is None else [aux_loss.detach()])


def stock(model: PreTrainedModel, batch: dict[str, torch.Tensor], **options: bool):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with sdpa_kernel(SDPBackend.MATH):
        output = model(**inputs, use_cache=False, **options)
    targets = batch["labels"][:, 1:]
    logps = output.logits[:, :-1].log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return outcome(model, logps * (targets != IGNORE_INDEX), output.get("aux_loss"))


def fused(model: PreTrainedModel, batch: dict[str, torch.Tensor], request: dict, **options: bool):
    """Also returns how many rows have the most common token."""
    scored = []
    forward.install(
        model, ForwardOptions("test", "policy", **request), lambda x, _: scored.append(x), prior_scores=False
    )
    model(**batch, fused_lm_head=True, use_cache=False, **options)
    (result,) = scored
    return outcome(model, result.logps.logps, router_loss(model.config, result)), int(result.multiplicity.max())


CASES = {
    "llama": (9, {}),
    "mistral": (9, {}),
    "gpt2": (9, {}),
    "mixtral": (9, dict(output_router_logits=True)),
    "falcon_h1": (140, {}),
    "qwen3_next": (140, {}),
    "lfm2": (140, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_float64(name):
    prompt, options = CASES[name]
    batch = batch_of(prompt)
    expected = stock(model_of(name), batch, **options)
    for request, rows in ((dict(groups="content"), 3), (dict(groups="pairs"), 2), (dict(share_prompts=False), 1)):
        found, most = fused(model_of(name), batch, request, **options)
        assert most >= rows if rows > 1 else most == 1
        allowed = IN_FLOAT32 if name in HYBRID or name == "mixtral" else EXACT
        for a, b in zip(found, expected, strict=True):
            assert (a - b).norm() <= allowed * b.norm()
