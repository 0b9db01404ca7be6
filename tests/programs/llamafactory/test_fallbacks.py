"""What is not fused in LLaMA-Factory runs as stock does, with one logged reason."""

import pytest
import torch
from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq
from llamafactory.train.dpo import trainer as dpo_trainer
from llamafactory.train.kto import trainer as kto_trainer
from llamafactory_runs import LORA, STOCK_CALLS, assert_stock, checkpoint, train
from transformers.models.llama import modeling_llama

import fastdpo

STAGES = {"dpo": (dpo_trainer, "CustomDPOTrainer"), "kto": (kto_trainer, "CustomKTOTrainer")}


@pytest.fixture(params=STAGES)
def stage(request):
    return request.param


def test_a_head_with_a_hook(both, stage, caplog):
    stock, patched = both(stage, tiny=dict(dtype="bfloat16"), **LORA, upcast_lmhead_output=True)
    assert_stock(stock, patched)
    assert caplog.text.count("not fused") == 1


def test_batches_with_other_inputs(both, stage, caplog, monkeypatch):
    make_batch = MultiModalDataCollatorForSeq2Seq.__call__

    def with_token_types(self, features):
        batch = make_batch(self, features)
        return {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}

    monkeypatch.setattr(MultiModalDataCollatorForSeq2Seq, "__call__", with_token_types)
    tiny = dict(type_vocab_size=2)
    stock, patched = both(stage, "gpt2", tiny=tiny, flash_attn="disabled")
    assert_stock(stock, patched)
    assert patched.calls == STOCK_CALLS[stage]
    assert "batches also hold" in caplog.text
    assert caplog.text.count("not fused") == 2


def module_of_liger(monkeypatch):
    kind = type("LigerRMSNorm", (modeling_llama.LlamaRMSNorm,), {"__module__": "liger_kernel.transformers.rms_norm"})
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", kind)


def forward_of_unsloth(monkeypatch):
    forward = modeling_llama.LlamaMLP.forward
    namespace = {"__name__": "unsloth.models.llama", "forward": forward}
    exec("def fast_forward(self, x): return forward(self, x)", namespace)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", namespace["fast_forward"])


@pytest.mark.parametrize("replace", [module_of_liger, forward_of_unsloth])
def test_kernels_of_other_packages(both, stage, caplog, monkeypatch, replace):
    replace(monkeypatch)
    stock, patched = both(stage)
    assert_stock(stock, patched)
    assert not patched.calls
    assert not any("fastdpo" in name for module in patched.model.modules() for name in vars(module))
    assert caplog.text.count("has replaced modules of LlamaForCausalLM") == caplog.text.count("not fused") == 1


def test_without_these_lines_there_is_one_reason(tmp_path, caplog):
    """TRL's line alone leaves LLaMA-Factory's trainer as it is."""
    model = checkpoint(tmp_path)
    stock = train(tmp_path, model)
    with fastdpo.patched("trl.DPOTrainer"):
        patched = train(tmp_path, model)
    assert_stock(stock, patched)
    assert not patched.calls
    assert caplog.text.count("trl.DPOTrainer (CustomDPOTrainer): not fused") == caplog.text.count("not fused") == 1


def test_training_with_megatron_is_refused(monkeypatch):
    monkeypatch.setenv("USE_MCA", "1")
    with pytest.raises(fastdpo.PatchError, match="off, with USE_MCA"):
        fastdpo.patch("llamafactory.DPOTrainer")
