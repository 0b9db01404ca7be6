"""`patch()`: its report, its errors, and `unpatch()`, which must leave nothing behind."""

import functools
import inspect
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel
from transformers import TrainingArguments
from trl import DPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.trainer import dpo_trainer

import fastdpo
from fastdpo.ops.choice import notes
from tests.support.comparison import assert_trained_alike
from tests.support.models.watching import as_of_an_engine
from tests.support.stand_ins import hub_attention
from tests.support.stand_ins.flash import stand_in
from tests.support.trl.dpo import assert_fused, build, tiny_model, train

IDS = torch.arange(3, 15).view(2, 6)
BATCH = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS, fused_lm_head=True)


def seams() -> tuple:
    of_dpo = ("__init__", "_compute_loss", "compute_ref_log_probs", "_precompute_ref_logps")
    of_online = ("_forward", "create_accelerator_and_postprocess", "training_step")
    methods = [
        *(getattr(DPOTrainer, name) for name in of_dpo),
        *(getattr(OnlineDPOTrainer, name) for name in of_online),
    ]
    return dpo_trainer.add_fused_lm_head, *methods


def test_patch_returns_a_report_and_logs_it_in_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="fastdpo"):
        report = fastdpo.patch()
    names = ("DPO", "OnlineDPO", "KTO", "Reward", "GRPO", "RLOO", "CPO", "ORPO", "A2PO", "TPO")
    assert [seam.name for seam in report.seams] == [f"trl.{name}Trainer" for name in names]
    assert all(seam.version == "1.16.0" and seam.on for seam in report.seams)
    states = ": on", ": on when imported"
    named = [", ".join(seam.name for seam in report.seams if str(seam).endswith(state)) for state in states]
    said = [f"{each} (1.16.0){state}" for each, state in zip(named, states, strict=True) if each]
    assert str(report) == f"fastdpo: {' | '.join([*said, *filter(None, [report.note])])}"
    assert [record.message for record in caplog.records] == [str(report)]


def test_trainers_without_a_token_budget_are_named(caplog):
    with caplog.at_level(logging.INFO, logger="fastdpo"):
        fastdpo.patch(max_tokens=8192)
        others = ", ".join(f"trl.{name}Trainer" for name in ("OnlineDPO", "CPO", "ORPO", "A2PO"))
        message = f"fastdpo: max_tokens does not apply to {others}"
        assert (caplog.records[-1].levelno, caplog.records[-1].message) == (logging.INFO, message)
        fastdpo.unpatch()
        fastdpo.patch("trl.OnlineDPOTrainer", max_tokens=8192)
        message = "fastdpo: max_tokens does not apply to trl.OnlineDPOTrainer"
        assert (caplog.records[-1].levelno, caplog.records[-1].message) == (logging.WARNING, message)


def test_patched_block(monkeypatch):
    stock = seams()
    with fastdpo.patched() as report:
        assert report.seams[0].on
        assert seams() != stock
        with fastdpo.patched():
            pass
        assert seams() != stock, "an inner block must not undo the outer one"
    assert seams() == stock
    with pytest.raises(ZeroDivisionError), fastdpo.patched():
        raise ZeroDivisionError
    assert seams() == stock


