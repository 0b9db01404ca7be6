"""The key changes with whatever the numbers depend on, and with nothing else."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from ref_logps_runs import tokens
from transformers import AutoModelForCausalLM
from trl_runs import tiny_model

from fastdpo import ref_logps
from fastdpo.ref_logps import keys, models
from fastdpo.ref_logps.pairs import Pairs

LORA = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def key_of(tmp_path, model=None, rows=None, **options) -> str:
    """The folder that values are stored in."""
    before = set(tmp_path.iterdir())
    ref_logps.precompute(tiny_model() if model is None else model, rows or tokens(4), cache_dir=tmp_path, **options)
    new = {path.name for path in set(tmp_path.iterdir()) - before}
    return new.pop() if new else "known"


def swapped(rows):
    rows[2], rows[3] = rows[3], rows[2]
    return rows


def edited(rows):
    rows[3]["rejected_ids"][-1] += 1
    return rows


def moved(rows):
    """A token from the end of the prompt to the beginning of both answers: the same rows, other labels."""
    last = rows[3]["prompt_ids"].pop()
    rows[3]["chosen_ids"].insert(0, last)
    rows[3]["rejected_ids"].insert(0, last)
    return rows


def one_weight(model):
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-6
    return model


def two_swapped(model):
    """The same bytes in other places."""
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.up_proj, second.up_proj = second.up_proj, first.up_proj
    return model


def transposed(model):
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight.data = linear.weight.data.view(16, 64).view(32, 32).T.contiguous()
    return model


OTHER = {
    "weight": lambda: dict(model=one_weight(tiny_model())),
    "swapped weights": lambda: dict(model=two_swapped(tiny_model())),
    "transposed weight": lambda: dict(model=transposed(tiny_model())),
    "dtype": lambda: dict(model=tiny_model().bfloat16()),
    "rotary base": lambda: dict(model=tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "norm's epsilon": lambda: dict(model=tiny_model(rms_norm_eps=1e-3)),
    "family": lambda: dict(model=tiny_model("mistral")),
    "token": lambda: dict(rows=edited(tokens(4))),
    "order": lambda: dict(rows=swapped(tokens(4))),
    "one row less": lambda: dict(rows=tokens(4)[:3]),
    "label": lambda: dict(rows=moved(tokens(4))),
    "max_length": lambda: dict(max_length=8),
    "max_length by one": lambda: dict(max_length=9),
    "keep_end": lambda: dict(max_length=8, truncation_mode="keep_end"),
    "ld_alpha": lambda: dict(ld_alpha=0.5),
    "another ld_alpha": lambda: dict(ld_alpha=0.25),
}


def test_every_ingredient_changes_the_key(tmp_path):
    found = {"plain": key_of(tmp_path)}
    found |= {name: key_of(tmp_path, **other()) for name, other in OTHER.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = key_of(tmp_path)
    assert "known" not in found.values()
    assert len(set(found.values())) == len(OTHER) + 2


def test_a_new_version_changes_the_key(tmp_path, monkeypatch):
    key_of(tmp_path)
    monkeypatch.setattr(keys, "VERSION", "fastdpo.ref_logps/0")
    assert key_of(tmp_path) != "known"


def reloaded(directory):
    tiny_model().save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory)


def configured(model):
    """What trainers set, and what no number depends on."""
    model.config.use_cache, model.config.pad_token_id, model.config._name_or_path = False, 1, "elsewhere"
    model.config.output_router_logits = True
    return model.train().requires_grad_(False)


SAME = {
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
def test_nothing_else_does(tmp_path, name):
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


def test_of_adapters_only_the_active_one_counts():
    def digest(adapter, **options) -> str:
        model = adapters(**options)
        with models.with_adapter(model, adapter):
            return keys.model_digest(model.get_base_model())

    plain = keys.model_digest(tiny_model())
    assert digest(None) == digest(None, seed=5, alpha=3, ref_seed=7, ref_alpha=1) == plain
    of_ref = digest("ref")
    assert of_ref == digest("ref", seed=5, alpha=3)
    assert len({plain, of_ref, digest("ref", ref_seed=2), digest("ref", ref_alpha=1), digest("default")}) == 5


def test_an_adapter_may_be_named_like_anything():
    model = get_peft_model(tiny_model(), LoraConfig(**LORA), adapter_name="weight")
    with models.with_adapter(model, None):
        found = keys.model_digest(model.get_base_model())
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.data += 1
        assert found != keys.model_digest(model.get_base_model())
    assert found == keys.model_digest(tiny_model())


def test_values_that_cannot_be_read_are_named(tmp_path):
    model = tiny_model()
    model.model.layers[0].mlp.up_proj.to("meta")
    with pytest.raises(NotImplementedError, match=r"layers\.0\.mlp\.up_proj\.weight can't be read"):
        ref_logps.precompute(model, tokens(2), cache_dir=tmp_path)


def test_the_digest_of_a_tensor_tells_dtypes_and_shapes_apart():
    tensors = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(6),
        torch.ones(6),
    ]
    assert len({keys.tensor_digest("x", x) for x in tensors}) == 5
    assert keys.tensor_digest("x", torch.arange(6.0).view(2, 3).T) == keys.tensor_digest(
        "y", torch.arange(6.0).view(2, 3).T.contiguous()
    )
    assert keys.tensor_digest("x", torch.tensor(1.0)) != keys.tensor_digest("x", torch.tensor([1.0]))


def test_the_digest_of_tokens_tells_columns_and_rows_apart():
    def digest(*rows) -> str:
        return Pairs([dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)) for row in rows]).digest

    found = [
        digest(([1], [2], [3])),
        digest(([1, 2], [], [3])),
        digest(([1], [2, 3], [])),
        digest(([1], [2], [3]), ([], [], [])),
        digest(([1], [2], []), ([], [], [3])),
        digest(),
    ]
    assert len(set(found)) == len(found)
