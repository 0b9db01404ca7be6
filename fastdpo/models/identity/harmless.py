"""Names of what the outputs of a model do not depend on: hooks, wrappers and attributes.

Three questions are answered with these lists. May the head or the forward of a model be replaced,
although other code has changed it (`head`, `support`)? Has a model changed since it was probed
(`structure`)? And which values were computed by an equal model (`ref_logps`)?

An entry belongs here if no log-probability changes, in any supported version of the package, when the
hook runs, the wrapper is removed or the attribute has another value. An attribute or an entry of a
configuration may change the gradients or the loss, but not the log-probabilities in evaluation mode.
An entry that the outputs depend on makes fastdpo train on wrong numbers; a missing entry only costs
speed, with a logged reason. A new engine is an entry of `ENGINES`, and a new trainer one of
`TRAINERS`: every list that they matter to is made of these two.
"""

from __future__ import annotations

import functools

ENGINES = ("accelerate", "deepspeed", "torch.distributed")
"""Packages that distribute a model. Their hooks on a head only gather and release its weight, and
their wrappers of a forward are for precision, device placement or counting.
"""

TRAINERS = ("fastdpo", "peft", "trl", "openrlhf")
"""Packages that train a model. PEFT's adapters are looked at separately."""

FORWARD_WRAPPERS = (*ENGINES, "torch", "fastdpo", "trl.trainer.utils")
"""Packages whose wrappers of a causal LM's forward keep its logits, such as those that an earlier trainer has left."""

MODULES = (
    *(*ENGINES, *TRAINERS),
    *("torch.nn.parallel", "torch.utils", "torch.amp", "torch._dynamo", "torch._inductor"),
    *("torch.nn.modules.module", "torch.fx", "torch.autograd.grad_mode"),
    *("transformers.modeling_utils", "transformers.modeling_layers", "transformers.integrations"),
    *("transformers.utils", "transformers.generation"),
    *("transformers.trainer", "transformers.quantizers", "transformers.configuration_utils"),
)
"""Modules whose hooks, wrappers and objects do not change a model's outputs in evaluation mode."""

HOOKING = (*MODULES, "torch.nn.utils", "transformers.trainer_utils", "llamafactory", "swift", "axolotl")
"""Modules whose hooks do not look at activations, or are examined by a reason of their own, as NEFTune's are."""

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", *TRAINERS)
"""Packages whose functions are known by their names and versions."""

CODE = (*LIBRARIES, "bitsandbytes", "liger_kernel", "torchao")
"""Packages whose layers treat a token alike whatever the length of its batch, but for what a configuration says."""

HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
"""Hooks of transformers and PEFT, which add another one each time gradient checkpointing is enabled."""

HOOK_MODULES = {"fastdpo.models.mixers.hooks", "transformers.utils.output_capturing"}
"""Modules of the hooks by which mixers take layouts, and of those that record hidden states, which
transformers adds when a model is first asked for them.
"""

ATTRIBUTES = {
    # Changed during training by transformers and PEFT.
    *("training", "gradient_checkpointing", "max_seq_len_cached"),
    *("_disable_adapters", "_active_adapter", "_output_capturing_hooks_installed"),
    # What generation goes on from.
    *("rope_deltas", "recurrent_states", "conv1d_state"),
    # Labels and plans of transformers, and options of losses.
    *("_is_hf_initialized", "name_or_path", "model_tags", "warnings_issued", "kernel_config", "hf_device_map"),
    *("loss_type", "router_aux_loss_coef", "tie_word_embeddings", "all_tied_weights_keys"),
    *("_ep_plan", "_fsdp_plan", "_pp_plan", "_weight_conversions", "_hf_peft_config_loaded"),
    # Set by torch, accelerate and DeepSpeed.
    *("_compiled_call_impl", "_is_accelerate_prepared", "_is_torch_compile"),
    *("_is_fsdp_managed_module", "_fsdp_use_orig_params"),
    *("_gradient_checkpointing_func", "_original_parameters", "_external_params", "pre_bwd_fn", "post_bwd_fn"),
}
"""Attributes of modules that log-probabilities do not depend on."""

OTHER_ATTRIBUTES = {
    *("_attn_implementation", "_use_kernels", "device", "is_parallelizable", "model_parallel", "neftune_noise_alpha"),
    *("config", "peft_config", "_old_forward", "_original_forward"),
}
"""Attributes that matter in training mode only, or that `ref_logps` compares in another form."""

COUNTERS = ("ds_", "_ds", "applied_pre_backward")
"""Prefixes of the counters that DeepSpeed keeps on modules."""

CONFIG_ENTRIES = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "id2label", "label2id", "problem_type"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "router_aux_loss_coef"),
}
"""Entries of a model's configuration that its hidden states and logits do not depend on."""

ADAPTER_ENTRIES = {
    *("base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "task_type"),
    *("init_lora_weights", "lora_dropout"),
}
"""Entries of an adapter's configuration that outputs in evaluation mode do not depend on."""


@functools.cache
def is_of(module: str | None, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these packages or lies in one of them."""
    return module is not None and any(module == name or module.startswith(f"{name}.") for name in packages)
