"""Models of TRL's DPOTrainer: precision, placement, and wrappers of PEFT or torch."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer import dpo_trainer

import fastdpo
from tests.support.comparison import assert_same_in_low_precision, assert_trained_alike
from tests.support.recorded_calls import recorded_calls
from tests.support.trl.dpo import LORA, Run, adapter, assert_fused, build, tiny_model, train, trained_adapter

EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_same_but_for_rounding(stock: Run, patched: Run, dtype: torch.dtype) -> None:
    assert len(stock.gradients) == len(patched.gradients) == stock.steps == patched.steps
    assert {x.dtype for run in (stock, patched) for step in run.gradients for x in step.values()} == {torch.float32}
    assert_same_in_low_precision(stock, patched, dtype, stock.in_float64)


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_adapter_on_a_base_of_low_precision(both, dtype):
    """A frozen base in low precision with float32 adapters, like QLoRA."""
    lora = LoraConfig(**LORA)
    stock, patched = both(prepare=lambda model: model.to(dtype), reference=False, peft_config=lora, max_steps=2)
    assert_same_but_for_rounding(stock, patched, dtype)
    assert_fused(patched, policy=2, reference=2)


def test_evaluation_in_bfloat16(both):
    """The trainer casts the policy, but not the reference."""
    stock, patched = both(evaluate=6, only_evaluate=True, bf16_full_eval=True)
    (a,), (b,) = stock.logs, patched.logs
    assert a.keys() == b.keys()
    assert abs(a["eval_loss"] - b["eval_loss"]) < 4 * EPS[torch.bfloat16]
    assert_fused(patched, reference=2, eval=2)


def test_model_given_by_path(tmp_path):
    """TRL loads both models, the reference with the attention implementation of the policy."""
    tiny_model().save_pretrained(tmp_path / "model")
    options = dict(model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"}, learning_rate=0.1)
    stock = train(tmp_path / "stock", str(tmp_path / "model"), None, **options)
    with fastdpo.patched():
        patched = train(tmp_path / "patched", str(tmp_path / "model"), None, **options)
    assert abs(stock.logs[2]["rewards/margins"]) > 1e-3
    stock.logs[0].pop("rewards/accuracies"), patched.logs[0].pop("rewards/accuracies")  # equal weights: rounding noise
    assert_trained_alike((stock, patched), policy=3, reference=3)


def test_reference_loaded_for_a_model_patched_earlier(tmp_path):
    """TRL reads the policy's attention implementation, here fastdpo's, to load the reference."""
    tiny_model().save_pretrained(tmp_path / "model")
    model = tiny_model().from_pretrained(tmp_path / "model", dtype="float32")
    with fastdpo.patched():
        train(tmp_path / "first", model, None, max_steps=1)
        run = train(tmp_path / "second", model, None, max_steps=1)
    assert_fused(run, policy=1, reference=1)
    run = train(tmp_path / "third", model, None, max_steps=1)
    assert not run.calls


def test_saved_activations_may_be_moved(both, monkeypatch):
    """Offloading with hooks that return copies of all saved tensors.

    `activation_offloading` itself needs an accelerator; its use of autograd hooks does not.
    """
    moved = []

    def offload(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moved.append(tensor.numel())
        return tensor, tensor.detach().clone()

    def load_back(saved: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return saved[1].clone()

    monkeypatch.setattr(
        dpo_trainer, "get_act_offloading_ctx_manager", lambda model: saved_tensors_hooks(offload, load_back)
    )
    assert_trained_alike(both(activation_offloading=True), policy=3, reference=3)
    assert moved


@pytest.mark.parametrize("options", [{}, adapter()], ids=["full", "LoRA"])
def test_models_that_were_compiled_before(both, options):
    """They are fused as those that the option of the trainer compiles. In TRL, what is compiled would not run."""
    torch.compiler.reset()  # after other tests, torch may have compiled these forwards as often as it does
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled(model):
        return torch.compile(model, backend=backend)

    assert_trained_alike(both(prepare=compiled, max_steps=2, **options), policy=2, reference=2)
    assert graphs


@pytest.mark.parametrize("adapter", [False, True])
def test_modes_that_are_set_are_not_set_again(adapter, tmp_path, monkeypatch):
    visited = recorded_calls(monkeypatch, torch.nn.Module, "children", lambda result, module: module)
    with fastdpo.patched("trl.DPOTrainer"):
        policy = trained_adapter(tiny_model()) if adapter else tiny_model()
        trainer = build(tmp_path, policy, None if adapter else tiny_model(seed=1))
        trainer.current_gradient_accumulation_steps = 1
        model, batch = trainer.model, next(iter(trainer.get_train_dataloader()))
        layers = model.get_decoder().layers

        def sets_modes():
            visited.clear()
            trainer.training_step(model, batch)
            assert all(module.training for module in model.modules())
            return layers in visited

        model.eval()
        assert sets_modes()
        assert not sets_modes()
        layers[0].mlp = copy.deepcopy(layers[0].mlp).eval()
        assert sets_modes()
        assert not sets_modes()
        layers[1].input_layernorm.training = False
        assert sets_modes()
        called = []
        layers[1].train = lambda mode=True: called.append(mode)
        assert sets_modes()
        assert called == [True]
        assert "train" not in vars(model)


def test_what_is_unwrapped(tmp_path):
    """As in stock: models in wrappers, and where user code has replaced the function."""
    model = trained_adapter(tiny_model())
    wrapped, compiled = torch.nn.DataParallel(model), torch.compile(model)
    with fastdpo.patched("trl.DPOTrainer"):
        accelerator = build(tmp_path, model, None).accelerator
        assert accelerator.unwrap_model(model) is accelerator.unwrap_model(wrapped) is model
        assert accelerator.unwrap_model(compiled) is compiled
        assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
        accelerator.unwrap_model = lambda model: "of the user"
    assert accelerator.unwrap_model(model) == "of the user"


@pytest.mark.parametrize("enabled", ["nowhere", "everywhere", "in one layer", "in one layer after a step"])
@pytest.mark.parametrize("adapter", [False, True])
def test_checkpointing_is_enabled_again_as_it_was(adapter, enabled, tmp_path, monkeypatch):
    """Without a look at every module, and without the hook on the embeddings that transformers would add."""
    asked = []
    name = "is_activation_checkpointing"
    original = getattr(PreTrainedModel, name)
    monkeypatch.setattr(PreTrainedModel, name, property(lambda self: asked.append(self) or original.fget(self)))
    policy = trained_adapter(tiny_model()) if adapter else tiny_model()
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, policy, None if adapter else tiny_model(seed=1), max_steps=1)
        model = trainer.model
        if enabled == "everywhere":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        layer = next(x for x in model.modules() if isinstance(x, GradientCheckpointingLayer))
        if enabled.endswith("step"):
            trainer.train()
        if enabled.startswith("in one"):
            vars(layer)["gradient_checkpointing"] = True
        asked.clear()

        def state():
            flags = [x.gradient_checkpointing for x in model.modules() if hasattr(x, "gradient_checkpointing")]
            return flags, len(model.get_input_embeddings()._forward_hooks)

        before = state()
        with dpo_trainer.disable_gradient_checkpointing(model, {"use_reentrant": False}):
            assert not any(state()[0])
        assert state() == before
    assert any(before[0]) == (enabled != "nowhere")
    assert not asked
