"""Between packed calls, the configuration names the model's own attention, and packed attention runs nevertheless."""

import copy
import functools
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, GenerationConfig, TrainerCallback
from transformers.generation import ContinuousBatchingConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import DPOTrainer

import fastdpo
from tests.support import faults
from tests.support.comparison import assert_same, assert_trained_alike
from tests.support.trl.dpo import adapter, tiny_model, train_both

IDS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 9, 3]])
IMPLEMENTATIONS = ["sdpa", "eager"]


class At(TrainerCallback):
    """Calls a function with the model after each step, and with the number of steps, and keeps what it returns."""

    def __init__(self, function):
        self.function, self.found = function, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.found.append(self.function(model, state.global_step))


def names(model, step=0):
    """All names of attention that somebody can see of a model."""
    config = model.config
    others = copy.deepcopy(model).config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))
    written = config.to_json_string(use_diff=False) + str(config.to_dict()) + str(vars(config))
    return [x._attn_implementation for x in (config, *others)], "fastdpo" in written


class Looking(DPOTrainer):
    """Notes the names of attention in and around its losses and its backward passes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []
        self.add_callback(At(lambda model, step: self.seen.append(names(model))))

    def compute_loss(self, model, *args, **kwargs):
        self.seen.append(names(model))
        loss = super().compute_loss(model, *args, **kwargs)
        self.seen.append(names(model))
        return loss

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        self.seen.append(names(model))
        return loss

    def train(self, *args, **kwargs):
        result = super().train(*args, **kwargs)
        assert self.seen == [([self.model.config._attn_implementation] * 4, False)] * 12
        assert self.model.config._attn_implementation in IMPLEMENTATIONS
        return result


TRAININGS = {
    "full": {},
    "adapter": adapter(),
    "checkpointed": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False)),
    "reentrant": dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True)),
}


def with_attention(implementation):
    def prepare(model):
        model.set_attn_implementation(implementation)
        return model

    return prepare


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("training", TRAININGS)
def test_names_between_calls(tmp_path, training, implementation):
    prepare = with_attention(implementation)
    both = train_both(tmp_path, prepare=prepare, trainer_class=Looking, **TRAININGS[training])
    assert_trained_alike(both, policy=3, reference=3)


def continuous_batch(model, step=0):
    """What transformers' continuous batching generates. It takes attention by the name in the configuration."""
    was_training = model.training
    options = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32, page_size=16)
    found = model.eval().generate_batch([[5, 6, 7]], options, batching, warmup=False)
    model.train(was_training)
    return [x.generated_tokens for x in found.values()]


def attentions(model, step=0):
    """Weights of attention that a plain forward of an evaluation returns."""
    was_training = model.training
    with torch.no_grad():
        found = model.eval()(input_ids=IDS, output_attentions=True).attentions
    model.train(was_training)
    return torch.stack(found).tolist()


def configured_attentions(model, step=0):
    """As `attentions`, by the configuration, whose setter compares the name with that of eager attention."""
    model.config.output_attentions = True
    try:
        return attentions(model)
    finally:
        model.config.output_attentions = False


def other_implementation(model, step):
    """As a user, who sets another attention after the first step, and asserts that it is set."""
    assert model.config._attn_implementation == ("sdpa" if step in (0, 1) else "eager")
    model.set_attn_implementation("eager")
    return model.config._attn_implementation


USES = {
    "continuous batching": (continuous_batch, "sdpa", {}),
    "continuous batching of eager attention": (continuous_batch, "eager", {}),
    "attentions": (attentions, "eager", {}),
    "attentions by the configuration": (configured_attentions, "eager", {}),
    "attentions under checkpointing": (configured_attentions, "eager", TRAININGS["reentrant"]),
    "another implementation": (other_implementation, "sdpa", {}),
}