@pytest.fixture
def threads():
    """Two threads, between which Python switches often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(2) as pool:
        yield pool
    sys.setswitchinterval(interval)


def test_other_threads_can_create_tuples_during_patching(threads):
    """Python raises SystemError in a thread whose unfinished tuple another thread holds."""
    patched = threading.Event()

    def build_tuples():
        while not patched.is_set():
            tuple(i for i in range(100))

    built = [threads.submit(build_tuples) for _ in range(2)]
    try:
        for _ in range(3):
            fastdpo.patch()
            fastdpo.unpatch()
    finally:
        patched.set()
    for each in built:
        each.result()


def test_unpatch_keeps_wrappers_added_by_other_code(tmp_path):
    fastdpo.patch()
    model = tiny_model()
    trainer = build(tmp_path, model, tiny_model(seed=1))
    inner, seen = model.forward, []
    model.forward = lambda *args, **kwargs: seen.append(1) or inner(*args, **kwargs)
    fastdpo.unpatch()
    before = fastdpo.calls["trl.DPOTrainer", "policy", "fused"]
    trainer.train()
    assert seen
    assert fastdpo.calls["trl.DPOTrainer", "policy", "fused"] == before


def test_code_around_a_constructor_takes_other_arguments(tmp_path, monkeypatch):
    """Such as those of older versions. Without it, the error is that of the trainer."""
    stock = DPOTrainer.__init__

    @functools.wraps(stock)
    def init(self, *args, tokenizer=None, **kwargs):
        stock(self, *args, **kwargs)

    models = [tiny_model(seed=seed) for seed in range(2)]
    with fastdpo.patched(), pytest.raises(TypeError, match=r"DPOTrainer\.__init__\(\) got an .* 'tokenizer'"):
        build(tmp_path, *models, tokenizer=None)
    with fastdpo.patched(), pytest.raises(ValueError, match="`train_dataset` is required"):
        DPOTrainer(models[0], args=TrainingArguments(tmp_path))
    monkeypatch.setattr(DPOTrainer, "__init__", init)
    with fastdpo.patched():
        run = train(tmp_path, *models, tokenizer=None)
    assert_fused(run, policy=3, reference=3)


def test_trainers_that_share_a_reference_wrap_it_once(tmp_path):
    reference = tiny_model(seed=1)
    fastdpo.patch()
    for i in range(3):
        build(tmp_path / str(i), tiny_model(), reference)
        assert vars(reference)["_fastdpo_forward"].inner is None


def assert_trains_with(requested: str, loaded: str, directory) -> None:
    """Asserts that models with an attention are trained by it and keep it, and that padded batches run as before."""
    runs = []
    for name in ("stock", "patched"):
        models = tiny_model(), tiny_model(seed=1)
        for model in models:
            model.set_attn_implementation(requested)
            assert model.config._attn_implementation == loaded
        with fastdpo.patched() if name == "patched" else nullcontext():
            runs.append(train(directory / name, *models))
            if name == "patched":
                assert models[0].config._attn_implementation == loaded
                batch = dict(input_ids=IDS, attention_mask=(torch.arange(6) > torch.tensor([[0], [2]])).long())
                padded = models[0].eval()(**batch).logits
        assert models[0].config._attn_implementation == loaded
    assert_trained_alike(runs, policy=3, reference=3)
    assert torch.equal(padded, models[0](**batch).logits)


def test_a_model_with_flash_attention(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    assert_trains_with("flash_attention_2", "flash_attention_2", tmp_path)


@pytest.mark.parametrize(
    ("requested", "loaded"),
    [
        ("flash_attention_2", "kernels-community/flash-attn2"),  # transformers takes the Hub where flash-attn is absent
        ("kernels-community/flash-attn3", "kernels-community/flash-attn3"),
        ("kernels-community/flash-attn2@fa1e", "kernels-community/flash-attn2@fa1e"),
    ],
)
def test_a_model_with_attention_from_the_hub(requested, loaded, tmp_path, monkeypatch):
    repositories = hub_attention.install(monkeypatch)
    assert_trains_with(requested, loaded, tmp_path)
    assert repositories == [loaded.partition("@")[0]]
    assert [(name, x.__name__) for name, x in notes.builds.items()] == [("flash-attn-2", hub_attention.NAME)]


def test_signature_and_unwrapping_survive(tmp_path):
    """`generate` reads the signature; a `__wrapped__` would make accelerate drop the wrapper."""
    fastdpo.patch()
    model = tiny_model()
    build(tmp_path, model, tiny_model(seed=1))
    assert inspect.signature(model.forward) == inspect.signature(tiny_model().forward)
    model._original_forward = model.forward  # as accelerate does for mixed precision
    mixed = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__))
    model.forward = MethodType(mixed, model)
    unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=False).eval()
    before = fastdpo.calls.total()
    unwrapped(**BATCH)
    assert fastdpo.calls.total() == before + 1


def test_a_layer_that_does_not_receive_the_layout_makes_the_model_fall_back(tmp_path, monkeypatch, caplog):
    fastdpo.patch()
    model = tiny_model()
    build(tmp_path, model, tiny_model(seed=1))
    forward = as_of_an_engine(lambda hidden_states, **kwargs: (hidden_states, None))
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", forward)
    before = fastdpo.calls.copy()
    model(**BATCH)
    assert fastdpo.calls - before == {("trl.DPOTrainer", "policy", "stock"): 1}
    assert "1 attention calls of LlamaForCausalLM's 2 layers got the packed layout, 0 did not" in caplog.text
    assert model.config._attn_implementation == "sdpa"


AT_ONCE = {  # what two threads call, and then one
    "patch": (fastdpo.patch, fastdpo.patch, fastdpo.unpatch),
    "unpatch": (fastdpo.unpatch, fastdpo.unpatch, fastdpo.unpatch),
    "both": (fastdpo.patch, fastdpo.unpatch, fastdpo.unpatch),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_threads_patch_and_unpatch_at_once(case, threads):
    stock, (*functions, last), barrier = seams(), AT_ONCE[case], threading.Barrier(2)

    def run(function):
        barrier.wait()
        function()

    for _ in range(20):
        if case != "patch":
            fastdpo.patch()
        list(threads.map(run, functions))
        last()
        assert seams() == stock
