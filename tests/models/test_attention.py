"""Packed attention, registered as an attention implementation of transformers."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations import flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastdpo import ops
from fastdpo.models import attention
from fastdpo.ops.attention import routes
from tests.support.ops.operators import Operators

SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2)),
}
IDS = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 7, 0]])
MASK = (IDS != 0).long()
LAYOUT = ops.pack_pairs(IDS, MASK, IDS.masked_fill((IDS < 3), -100))


def run(model: torch.nn.Module, named: bool = True) -> torch.Tensor:
    with torch.no_grad(), attention.named(attention.configs_of(model)) if named else nullcontext():
        return model.base_model(**attention.inputs_of(LAYOUT, IDS)).last_hidden_state


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_configuration_does_not_name_packed_attention_rejects_a_layout(name, implementation):
    model = MODELS[name]().eval()
    model.set_attn_implementation(implementation)
    attention.switch(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"attn_mask|must match the size"):
            run(model, named=False)
        run(model)
        assert model.config._attn_implementation == implementation


def test_a_compiled_model_is_one_graph():
    """Also the second model that is switched."""
    models = [MODELS["llama"]().eval() for _ in range(2)]
    for model in models:
        attention.switch(model)
        inputs = attention.inputs_of(LAYOUT, IDS)
        torch._dynamo.reset()
        with attention.named(attention.configs_of(model)):
            assert torch._dynamo.explain(model.base_model)(**inputs).graph_break_count == 0
        compiled = torch.compile(lambda model=model, **x: model.base_model(**x)[0], backend="eager", fullgraph=True)
        with torch.no_grad(), attention.named(attention.configs_of(model)):
            assert torch.equal(compiled(**inputs), run(model))


def packed_attention_of(prior):
    """The attention of a switched model, a module that calls it, and its inputs."""
    model = MODELS["llama"]().eval()
    model.set_attn_implementation(prior)
    attention.switch(model)
    with attention.named(attention.configs_of(model)):
        packed = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    tokens = LAYOUT.token_index.shape[0]
    tensors = torch.randn(3, 1, 2, tokens, 16, generator=torch.Generator().manual_seed(0))
    return packed, SimpleNamespace(is_causal=True), [*tensors]


def test_features_that_sdpa_ignores_are_ignored():
    packed, module, (query, key, value) = packed_attention_of("sdpa")
    plain, _ = packed(module, query, key, value, LAYOUT.mask)
    with_features, _ = packed(module, query, key, value, LAYOUT.mask, softcap=0.1, s_aux=torch.ones(2))
    assert torch.equal(plain, with_features)


RULES = {
    "other tokens": (lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]), {}, "key must be"),
    "values of other tokens": (lambda q, k, v: (q, k, v[:, :, 1:]), {}, "value must be"),
    "values of another dtype": (
        lambda q, k, v: (q, k, v.double()),
        {},
        r"key and value must be torch\.float32, the dtype of query",
    ),
    "another head size": (lambda q, k, v: (q, k[..., 1:], v), {}, "key must be"),
    "no window": (lambda q, k, v: (q, k, v), dict(sliding_window=0), "window must be a positive integer"),
    "no softcap": (lambda q, k, v: (q, k, v), dict(softcap=0.0), "softcap must be positive"),
    "sinks of other heads": (lambda q, k, v: (q, k, v), dict(s_aux=torch.ones(3)), "sinks must be"),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_a_model_may_get_wrong_is_checked(rule):
    packed, module, tensors = packed_attention_of("eager")
    change, options, message = RULES[rule]
    with pytest.raises((TypeError, ValueError), match=f"^packed_attention: {message}"):
        packed(module, *change(*tensors), LAYOUT.mask, **options)


def test_gradients_of_a_model_are_not_copied_into_zeros():
    """The backward of an index allocates zeros for the whole tensor and copies into them."""
    packed, module, tensors = packed_attention_of("sdpa")
    tensors = [x.clone().requires_grad_() for x in tensors]
    out, _ = packed(module, *tensors, LAYOUT.mask)
    pending, names = [out.grad_fn], set()
    while pending:
        node = pending.pop()
        names.add(node.name())
        pending += [parent for parent, _ in node.next_functions if parent is not None]
    assert names == {"_PackedAttentionBackward", "torch::autograd::AccumulateGrad"}
    out.sum().backward()


def test_routes_of_a_mask_follow_its_rows_and_the_settings(monkeypatch):
    """All layers of a call are given one mask, and gradient checkpointing passes on others of its memory."""
    packed, module, (query, key, value) = packed_attention_of("sdpa")
    mask, asked = LAYOUT.mask.clone(), []
    stock = routes.chosen
    monkeypatch.setattr(routes, "chosen", lambda *args: asked.append(args) or stock(*args))
    first, again = (packed(module, query, key, value, x)[0] for x in (mask, mask.detach()))
    assert torch.equal(first, again)
    assert len(asked) == 1
    packed(module, query, key, value, mask, sliding_window=2)
    assert len(asked) == 2
    mask.copy_(torch.tensor([[0, 0, 0, 3], [0, 2, 3, 2]]))
    changed, _ = packed(module, query, key, value, mask)
    expected, _ = packed(module, query, key, value, mask.clone())
    assert torch.equal(changed, expected)
    assert not torch.equal(changed, first)


def test_an_operator_runs_where_a_mode_looks_on():
    """Selective checkpointing, for example, decides about each operator."""
    packed, module, tensors = packed_attention_of("sdpa")
    tensors = [x.clone().requires_grad_() for x in tensors]
    results, operators = [], Operators()
    for mode in (operators, nullcontext()):
        with mode:
            out, _ = packed(module, *tensors, LAYOUT.mask)
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert {"fastdpo.packed_attention_fwd.default", "fastdpo.packed_attention_bwd.default"} <= {
        str(func) for func, *_ in operators.calls
    }
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("module", "autocast", "dtype"),
    [
        (torch.nn.Linear(2, 2, dtype=torch.bfloat16), False, torch.bfloat16),
        (torch.nn.Linear(2, 2), True, torch.bfloat16),
        (torch.nn.Identity(), False, torch.float16),  # a quantized layer of another class
    ],
    ids=["of a linear layer", "of autocast", "before quantization"],
)
def test_the_dtype_for_flash_attention_in_transformers_4(monkeypatch, module, autocast, dtype):
    """Which has no `get_target_dtype`."""
    model = MODELS["llama"]().eval()
    model.config._attn_implementation = "flash_attention_2"
    attention.switch(model)
    with attention.named(attention.configs_of(model)):
        packed = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    monkeypatch.delattr(flash_attention, "get_target_dtype", raising=False)
    module.is_causal = True
    module.config = SimpleNamespace(**({} if dtype == torch.bfloat16 else {"_pre_quantization_dtype": dtype}))
    tensors = torch.randn(3, 1, 2, LAYOUT.token_index.shape[0], 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, _ = packed(module, *tensors, LAYOUT.mask)
    assert out.dtype == dtype
