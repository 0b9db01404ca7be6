"""The cache key changes with every input that affects the values, and with nothing else."""

import copy
import importlib
import re
import sys
from functools import partial, wraps
from types import MethodType

import pytest
import torch
from accelerate import Accelerator, cpu_offload, dispatch_model
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from trl import DPOTrainer
from trl.trainer.utils import disable_dropout_in_model

import fastdpo
from fastdpo import ref_logps
from fastdpo.models.adapters import with_adapter
from fastdpo.ref_logps import keys, module_state
from tests.support.ref_logps import tokens
from tests.support.trl.dpo import config, dataset, tiny_model, tokenizer

LORA = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def key_of(tmp_path, model=None, rows=None, **options) -> str:
    """Returns the directory that a run creates for its values, or "known" if it exists."""
    before = set(tmp_path.iterdir())
    ref_logps.precompute(tiny_model() if model is None else model, rows or tokens(4), cache_dir=tmp_path, **options)
    new = {path.name for path in set(tmp_path.iterdir()) - before}
    return new.pop() if new else "known"


def edited(rows):
    rows[3]["rejected_ids"][-1] += 1
    return rows


def moved(rows):
    """Moves the last prompt token to both answers: the rows are equal, the labels differ."""
    last = rows[3]["prompt_ids"].pop()
    rows[3]["chosen_ids"].insert(0, last)
    rows[3]["rejected_ids"].insert(0, last)
    return rows


def one_weight(model):
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-6
    return model


def two_swapped(model):
    """Swaps two weights: the same bytes in different places."""
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.up_proj, second.up_proj = second.up_proj, first.up_proj
    return model


def reordered(model):
    layers = model.model.layers._modules
    layers["0"] = layers.pop("0")
    return model


def transposed(model):
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight.data = linear.weight.data.view(16, 64).view(32, 32).T.contiguous()
    return model


def with_attribute(path, value):
    model = tiny_model()
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, value)
    return model


OTHER = {
    "rotary frequencies": lambda: dict(  # which are not in the state_dict
        model=with_attribute("model.rotary_emb.inv_freq", 2 * tiny_model().model.rotary_emb.inv_freq)
    ),
    "attention's scaling": lambda: dict(model=with_attribute("model.layers.1.self_attn.scaling", 0.5)),
    "norm's class": lambda: dict(model=with_attribute("model.norm.__class__", MistralRMSNorm)),
    "activation": lambda: dict(model=with_attribute("model.layers.0.mlp.act_fn", torch.nn.GELU())),
    "activation's option": lambda: dict(model=with_attribute("model.layers.0.mlp.act_fn", torch.nn.GELU("tanh"))),
    "function of a library": lambda: dict(model=with_attribute("model.norm.act", torch.nn.functional.silu)),
    "another one": lambda: dict(model=with_attribute("model.norm.act", torch.nn.functional.gelu)),
    "its options": lambda: dict(
        model=with_attribute("model.norm.act", partial(torch.nn.functional.gelu, approximate="tanh"))
    ),
    "order of layers": lambda: dict(model=reordered(tiny_model())),
    "weight": lambda: dict(model=one_weight(tiny_model())),
    "swapped weights": lambda: dict(model=two_swapped(tiny_model())),
    "transposed weight": lambda: dict(model=transposed(tiny_model())),
    "dtype": lambda: dict(model=tiny_model().bfloat16()),
    "rotary base": lambda: dict(model=tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "norm's epsilon": lambda: dict(model=tiny_model(rms_norm_eps=1e-3)),
    "family": lambda: dict(model=tiny_model("mistral")),
    "token": lambda: dict(rows=edited(tokens(4))),
    "order": lambda: dict(rows=tokens(4)[::-1]),
    "one row less": lambda: dict(rows=tokens(4)[:3]),
    "label": lambda: dict(rows=moved(tokens(4))),
    "max_length": lambda: dict(max_length=8),
    "max_length by one": lambda: dict(max_length=9),
    "keep_end": lambda: dict(max_length=8, truncation_mode="keep_end"),
    "ld_alpha": lambda: dict(ld_alpha=0.5),
    "another ld_alpha": lambda: dict(ld_alpha=0.25),
}


def test_every_relevant_input_changes_the_key(tmp_path):
    keys_by_input = {"plain": key_of(tmp_path)}
    keys_by_input |= {name: key_of(tmp_path, **other()) for name, other in OTHER.items()}
    with torch.autocast("cpu", torch.bfloat16):
        keys_by_input["autocast"] = key_of(tmp_path)
    assert "known" not in keys_by_input.values()
    assert len(set(keys_by_input.values())) == len(OTHER) + 2


def reloaded(directory):
    tiny_model().save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory)


