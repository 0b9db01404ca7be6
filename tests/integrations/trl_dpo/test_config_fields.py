"""Every field of `DPOConfig` must be listed here, with the test that covers it.

A field that a new TRL version adds therefore fails a test until somebody reviews it. Fields of
transformers' `TrainingArguments` are listed if they change a model, its calls or the use of a loss.
"""

import ast
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import DPOConfig

TESTS = Path(__file__).parents[2]


def run_by(file: str, *tests: str) -> tuple[str, tuple[str, ...]]:
    """Names the file and the tests that train with a field set."""
    return f"integrations/trl_dpo/test_{file}.py", tests


UNTOUCHED = "untouched"  # read before or after the model is called, by the same code with and without fastdpo
OPTION = "contract/test_options.py", ("test_option",)
DESCRIPTION = "contract/trainers/trl/dpo.py"
"""The file with the options that tests of the contract set."""
NEEDS_A_GPU = "needs a GPU"
NEEDS_A_CLUSTER = "needs an engine that is not installed"

OF_DPO = {
    "activation_offloading": run_by("models", "test_saved_activations_may_be_moved"),
    "beta": OPTION,
    "dataset_num_proc": UNTOUCHED,
    "disable_dropout": run_by("models", "test_dropout_is_packed"),
    "discopop_tau": OPTION,
    "f_alpha_divergence_coef": OPTION,
    "f_divergence_type": OPTION,
    "label_smoothing": OPTION,
    "ld_alpha": OPTION,
    "loss_type": OPTION,
    "loss_weights": OPTION,
    "max_length": OPTION,
    "model_init_kwargs": run_by("models", "test_model_given_by_path"),
    "pad_to_multiple_of": OPTION,
    "pad_token": OPTION,
    "padding_free": OPTION,
    "precompute_ref_batch_size": OPTION,
    "precompute_ref_log_probs": OPTION,
    "ref_model_mixup_alpha": run_by("options", "test_reference_follows_the_policy"),
    "ref_model_sync_steps": run_by("options", "test_reference_follows_the_policy"),
    "router_aux_loss_coef": OPTION,
    "sync_ref_model": run_by("options", "test_reference_follows_the_policy"),
    "truncation_mode": OPTION,
    "trust_remote_code": UNTOUCHED,
    "use_weighting": OPTION,
}

OF_TRAINING = {
    "average_tokens_across_devices": OPTION,
    "bf16": ("contract/test_precision.py", ("test_autocast",)),
    "bf16_full_eval": run_by("models", "test_evaluation_in_bfloat16"),
    "dataloader_num_workers": OPTION,
    "deepspeed": NEEDS_A_CLUSTER,
    "eval_on_start": OPTION,
    "fp16": NEEDS_A_GPU,
    "fp16_full_eval": NEEDS_A_GPU,
    "fsdp": NEEDS_A_CLUSTER,
    "gradient_accumulation_steps": OPTION,
    "gradient_checkpointing": OPTION,
    "gradient_checkpointing_kwargs": OPTION,
    "label_smoothing_factor": OPTION,
    "neftune_noise_alpha": ("contract/test_fallbacks.py", ("test_a_fallback_has_one_reason_for_each_model",)),
    "parallelism_config": NEEDS_A_CLUSTER,
    "per_device_train_batch_size": OPTION,
    "remove_unused_columns": OPTION,
    "tf32": NEEDS_A_GPU,
    "torch_compile": OPTION,
    "torch_compile_backend": OPTION,
    "use_cache": OPTION,
    "use_liger_kernel": NEEDS_A_GPU,
}


def names(config: type) -> set[str]:
    return {field.name for field in fields(config)}


def test_every_field_is_listed():
    assert names(DPOConfig) - names(TrainingArguments) == OF_DPO.keys()
    assert names(TrainingArguments) >= OF_TRAINING.keys()


@cache
def read(file: str) -> tuple[set[str], set[str]]:
    """The names of the tests in a file, and of all keyword arguments in its calls."""
    files = [file, DESCRIPTION] if file.startswith("contract/") else [file]
    nodes = [node for x in files for node in ast.walk(ast.parse((TESTS / x).read_text()))]
    return (
        {node.name for node in nodes if isinstance(node, ast.FunctionDef)},
        {node.arg for node in nodes if isinstance(node, ast.keyword)},
    )


CLAIMS = {name: claim for name, claim in {**OF_DPO, **OF_TRAINING}.items() if isinstance(claim, tuple)}


@pytest.mark.parametrize("name", CLAIMS)
def test_every_listed_test_exists_and_uses_the_field(name):
    file, tests = CLAIMS[name]
    defined, used = read(file)
    assert defined >= set(tests)
    assert name in used
