"""Reward models of every kind in TRL's RewardTrainer: families, multimodal classes, bfloat16, several labels."""

import contextlib
import copy
import functools

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import fastdpo
from benchmarks.float64 import float64_throughout
from fastdpo.models import forward
from fastdpo.models.calls import calls
from fastdpo.models.reward_head import CLASSIFIER_HEAD
from fastdpo.models.state import ForwardOptions
from tests.support.accuracy import assert_as_accurate_as
from tests.support.comparison import assert_trained_alike, drawn, sizes_of
from tests.support.models.multimodal import FUSED as MULTIMODAL
from tests.support.models.multimodal import IMAGE
from tests.support.trl.dpo import WORDS
from tests.support.trl.reward import has_classifier, reward_model, train_both_rewards, train_reward


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both_rewards, tmp_path)


def multimodal_reward_model(name: str, seed: int = 0, **config):
    """The classifier of a multimodal family, whose `pad_token_id` TRL sets in the configuration of its text."""
    family = MULTIMODAL[name]
    text = sizes_of(len(WORDS)) | family.text
    parts = dict(text_config=text, vision_config=family.vision, image_token_id=IMAGE, num_labels=1, **family.rest)
    return drawn(AutoModelForSequenceClassification, name, seed, **parts, **config)


@pytest.mark.parametrize("name", filter(has_classifier, MULTIMODAL))
def test_text_in_a_multimodal_class(both, name):
    assert_trained_alike(both(kind=name, build=multimodal_reward_model, max_steps=2), policy=2)


IDS = torch.tensor(
    [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 20, 21, 0], [30, 31, 32, 33, 34, 0, 0], [5, 6, 7, 8, 9, 22, 0]]
)


@pytest.fixture
def installed():
    """Installs the fused forward on a reward model, and uninstalls it after the test."""
    options = ForwardOptions("test", "reward", rewards=CLASSIFIER_HEAD)
    yield lambda model: forward.install(model, options, CLASSIFIER_HEAD.make_output, prior_scores=False)
    forward.uninstall_all("test")


def rewards_of(model) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=(IDS != 0).long(), use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@torch.no_grad()
def test_rewards_are_as_accurate_as_those_of_the_class(dtype, installed):
    model = reward_model().to(dtype).eval()
    stock, before = rewards_of(model), calls["test", "reward", "fused"]
    with float64_throughout():
        exact = rewards_of(copy.deepcopy(model).double())
    installed(model)
    assert_as_accurate_as(rewards_of(model), stock, exact)
    assert calls["test", "reward", "fused"] == before + 1


def test_several_labels(tmp_path, installed, caplog):
    """RewardTrainer refuses such a model. Other callers get the labels of its class, and one logged reason."""
    for patch in (contextlib.nullcontext, fastdpo.patched):
        with patch(), pytest.raises(ValueError, match="reward models require `num_labels=1`"):
            train_reward(tmp_path, reward_model(num_labels=3))
    model = reward_model(num_labels=3).eval()
    expected, before = rewards_of(model), calls["test", "reward", "stock"]
    installed(model)
    for _ in range(2):
        assert torch.equal(rewards_of(model), expected)
    assert expected.shape == (4, 3)
    assert calls["test", "reward", "stock"] == before + 2
    assert caplog.text.count("test (reward): not fused, the model has 3 labels, and a reward model has one") == 1


# what a call gives, and what its model's configuration has
ASKING = {
    "labels": (dict(labels=torch.tensor([1.0, 0.5, -1.0, 0.0])), {}),
    "hidden states": (dict(output_hidden_states=True), {}),
    "a cache": (dict(use_cache=True), {}),
    "a cache in a tuple": (dict(use_cache=True, return_dict=False), {}),
    "hidden states by configuration": ({}, dict(output_hidden_states=True)),
    "attentions by configuration": ({}, dict(output_attentions=True)),
    "a shifted label of its own": (dict(shift_labels=IDS, labels=torch.zeros(4)), {}),
}


@pytest.mark.parametrize("asked", ASKING)
@torch.no_grad()
def test_calls_that_ask_for_more_than_scores_get_it(asked, installed, caplog):
    given, config = ASKING[asked]
    model = reward_model(attn_implementation="eager", **config).eval()
    expected = model(input_ids=IDS, attention_mask=(IDS != 0).long(), **given)
    installed(model)
    found = model(input_ids=IDS, attention_mask=(IDS != 0).long(), **given)
    assert type(found) is type(expected)
    if not isinstance(expected, tuple):
        assert found.keys() == expected.keys()
        assert found.loss is None or torch.equal(found.loss, expected.loss)
    assert len(found) == len(expected)
    assert torch.equal(*(x[0] if isinstance(x, tuple) else x.logits for x in (found, expected)))
    assert caplog.text.count("test (reward): not fused, ") == 1


def test_outputs_that_a_call_declines_are_not_missed(installed):
    model, before = reward_model(output_hidden_states=True).eval(), calls["test", "reward", "fused"]
    installed(model)
    assert model(input_ids=IDS, attention_mask=(IDS != 0).long(), output_hidden_states=False).hidden_states is None
    assert calls["test", "reward", "fused"] == before + 1