def configured(model):
    """Applies settings of trainers that do not affect the values."""
    model.config.use_cache, model.config.pad_token_id, model.config._name_or_path = False, 1, "elsewhere"
    model.config.output_router_logits = True
    return model.train().requires_grad_(False)


def hooked(model):
    """Installs the hooks of trainers, none of which affects the values."""
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.add_model_tags(["trl", "dpo"])
    disable_dropout_in_model(model)
    return dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def prepared(model):
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the precision of an earlier trainer
    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)


def after_a_trainer(directory):
    with fastdpo.patched():
        model = tiny_model()
        args = config(directory / "trainer", gradient_checkpointing=True, max_steps=1, learning_rate=0.0)
        trainer = DPOTrainer(
            model, tiny_model(), args, train_dataset=dataset(4, directory / "data"), processing_class=tokenizer()
        )
        trainer.train()
    return model


SAME = {
    "hooks of trainers": lambda _: dict(model=hooked(tiny_model())),
    "prepared by accelerate": lambda _: dict(model=prepared(tiny_model())),
    "after a trainer": lambda directory: dict(model=after_a_trainer(directory)),
    "again": lambda _: {},
    "a copy": lambda _: dict(model=copy.deepcopy(tiny_model())),
    "from disk": lambda directory: dict(model=reloaded(directory)),
    "another mode": lambda _: dict(model=configured(tiny_model())),
    "from Arrow": lambda _: dict(rows=Dataset.from_list(tokens(4))),
    "other columns": lambda _: dict(rows=Dataset.from_list([{**row, "prompt": "x"} for row in tokens(4)])),
    "int32": lambda _: dict(
        rows=[{k: torch.tensor(v, dtype=torch.int32) for k, v in row.items()} for row in tokens(4)]
    ),
    "selected": lambda _: dict(rows=Dataset.from_list([tokens(5)[4], *tokens(4)]).select([1, 2, 3, 4])),
    "batches": lambda _: dict(tokens_per_batch=20),
    "truncation without a length": lambda _: dict(truncation_mode="keep_end"),
    "adapter that is off": lambda _: dict(model=get_peft_model(tiny_model(), LoraConfig(**LORA))),
    "trained copies that are off": lambda _: dict(
        model=get_peft_model(tiny_model(), LoraConfig(**LORA, modules_to_save=["embed_tokens"]))
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_irrelevant_inputs_do_not_change_the_key(tmp_path, name):
    cache = tmp_path / "cache"
    cache.mkdir()
    assert key_of(cache) != "known"
    assert key_of(cache, **SAME[name](tmp_path / "model")) == "known"


def adapters(seed=0, alpha=8, ref_alpha=8, ref_seed=1):
    torch.manual_seed(seed)
    model = get_peft_model(tiny_model(), LoraConfig(**LORA, lora_alpha=alpha))
    torch.manual_seed(ref_seed)
    model.add_adapter("ref", LoraConfig(**LORA, lora_alpha=ref_alpha))
    return model


def doubled(module, args, output):
    return output * 2


def doubled_after(method):
    @wraps(method)  # takes the method's name
    def forward(self, *args, **kwargs):
        return 2 * method(self, *args, **kwargs)

    return forward


class Doubled:
    def __call__(self, x):
        return 2 * torch.nn.functional.silu(x)


def with_pre_hook(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    return model


def with_forward(model, bind=MethodType):
    mlp = model.model.layers[0].mlp
    mlp.forward = bind(doubled_after(type(mlp).forward), mlp)
    return model


def with_activation(model, function):
    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = function
    return model


def with_hook_on_an_adapter(model):
    model = get_peft_model(model, LoraConfig(**LORA))
    model.get_base_model().model.layers[0].self_attn.v_proj.register_forward_hook(doubled)
    return model


UNKNOWN = {
    "hook on an adapter": with_hook_on_an_adapter,
    "pre-hook": with_pre_hook,
    "forward under accelerate": lambda model: hooked(with_forward(model)),
    "partial": lambda model: with_forward(model, partial),
    "function": lambda model: with_activation(model, lambda x: 2 * torch.nn.functional.silu(x)),
    "object": lambda model: with_activation(model, Doubled()),
}


class Wrapper(torch.nn.Module):
    """A wrapper with PEFT's attribute name `base_layer`."""

    def __init__(self, base_layer, factor):
        super().__init__()
        self.base_layer, self.factor = base_layer, factor

    def forward(self, x):
        return self.factor * self.base_layer(x)


def test_a_wrapper_that_is_not_from_peft_changes_the_key():
    def wrapped(factor):
        model = tiny_model()
        model.model.layers[0].mlp.up_proj = Wrapper(model.model.layers[0].mlp.up_proj, factor)
        return keys.model_digest(model)

    assert len({wrapped(1), wrapped(2), keys.model_digest(tiny_model())}) == 3
    compiled = tiny_model()
    compiled.model.layers[0].mlp = torch.compile(compiled.model.layers[0].mlp)
    compiled.model.norm.compile()
    assert keys.model_digest(compiled) == keys.model_digest(tiny_model())


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_model_with_custom_functions_is_not_cached(name, tmp_path, caplog, monkeypatch):
    """A key cannot identify such a function, because it could read any variable."""
    changed = UNKNOWN[name]
    plain = ref_logps.precompute(tiny_model(), tokens(4), cache_dir=tmp_path)
    expected = ref_logps.precompute(changed(tiny_model()), tokens(4))
    assert not torch.equal(expected.chosen, plain.chosen)
    before = set(tmp_path.rglob("*"))
    computed = ref_logps.precompute(changed(tiny_model()), tokens(4), cache_dir=tmp_path)
    assert torch.equal(computed.chosen, expected.chosen)
    assert set(tmp_path.rglob("*")) == before
    (warning,) = (message for message in caplog.messages if "not cached" in message)
    assert "test_keys.py" in warning or "Doubled" in warning
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(fastdpo.NotFused, match="not cached"):
        ref_logps.precompute(changed(tiny_model()), tokens(4), cache_dir=tmp_path)


def test_a_replaced_forward_of_a_class(tmp_path, monkeypatch):
    plain = keys.model_digest(tiny_model())
    monkeypatch.setattr(LlamaMLP, "forward", doubled_after(LlamaMLP.forward))
    assert "model.layers.0.mlp runs doubled_after" in (keys.uncacheable_reason(tiny_model()) or "")
    monkeypatch.undo()
    monkeypatch.setattr(LlamaMLP, "forward", MistralMLP.forward)
    assert "model.layers.0.mlp runs MistralMLP.forward" in (keys.uncacheable_reason(tiny_model()) or "")
    monkeypatch.setattr(LlamaMLP, "forward", LlamaRMSNorm.forward)  # of the same file
    assert keys.model_digest(tiny_model()) != plain


def test_another_version_of_a_package_changes_the_key(monkeypatch):
    plain = keys.model_digest(tiny_model())
    version_of = module_state.version_of
    for package in ("torch", "transformers"):
        monkeypatch.setattr(
            module_state, "version_of", lambda x, own=package: "0" if x.startswith(f"{own}.") else version_of(x)
        )
        assert keys.model_digest(tiny_model()) != plain


def test_a_function_that_the_package_kernels_has_made_a_module():
    """It is no part of the model. A kernel replaces its forward."""
    model, rotate = tiny_model(), torch.nn.Identity()
    vars(model.model.norm)["_kernel_funcs"] = {"rotate": rotate}
    assert keys.model_digest(model) == keys.model_digest(tiny_model())
    rotate.forward = doubled
    assert "model.norm runs doubled" in (keys.uncacheable_reason(model) or "")


def test_a_global_hook_on_all_modules():
    handle = torch.nn.modules.module.register_module_forward_hook(doubled)
    try:
        assert "every module runs doubled" in (keys.uncacheable_reason(tiny_model()) or "")
    finally:
        handle.remove()
    assert keys.uncacheable_reason(tiny_model()) is None


def test_a_class_is_identified_by_the_contents_of_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file, digests_seen = tmp_path / "own_norm.py", set()
    for factor in (1, 2, 1):
        file.write_text(
            "import torch\n\nclass Norm(torch.nn.Identity):\n"
            f"    def forward(self, x):\n        return {factor} * super().forward(x)\n"
        )
        sys.modules.pop("own_norm", None)
        importlib.invalidate_caches()
        model = with_attribute("model.norm", importlib.import_module("own_norm").Norm())
        digests_seen.add(keys.model_digest(model))
    assert len(digests_seen) == 2

    space: dict = {"__name__": "notebook"}
    exec(file.read_text(), space)
    assert "Norm, which no file defines" in (
        keys.uncacheable_reason(with_attribute("model.norm", space["Norm"]())) or ""
    )


def test_a_merged_and_disabled_adapter_changes_the_key():
    """Its forward subtracts the adapter again, unlike that of a model with merged weights."""
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    model.merge_adapter()
    with with_adapter(model, None, "test"):
        digest = keys.model_digest(model.get_base_model())
    assert digest != keys.model_digest(model.merge_and_unload())


def test_only_the_active_adapter_changes_the_key():
    def digest(adapter, **options) -> str:
        model = adapters(**options)
        with with_adapter(model, adapter, "test"):
            return keys.model_digest(model.get_base_model())

    plain = keys.model_digest(tiny_model())
    assert digest(None) == digest(None, seed=5, alpha=3, ref_seed=7, ref_alpha=1) == plain
    ref_digest = digest("ref")
    assert ref_digest == digest("ref", seed=5, alpha=3)
    assert len({plain, ref_digest, digest("ref", ref_seed=2), digest("ref", ref_alpha=1), digest("default")}) == 5


def test_an_adapter_may_have_the_name_of_a_parameter():
    model = get_peft_model(tiny_model(), LoraConfig(**LORA), adapter_name="weight")
    with with_adapter(model, None, "test"):
        digest = keys.model_digest(model.get_base_model())
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.data += 1
        assert digest != keys.model_digest(model.get_base_model())
    assert digest == keys.model_digest(tiny_model())


def test_a_weight_that_cannot_be_read_costs_the_cache_and_one_warning(tmp_path, caplog):
    model = tiny_model()
    cpu_offload(model.model.layers[0].mlp.up_proj)
    logps = ref_logps.precompute(model, tokens(2), cache_dir=tmp_path)
    (warning,) = caplog.messages
    assert re.search(r"not cached, .*layers\.0\.mlp\.up_proj\.weight cannot be read.* \[no-key\]", warning)
    assert not list(tmp_path.iterdir())
    assert torch.equal(logps.chosen, ref_logps.precompute(tiny_model(), tokens(2)).chosen)
