"""What users do to a model between two steps: the training goes on as stock's does, fused or for a reason not."""

import logging
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, TrainerCallback
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import DPOTrainer
from trl_runs import LORA, WORDS, assert_same, tiny_model, train

import fastdpo

STEPS = 4
BEFORE = 2  # steps before the surgery


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastdpo.unpatch()


def resize(model: PreTrainedModel) -> None:
    torch.manual_seed(7)  # of the new rows
    model.resize_token_embeddings(len(WORDS) + 5)


def tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untie(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() * 1.5)


def new_head(model: PreTrainedModel) -> None:
    torch.manual_seed(7)
    model.lm_head = nn.Linear(model.config.hidden_size, len(WORDS), bias=False)


class Louder(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def head_of_another_class(model: PreTrainedModel) -> None:
    model.lm_head.__class__ = Louder


def closure_in_the_head(model: PreTrainedModel) -> None:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: stock(hidden) * 2


def closure_around_the_fused_head(model: PreTrainedModel) -> None:
    stock = model.lm_head.forward
    model.lm_head.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def hook_on_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def hook_before_the_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: args)


def hook_on_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.25)


def hook_on_first_tokens(model: PreTrainedModel) -> None:
    def steer(module, args, output):
        return torch.cat([output[:, :1] + 1.0, output[:, 1:]], 1)

    model.model.layers[0].mlp.register_forward_hook(steer)


def hook_on_shapes(model: PreTrainedModel) -> None:
    def check(module, args, output):
        if len(output) % 2:
            raise ValueError("an even number of rows was expected")

    model.model.layers[0].mlp.register_forward_hook(check)


def forward_of_a_layer(model: PreTrainedModel) -> None:
    mlp = model.model.layers[1].mlp
    stock = mlp.forward
    mlp.forward = lambda hidden: stock(hidden) * 0.5


def new_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = nn.Sequential(nn.Linear(model.config.hidden_size, model.config.hidden_size))
    torch.manual_seed(7)
    nn.init.normal_(model.model.layers[0].mlp[0].weight, std=0.3)


class MixesTokens(nn.Module):
    def forward(self, hidden):
        return hidden.roll(1, 1)


def layer_that_mixes_tokens(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = MixesTokens()


def eager(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def eager_and_back(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    model.set_attn_implementation("sdpa")


def attention_of_the_users_own(model: PreTrainedModel) -> None:
    AttentionInterface.register("users_own", ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register("users_own", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("users_own")


def freeze(model: PreTrainedModel) -> None:
    model.model.layers[0].requires_grad_(False)


def checkpoint(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def second_adapter(model) -> None:
    torch.manual_seed(7)
    model.add_adapter("second", LoraConfig(**LORA))
    model.set_adapter("second")


def merged_adapter(model) -> None:
    model.merge_adapter()
    model.get_base_model().model.norm.requires_grad_(True)  # else nothing would be trained


def larger_adapter(model) -> None:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.scaling["default"] *= 2


@dataclass
class Surgery:
    """Attributes:
    operate: what is done to the policy.
    reason: why it is not fused from then on; None if it is.
    adapter: the policy has one.
    """

    operate: object
    reason: str | None = None
    adapter: bool = False


SURGERIES = [
    Surgery(resize),
    Surgery(tie),
    Surgery(untie),
    Surgery(new_head),
    Surgery(head_of_another_class, "the head must be a plain nn.Linear; it is Louder"),
    Surgery(closure_in_the_head, "the head's forward was replaced by closure_in_the_head.<locals>.<lambda>"),
    Surgery(closure_around_the_fused_head, "the head's forward was replaced by closure_around_the_fused_head"),
    Surgery(hook_on_the_head, "the head has hooks: hook_on_the_head.<locals>.<lambda>"),
    Surgery(hook_before_the_head, "the head has hooks: hook_before_the_head.<locals>.<lambda>"),
    Surgery(hook_on_a_layer),
    Surgery(hook_on_first_tokens, "the packed hidden states of LlamaForCausalLM differ"),
    Surgery(hook_on_shapes, "LlamaForCausalLM can't be run on padded rows: ValueError: an even number"),
    Surgery(forward_of_a_layer),
    Surgery(new_layer),
    Surgery(layer_that_mixes_tokens, "the packed hidden states of LlamaForCausalLM differ"),
    Surgery(eager),
    Surgery(eager_and_back),
    Surgery(attention_of_the_users_own, "attention implementation 'users_own' is not supported"),
    Surgery(freeze),
    Surgery(checkpoint),
    Surgery(second_adapter, adapter=True),
    Surgery(merged_adapter, adapter=True),
    Surgery(larger_adapter, adapter=True),
]


class Operate(TrainerCallback):
    def __init__(self, operate):
        self.operate = operate

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == BEFORE:
            self.operate(model)


def operated(operate) -> type[DPOTrainer]:
    class Operated(DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Operate(operate))

    return Operated


@pytest.mark.parametrize("surgery", SURGERIES, ids=lambda surgery: surgery.operate.__name__)
def test_surgery(tmp_path, caplog, surgery):
    def options() -> dict:
        torch.manual_seed(3)
        given = (
            dict(peft_config=LoraConfig(**LORA), reference=None)
            if surgery.adapter
            else dict(reference=tiny_model(seed=1))
        )
        return dict(model=tiny_model(), trainer_class=operated(surgery.operate), max_steps=STEPS, **given)

    stock = train(tmp_path / "stock", **options())
    with caplog.at_level(logging.WARNING, "fastdpo"), fastdpo.patched("trl.DPOTrainer"):
        patched = train(tmp_path / "patched", **options())
    assert_same(stock, patched)
    said = [record.message for record in caplog.records if record.name == "fastdpo"]
    if surgery.reason is None:
        assert said == []
        assert patched.calls == Counter({("policy", "fused"): STEPS, ("reference", "fused"): STEPS})
    else:
        (line,) = said[:1]
        assert line.startswith(f"trl.DPOTrainer (policy): not fused, {surgery.reason}")
        assert patched.calls["policy", "fused"] == BEFORE
        assert patched.calls["policy", "stock"] == STEPS - BEFORE
