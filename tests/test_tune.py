"""`fastdpo tune` measures the head and the attention of a model."""

import json
import sys
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig, Qwen2Config

from fastdpo.__main__ import main
from fastdpo.commands import tune
from fastdpo.commands.tune import AttentionSize, HeadSize
from fastdpo.ops.choice import tuning
from fastdpo.ops.choice.tuning import Choice
from fastdpo.ops.choice.verdicts import Kernel

CPU = torch.device("cpu")
SIZES: dict[str, Any] = dict(hidden_size=64, num_attention_heads=4, vocab_size=99)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (LlamaConfig(**SIZES), [AttentionSize(4, 4, 16, None, None)]),
        (Qwen2Config(**SIZES, num_key_value_heads=2), [AttentionSize(4, 2, 16, None, None)]),
        (
            Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=32, sliding_window=7),
            [AttentionSize(4, 2, 32, None, 50.0), AttentionSize(4, 2, 32, 7, 50.0)],
        ),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_the_sizes_of_a_model(config, attention):
    assert tune.sizes_of(config) == (HeadSize(64, 99), attention)


def test_a_model_whose_attention_is_not_known():
    with pytest.raises(ValueError, match=r"^tune: the attention of deepseek_v3 cannot be read"):
        tune.sizes_of(DeepseekV3Config(**SIZES))


def test_pairs_tile_the_tokens():
    rows = tune.rows_of_pairs(2500)
    assert rows[:, 3].sum() == 2500
    assert torch.equal(rows[1:, 2], rows[:-1, 2:].sum(1))
    assert rows[:2].tolist() == [[0, 0, 0, 768], [0, 512, 768, 256]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hidden 896 --vocabulary 1000", "no GPU found (torch.cuda.is_available() is False)"),
        ("--hidden 0 --vocabulary 9", "hidden must be positive; got 0"),
        ("--hidden 8 --vocabulary 9 --tokens 4096 100", "tokens must be at least 1024; got 100"),
        ("--hidden 8", "pass --model, or --hidden and --vocabulary"),
        ("--model path --hidden 8 --vocabulary 9", "pass --model, or --hidden and --vocabulary"),
        ("--model /no/model", "/no/model"),
    ],
)
def test_the_command_ends_with_one_line(monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["fastdpo", "tune", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code.startswith("fastdpo tune: ")
    assert message in ended.value.code


HEAD = Choice("32 warps", {"8 warps": 10.0, "32 warps": 8.0})
ATTENTION = Choice("torch", {"torch": 1.5, "triton": "OutOfResources: shared memory"})


@pytest.fixture
def choices(monkeypatch):
    """Plants the choices that the command makes. Returns what it was asked for."""
    asked = []
    made = {
        Kernel("linear_logps", CPU, torch.bfloat16): HEAD,
        Kernel("packed_attention", CPU, torch.bfloat16): ATTENTION,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "measured", lambda *arguments, progress: asked.append(arguments) or made)
    return asked


def test_the_command_prints_times(choices, tmp_path, monkeypatch, capsys):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fastdpo", "tune", "--model", str(tmp_path), "--frozen"])
    main()
    ((head, attention, dtype, frozen, tokens, device),) = choices
    assert (head, attention) == tune.sizes_of(LlamaConfig(**SIZES))
    assert (dtype, frozen, tokens, device) == (torch.bfloat16, True, tune.TOKENS, torch.device("cuda", 0))
    assert capsys.readouterr().out.splitlines() == [
        "linear_logps torch.bfloat16",
        "     10.000 ms  8 warps",
        "*     8.000 ms  32 warps",
        "",
        "packed_attention torch.bfloat16",
        "*     1.500 ms  torch",
        "          -     triton: OutOfResources: shared memory",
    ]


def test_the_command_prints_json(choices, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fastdpo", "tune", "--hidden", "896", "--vocabulary", "1000", "--json"])
    main()
    ((head, attention, *_),) = choices
    assert (head, attention) == (HeadSize(896, 1000), [])
    printed = json.loads(capsys.readouterr().out)["choices"]
    assert printed == {
        "linear_logps torch.bfloat16": HEAD._asdict(),
        "packed_attention torch.bfloat16": ATTENTION._asdict(),
    }


def test_the_measurements_show_progress(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "TUNED_DEVICES", ("cpu",))
    attention = [AttentionSize(2, 1, 16, None, None)]
    tune.measured(HeadSize(8, 9), attention, torch.float32, False, [1024], CPU, progress=True)
    assert "Measuring kernels: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("pinned", ["FASTDPO_TUNE", "deterministic"])
def test_the_command_says_why_nothing_is_measured(pinned, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED_DEVICES", ("cpu",))
    if pinned == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        monkeypatch.setenv(tuning.VARIABLE, "0")
    with pytest.raises(ValueError, match="nothing is measured with FASTDPO_TUNE=0 or deterministic algorithms"):
        tune.measured(HeadSize(8, 9), [], torch.bfloat16, False, [], CPU)
