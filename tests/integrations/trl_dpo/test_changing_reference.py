"""References that change while `reference_memory` holds their log-probabilities."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trl import DPOTrainer
from trl.experimental.bema_for_ref_model import BEMACallback
from trl.experimental.bema_for_ref_model import DPOTrainer as BEMADPOTrainer
from trl.trainer import dpo_trainer
from trl.trainer.callbacks import SyncRefModelCallback

import fastdpo
from fastdpo import NotFused
from fastdpo.models.structure import Structure
from fastdpo.ref_logps import fingerprint as fingerprint_module
from fastdpo.ref_logps.fingerprint import fingerprint
from tests.support.comparison import approximately
from tests.support.trl.dpo import LORA, assert_same, build, numbers, pairs, tiny_model, train

EPOCHS = dict(data=pairs(8), max_steps=-1, num_train_epochs=4, evaluate=0)  # two steps per epoch


class Every4thStep(TrainerCallback):
    """Calls a function with the trainer after every fourth step: twice in four epochs."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 4 == 0:
            self.change(self.trainer)


def changing(change, base: type[DPOTrainer] = DPOTrainer) -> type[DPOTrainer]:
    """Creates a trainer class with a callback that changes the reference."""

    class Changing(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            callback = change if isinstance(change, TrainerCallback) else Every4thStep(change)
            callback.trainer = self
            self.add_callback(callback)

    return Changing


def follow_the_policy(trainer):
    for reference, policy in zip(trainer.ref_model.parameters(), trainer.model.parameters(), strict=True):
        reference.data.lerp_(policy.data, 0.5)  # like SyncRefModelCallback: tensor versions stay unchanged


def replace(trainer):
    other = tiny_model(seed=2 + trainer.state.global_step)
    dpo_trainer.add_fused_lm_head(other)
    trainer.ref_model = other.eval()


def scale_its_output(trainer):
    factor = 1 + trainer.state.global_step / 10
    trainer.ref_model.model.norm.register_forward_hook(lambda module, args, output: output * factor)


def scale_its_attention(trainer):
    trainer.ref_model.model.layers[0].self_attn.scaling *= 1.5


def give_it_another_class(trainer):
    trainer.ref_model.model.norm.__class__ = (
        Twice if type(trainer.ref_model.model.norm) is LlamaRMSNorm else LlamaRMSNorm
    )


class Twice(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def flip_its_head(trainer):
    weight = trainer.ref_model.lm_head.weight
    weight.data.copy_(weight.data.flip(0))


def negate_its_head(trainer):
    trainer.ref_model.lm_head.weight.data.neg_()


def merge_and_restart(trainer):
    """Merges the adapter into the base weights and resets it, like ReLoRA (arXiv 2307.05695)."""
    with torch.no_grad():
        for name, module in trainer.model.named_modules():
            if name.endswith("q_proj"):
                module.base_layer.weight += module.get_delta_weight("default")
                module.lora_B["default"].weight.zero_()


def full(**options) -> dict:
    return dict(model=tiny_model(), reference=tiny_model(seed=1), **options)


def adapter() -> dict:
    torch.manual_seed(3)  # for the adapter's weights
    return dict(model=tiny_model(), reference=None, peft_config=LoraConfig(**LORA))


CASES = {
    "written to": lambda: full(trainer_class=changing(follow_the_policy)),
    "replaced": lambda: full(trainer_class=changing(replace)),
    "hooked": lambda: full(trainer_class=changing(scale_its_output)),
    "rescaled": lambda: full(trainer_class=changing(scale_its_attention)),
    "given another class": lambda: full(trainer_class=changing(give_it_another_class)),
    "reordered": lambda: full(trainer_class=changing(flip_its_head)),
    "negated": lambda: full(trainer_class=changing(negate_its_head)),
    "made an exponential average": lambda: full(
        trainer_class=changing(
            BEMACallback(update_freq=2, update_ref_model=True, ref_model_update_freq=4), BEMADPOTrainer
        )
    ),
    "merged into": lambda: dict(adapter(), trainer_class=changing(merge_and_restart)),
}


@pytest.mark.parametrize("name", CASES)
def test_stored_values_are_dropped_when_the_reference_changes(tmp_path, caplog, name):
    stock = train(tmp_path / "stock", **CASES[name](), **EPOCHS)
    with caplog.at_level(logging.WARNING, "fastdpo"), fastdpo.patched("trl.DPOTrainer", reference_memory=True):
        patched = train(tmp_path / "patched", **CASES[name](), **EPOCHS)
    assert_same(stock, patched)
    messages = [record.message for record in caplog.records if "reference_memory" in record.message]
    assert messages == ["fastdpo: trl.DPOTrainer: the reference has changed; reference_memory is cleared"]
    reference_calls = {key: n for key, n in patched.calls.items() if key[0] == "reference"}
    # The values of every second epoch are computed anew.
    assert reference_calls == {("reference", "fused"): 4, ("reference", "remembered"): 4}


def test_a_corrupt_file_found_during_training_does_not_stop_it(tmp_path, caplog):
    memory = tmp_path / "memory"

    def change_and_corrupt(trainer):
        follow_the_policy(trainer)
        key = memory / "corrupt"
        key.mkdir(exist_ok=True)
        (key / "bad.safetensors").write_bytes(b"no tensors")
        vars(trainer)["_fastdpo_state"].memory._make_key = lambda: "corrupt"

    options = dict(trainer_class=changing(change_and_corrupt), **EPOCHS)
    with caplog.at_level(logging.WARNING, "fastdpo"), fastdpo.patched("trl.DPOTrainer", reference_memory=memory):
        run = train(tmp_path / "run", **full(**options))
    assert run.steps == 8
    assert "reference_memory is kept in RAM, not on disk: " in caplog.text


def test_trls_sync_callback_added_by_a_subclass(tmp_path):
    class Synced(DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(SyncRefModelCallback(self.ref_model, self.accelerator))

    options = dict(full(trainer_class=Synced), ref_model_mixup_alpha=0.5, ref_model_sync_steps=4, **EPOCHS)
    stock = train(tmp_path / "stock", **options)
    with fastdpo.patched("trl.DPOTrainer", reference_memory=True):
        options |= full()
        patched = train(tmp_path / "patched", **options)
    assert_same(stock, patched)
    assert patched.calls["reference", "remembered"] == 4


@pytest.mark.parametrize("memory", [True, "directory"])
def test_the_policy_becomes_the_reference_between_two_trainings(tmp_path, memory):
    logs = []
    for name in ("stock", "patched"):
        if name == "patched":
            reference_memory = True if memory is True else tmp_path / memory
            fastdpo.patch("trl.DPOTrainer", reference_memory=reference_memory)
        trainer = build(tmp_path / name, tiny_model(), tiny_model(seed=1), 8, max_steps=4)
        trainer.train()
        trainer.ref_model.load_state_dict(trainer.model.state_dict())
        trainer.train()
        logs.append([numbers(log) for log in trainer.state.log_history if "loss" in log])
    assert fastdpo.calls["trl.DPOTrainer", "reference", "remembered"] > 0
    for stock, patched in zip(*logs, strict=True):
        for log in (stock, patched):
            log.pop("rewards/accuracies")  # rounding noise: margins are 0 where the models are equal
        assert patched == approximately(stock)


def test_a_reference_that_shares_layers_with_the_policy_is_not_remembered(tmp_path, caplog):
    def models():
        options = full()
        options["reference"].model.layers[0] = options["model"].model.layers[0]
        return options

    stock = train(tmp_path / "stock", **models(), **EPOCHS)
    with caplog.at_level(logging.WARNING, "fastdpo"), fastdpo.patched("trl.DPOTrainer", reference_memory=True):
        patched = train(tmp_path / "patched", **models(), **EPOCHS)
    assert_same(stock, patched)
    assert "reference_memory is disabled, trained weights are part of the reference" in caplog.text
    assert not patched.calls["reference", "remembered"]


MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.3, router_aux_loss_coef=0.0)


def test_a_reference_that_draws_random_numbers_is_not_remembered(tmp_path, caplog, monkeypatch):
    def options():
        adapter = LoraConfig(**LORA)
        return dict(model=tiny_model("mixtral", **MIXTRAL), reference=None, peft_config=adapter, **EPOCHS)

    with fastdpo.patched("trl.DPOTrainer", reference_memory=True):
        run = train(tmp_path / "1", **options())
    assert "reference_memory is disabled, it draws random numbers (dropout, noise or jitter)" in caplog.text
    assert not run.calls["reference", "remembered"]
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(NotFused, match="random numbers"), fastdpo.patched("trl.DPOTrainer", reference_memory=True):
        train(tmp_path / "2", **options())


def flip_one_bit(x: torch.Tensor) -> None:
    x.view(torch.uint8).flatten()[-1] ^= 1


@pytest.fixture(params=["cpu", "cuda"])
def words(request, monkeypatch):
    """Checksums on the CPU are computed as on a device, in parts of a few words."""
    word, _, weighted = fingerprint_module.words_on(torch.device(request.param))
    monkeypatch.setattr(fingerprint_module, "words_on", lambda device: (word, 8, weighted))


def test_one_flipped_bit_changes_the_fingerprint(words):
    model, structure = tiny_model(), Structure()
    before = fingerprint(model, structure)
    assert fingerprint(model, structure) == before
    for x in (model.lm_head.weight.data, model.model.norm.weight.data, model.model.rotary_emb.inv_freq):
        flip_one_bit(x)
        assert fingerprint(model, structure) != before
        flip_one_bit(x)
        assert fingerprint(model, structure) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 3, 8, 13])
