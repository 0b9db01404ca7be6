"""Every field of `DPOConfig` must be listed here, by what covers it.

A field that a new TRL version adds therefore fails a test until somebody reviews it. Fields of
transformers' `TrainingArguments` are listed if they change a model, its calls or the use of a loss.
"""

import ast
from dataclasses import fields

import pytest
from transformers import TrainingArguments
from trl import DPOConfig

from tests.support import ROOT

UNTOUCHED = "untouched"  # read before or after the model is called, by the same code with and without fastdpo
OF_DPO = {  # by the file whose trainings set them
    "contract/trainers/trl/dpo.py": """
        beta disable_dropout discopop_tau f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_type
        loss_weights max_length pad_to_multiple_of pad_token padding_free precompute_ref_batch_size
        precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps router_aux_loss_coef sync_ref_model
        truncation_mode use_weighting
    """,
    "integrations/trl_dpo/test_models.py": "activation_offloading model_init_kwargs",
    UNTOUCHED: "dataset_num_proc trust_remote_code",
}
OF_TRAINING = {
    "contract/trainers/trl/dpo.py": """
        average_tokens_across_devices dataloader_num_workers eval_on_start gradient_accumulation_steps
        gradient_checkpointing gradient_checkpointing_kwargs label_smoothing_factor neftune_noise_alpha
        per_device_train_batch_size remove_unused_columns torch_compile torch_compile_backend use_cache
    """,
    "contract/test_precision.py": "bf16",
    "integrations/trl_dpo/test_models.py": "bf16_full_eval",
    "needs an engine that is not installed": "deepspeed fsdp parallelism_config",
    "needs a GPU": "fp16 fp16_full_eval tf32 use_liger_kernel",
}


def claims(listed: dict[str, str]) -> dict[str, str]:
    """Maps each field to what covers it."""
    return {name: claim for claim, names in listed.items() for name in names.split()}


def fields_of(config: type) -> set[str]:
    return {field.name for field in fields(config)}


def test_every_field_is_listed():
    assert fields_of(DPOConfig) - fields_of(TrainingArguments) == claims(OF_DPO).keys()
    assert fields_of(TrainingArguments) >= claims(OF_TRAINING).keys()


@pytest.mark.parametrize("file", [claim for claim in OF_DPO | OF_TRAINING if claim.endswith(".py")])
def test_the_trainings_of_a_file_set_its_fields(file):
    nodes = ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
    listed = {name for name, claim in (claims(OF_DPO) | claims(OF_TRAINING)).items() if claim == file}
    assert listed <= {node.arg for node in nodes if isinstance(node, ast.keyword)}
