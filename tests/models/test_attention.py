"""Packed attention, registered as an attention implementation of transformers."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastdpo import attention, ops

SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2)),
}
IDS = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 7, 0]])
MASK = (IDS != 0).long()
LAYOUT = ops.pack_pairs(IDS, MASK, IDS.masked_fill((IDS < 3), -100))


def run(model: torch.nn.Module) -> torch.Tensor:
    """Builds the inputs directly: `packed_inputs` rejects a model with its original attention."""
    inputs = dict(input_ids=LAYOUT.pack(IDS), position_ids=LAYOUT.position_ids[None], attention_mask=LAYOUT.mask)
    with torch.no_grad():
        return model.base_model(**inputs, use_cache=False).last_hidden_state


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_packed_attention_rejects_a_layout(name, implementation):
    model = MODELS[name]().eval()
    model.set_attn_implementation(implementation)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"attn_mask|must match the size"):
            run(model)
        with pytest.raises(ValueError, match=f"packed_inputs: model must be switched .* got '{implementation}'"):
            attention.packed_inputs(model, LAYOUT, IDS)
        prior = attention.switch(model)
        assert prior == implementation
        assert torch.equal(run(model), model.base_model(**attention.packed_inputs(model, LAYOUT, IDS))[0])
        attention.restore(model, prior)


def test_features_that_sdpa_ignores_are_ignored():
    """transformers 5.17 runs Gemma 2 with sdpa without its softcap; packed attention must too."""
    model = MODELS["llama"]().eval()
    model.set_attn_implementation("sdpa")
    attention.switch(model)
    packed = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    tokens = LAYOUT.token_index.shape[0]
    query, key, value = torch.randn(3, 1, 2, tokens, 16, generator=torch.Generator().manual_seed(0))
    module = SimpleNamespace(is_causal=True)
    plain, _ = packed(module, query, key, value, LAYOUT.mask)
    with_features, _ = packed(module, query, key, value, LAYOUT.mask, softcap=0.1, s_aux=torch.ones(2))
    assert torch.equal(plain, with_features)