def test_the_fingerprint_covers_tensors_of_any_size_and_layout(dtype, size, words):
    module = torch.nn.Module()
    whole = torch.arange(20).to(dtype)
    for name, x in {
        "aligned": whole[:size],
        "within": whole[3 : 3 + size],
        "strided": whole[:size].expand(2, size).t(),
    }.items():
        module.register_buffer(name, x)
    model, structure = tiny_model(), Structure()
    model.extra = module
    before = fingerprint(model, structure)
    if size:
        module.within = module.within.clone()
        assert fingerprint(model, structure)[1] == before[1]
        flip_one_bit(module.within)
        assert fingerprint(model, structure)[1] != before[1]


@pytest.mark.parametrize("change", [torch.neg, lambda x: x.flip(0), lambda x: x.roll(1, 1), lambda x: x * 2])
def test_changes_of_many_values_do_not_cancel_out(change, words):
    model, structure = tiny_model(), Structure()
    before = fingerprint(model, structure)
    weight = model.lm_head.weight.data
    weight.copy_(change(weight))
    assert fingerprint(model, structure) != before


def test_disabled_adapters_do_not_change_the_fingerprint():
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    base, structure = model.get_base_model(), Structure()
    with model.disable_adapter():
        before = fingerprint(base, structure)
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.data.mul_(2)
    with model.disable_adapter():
        assert fingerprint(base, structure) == before
    assert fingerprint(base, structure) != before