@pytest.mark.parametrize("use", USES)
def test_what_users_do_by_the_name_between_steps(tmp_path, use):
    """Also after the training, while the trainer is patched."""
    function, implementation, options = USES[use]
    found = []

    class Using(DPOTrainer):
        def train(self, *args, **kwargs):
            result = super().train(*args, **kwargs)
            found.append([*at.found, function(self.model, 3)])
            return result

    def prepare(model):
        at.found = []
        return with_attention(implementation)(model)

    at = At(function)
    both = train_both(tmp_path, prepare=prepare, trainer_class=Using, callbacks=[at], **options)
    assert_trained_alike(both, policy=3, reference=3)
    stock, patched = found
    if isinstance(stock[0], str):
        assert patched == stock
    else:
        torch.testing.assert_close(torch.tensor(patched), torch.tensor(stock))


def by_transformers(use_reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
        if use_reentrant:
            model.enable_input_require_grads()

    return prepare


def by_a_wrapper(model):
    """As accelerate does for FSDP."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)


def by_its_own_class(model):
    """As in a modeling file that checkpoints its layers by itself."""
    own = type(model.model.layers[0])

    class Checkpointed(own):
        def forward(self, *args, **kwargs):
            return checkpoint(functools.partial(own.forward, self), *args, use_reentrant=False, **kwargs)

    Checkpointed.__module__ = own.__module__
    for layer in model.model.layers:
        layer.__class__ = Checkpointed


CHECKPOINTING = {
    "reentrant": by_transformers(True),
    "not reentrant": by_transformers(False),
    "by a wrapper": by_a_wrapper,
    "by its own class": by_its_own_class,
}


def scored(model, ids=IDS):
    return fastdpo.score(model, ids, torch.ones_like(ids), ids).sums()


def gradients(model, sums):
    model.zero_grad()
    sums.square().sum().backward()
    return [x.grad for x in model.parameters() if x.grad is not None]


@pytest.fixture
def recomputed(monkeypatch):
    """The number of times that checkpointed attention has run."""
    runs = []
    faults.in_attention(monkeypatch, lambda own: lambda *args, **kwargs: runs.append(0) or own(*args, **kwargs))
    return runs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("how", CHECKPOINTING)
def test_layers_that_run_again_in_the_backward_pass(how, implementation, recomputed):
    plain, model = (with_attention(implementation)(tiny_model()).train() for _ in range(2))
    CHECKPOINTING[how](model)
    found = []
    for each in (plain, model):
        fastdpo.prepare(each)
        scored(each)  # which examines it
        runs, fused = len(recomputed), fastdpo.calls["fastdpo.score", "policy", "fused"]
        sums = scored(each)
        assert each.config._attn_implementation == implementation
        found.append([sums, *gradients(each, sums)])
        assert each.config._attn_implementation == implementation
        assert fastdpo.calls["fastdpo.score", "policy", "fused"] == fused + 1
        assert len(recomputed) - runs == (2 if each is plain else 4), "each layer, once or twice"
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


class Error(Exception):
    pass


def fails_in_the_forward(monkeypatch, model):
    def forward(*args, **kwargs):
        raise Error

    faults.in_attention(monkeypatch, lambda own: forward)


def fails_in_the_backward(monkeypatch, model):
    """Before, or after the first layer that runs again."""

    def fail(gradient):
        raise Error

    model.model.norm.weight.register_hook(fail)


def fails_when_a_layer_runs_again(monkeypatch, model):
    runs = itertools.count()

    def failing(own):
        def forward(*args, **kwargs):
            if next(runs) >= 2:
                raise Error
            return own(*args, **kwargs)

        return forward

    faults.in_attention(monkeypatch, failing)


FAILURES = {f.__name__: f for f in (fails_in_the_forward, fails_in_the_backward, fails_when_a_layer_runs_again)}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_leaves_the_name_as_it_was(failure, use_reentrant, monkeypatch):
    model = tiny_model().train()
    by_transformers(use_reentrant)(model)
    fastdpo.prepare(model)
    expected = scored(model)
    with monkeypatch.context() as patch:
        FAILURES[failure](patch, model)
        with pytest.raises(Error) as raised:
            gradients(model, scored(model))
        assert model.config._attn_implementation == "sdpa", "while the error is kept"
    del raised
    model.model.norm.weight._backward_hooks = None
    assert torch.equal(scored(model), expected)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_configuration_in_threads():
    """A call that ends leaves the name to one that runs, and padded calls run by it as by their own."""
    models = [tiny_model(seed=seed).train() for seed in range(3)]
    for module in (x for model in models[1:] for x in model.modules()):
        if hasattr(module, "config"):
            module.config = models[0].config
    for model in models[:2]:
        by_transformers(False)(model)
        fastdpo.prepare(model)

    def work(model):
        if model is models[2]:
            return [model(input_ids=IDS).logits]
        sums = scored(model)
        return [sums, *gradients(model, sums)]

    expected = [work(model) for model in models]
    fused = fastdpo.calls["fastdpo.score", "policy", "fused"]

    def repeat(model, expected):
        for _ in range(15):
            for x, y in zip(work(model), expected, strict=True):
                assert torch.equal(x, y)

    with ThreadPoolExecutor(len(models)) as threads:
        list(threads.map(repeat, models, expected))
    assert fastdpo.calls["fastdpo.score", "policy", "fused"] == fused + 30
    assert models[0].config._attn_implementation == "sdpa"


STOCK = ALL_ATTENTION_FUNCTIONS["sdpa"]
STOCK_MASK = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def scaled(module, query, *args, **kwargs):
    return STOCK(module, query * 1.5, *args, **kwargs)


def equal(module, *args, **kwargs):
    return STOCK(module, *args, **kwargs)


def blinding(*args, **kwargs):
    mask = STOCK_MASK(*args, **{**kwargs, "allow_is_causal_skip": False}).clone()
    mask[..., 3:, 1] = False
    return mask


def local(table, function):
    return lambda: table.__setitem__("sdpa", function)


def own_again(table):
    return lambda: table.__delitem__("sdpa")


REPLACED = {
    "attention": ({1: local(ALL_ATTENTION_FUNCTIONS, scaled)}, "fss"),
    "attention, as registered": ({2: lambda: AttentionInterface.register("sdpa", scaled)}, "ffs"),
    "an equal one": ({1: local(ALL_ATTENTION_FUNCTIONS, equal)}, "fff"),
    "an equal one, then another": (
        {1: local(ALL_ATTENTION_FUNCTIONS, equal), 2: local(ALL_ATTENTION_FUNCTIONS, scaled)},
        "ffs",
    ),
    "attention, and back": ({1: local(ALL_ATTENTION_FUNCTIONS, scaled), 2: own_again(ALL_ATTENTION_FUNCTIONS)}, "fsf"),
    "masks": ({2: local(ALL_MASK_ATTENTION_FUNCTIONS, blinding)}, "ffs"),
    "masks, and back": (
        {1: local(ALL_MASK_ATTENTION_FUNCTIONS, blinding), 2: own_again(ALL_MASK_ATTENTION_FUNCTIONS)},
        "fsf",
    ),
}


@pytest.mark.parametrize("replaced", REPLACED)
def test_functions_of_attention_that_are_replaced_between_steps(tmp_path, replaced):
    """The entries of transformers' tables are what the trainer's own path runs."""
    changes, calls = REPLACED[replaced]

    class Own(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            AttentionInterface.register("sdpa", STOCK)
            for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                table._local_mapping.pop("sdpa", None)

        on_train_end = on_train_begin

    both = train_both(tmp_path, callbacks=[Own(), At(lambda model, step: changes.get(step, lambda: None)())])
    assert_same(*both)
    paths = {path: sum(x == path[0] for x in calls) for path in ("fused", "stock")}
    assert both[1].calls == {(kind, path): n for kind in ("policy", "reference") for path, n in paths.items() if n}
