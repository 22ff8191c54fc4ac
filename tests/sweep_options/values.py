"""Values of options that do not follow from a field's type, and reasons of no effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Try:
    """A value of an option, and what it needs.

    Attributes:
        value: The value; ``None`` where none can be tried on this machine.
        given: Other options of the run, and of the one without the value that it is compared with.
            ``_model`` and ``_data`` name another model and another data set.
        limit: Allowed difference, relative to the largest number compared; more than that of
            float64 runs in float32, and where autocast or recomputation would not be in float64.
    """

    value: Any = None
    given: dict[str, Any] = field(default_factory=dict)
    limit: float = 1e-6


def each(*values: Any) -> list[Try]:
    """Return several values of one option, each to be tried."""
    return [Try(x) for x in values]


_STEPS = {"eval_strategy": "steps", "eval_steps": 1}
_BEST = {**_STEPS, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.5}
_BEST |= {"load_best_model_at_end": True}
_EPOCHS = {"max_steps": -1, "num_train_epochs": 1}
_FORKED = {"dataloader_multiprocessing_context": "fork"}  # others import torch anew
_WORKER = {"dataloader_num_workers": 1, **_FORKED}
_SGD = {"optim": "sgd"}  # Adam would enlarge the rounding of gradients near 0
_STILL = {"learning_rate": 0.0}
_HALF = 0.1  # limit in bfloat16, of single predictions too
SINGLE = 2e-4  # and in float32
#: Ratios of GRPO and RLOO differ from 1 in the second pass over samples.
_TWICE = {"num_iterations": 2}
_VESPO = {"loss_type": "vespo", "learning_rate": 1e-4, **_TWICE}  # weights vanish far from 1
_ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_coef_delta": 0.02}
_EAGER = {"torch_compile": True, "torch_compile_backend": "eager"}

#: Values of options by name, or by class and name: one, or several with what they need.
VALUES: dict[str, Any] = {
    # Of Trainers.
    "per_device_train_batch_size": 3,
    "num_train_epochs": Try(0.5, _EPOCHS),
    "max_steps": 2,
    "lr_scheduler_type": each("cosine", "constant_with_warmup"),
    "lr_scheduler_kwargs": Try({"num_cycles": 2}, {"lr_scheduler_type": "cosine_with_restarts"}),
    "optim": each("sgd", "adafactor"),
    "optim_args": Try("momentum=0.5", {"optim": "sgd"}),
    "optim_target_modules": Try(None),
    "max_grad_norm": 0.01,
    "bf16": Try(True, _STILL, _HALF), "bf16_full_eval": Try(True, _STILL, _HALF),
    "fp16": Try(None), "fp16_full_eval": Try(None), "tf32": Try(None),
    "activation_checkpointing": Try(True, limit=SINGLE),
    "gradient_checkpointing": Try(True, limit=SINGLE),
    "activation_checkpointing_kwargs": Try({"use_reentrant": True}, {"activation_checkpointing": True}, SINGLE),
    "gradient_checkpointing_kwargs": Try({"use_reentrant": True}, {"gradient_checkpointing": True}, SINGLE),
    "torch_compile": Try(True, {"torch_compile_backend": "eager"}, SINGLE),
    "torch_compile_backend": Try("aot_eager", {"torch_compile": True}, SINGLE),
    "torch_compile_mode": Try(None), "use_liger_kernel": Try(None), "liger_kernel_config": Try(None),
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 1,
    "logging_strategy": each("epoch", "no"),
    "logging_steps": 2, "logging_first_step": Try(True, {"logging_steps": 2}),
    "include_num_input_tokens_seen": each("all", "non_padding"),
    "log_level": "error", "log_level_replica": "error", "disable_tqdm": False, "report_to": Try(None),
    "run_name": "a", "project": "a", "trackio_space_id": "a", "trackio_bucket_id": "a",
    "trackio_static_space_id": "a",
    "eval_strategy": Try("steps", {"eval_steps": 2}),
    "eval_steps": Try(2, {"eval_strategy": "steps"}),
    "eval_delay": Try(2, _STEPS),
    "per_device_eval_batch_size": 3,
    "include_for_metrics": Try(["inputs", "loss"]),
    "eval_accumulation_steps": 1,
    "save_strategy": Try("steps", {"save_steps": 2}), "save_steps": Try(1, {"save_strategy": "steps"}),
    "save_total_limit": Try(1, {"save_strategy": "steps", "save_steps": 1}),
    "save_only_model": Try(True, {"save_strategy": "steps", "save_steps": 2}),
    "load_best_model_at_end": Try(True, {**_BEST, "load_best_model_at_end": False, "greater_is_better": True}),
    "metric_for_best_model": Try("eval_right", _BEST),
    "greater_is_better": Try(True, _BEST),
    "push_to_hub": Try(None), "hub_token": "a", "hub_private_repo": True, "hub_model_id": "a", "hub_revision": "a",
    "output_dir": Try(None), "use_cache": Try(True), "seed": 3, "data_seed": 3, "use_cpu": Try(None),
    "accelerator_config": each(
        {"split_batches": True}, {"even_batches": False}, {"dispatch_batches": True},
        {"use_seedable_sampler": False}, {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    ),
    "parallelism_config": Try(None),
    "dataloader_drop_last": Try(True, _EPOCHS),
    "dataloader_num_workers": Try(1, _FORKED),
    "dataloader_persistent_workers": Try(True, _WORKER), "dataloader_prefetch_factor": Try(1, _WORKER),
    "dataloader_multiprocessing_context": Try("fork", {"dataloader_num_workers": 1}), "dataloader_in_order": Try(False, _WORKER),
    "label_names": Try(["labels"]),
    "train_sampling_strategy": each("sequential", "group_by_length", "batch_rebalance"),
    "length_column_name": "size",
    "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": True,
    "ddp_static_graph": True, "ddp_backend": "gloo",
    "fsdp": Try(None), "fsdp_config": Try(None), "deepspeed": Try(None),
    "debug": "underflow_overflow", "resume_from_checkpoint": "a", "local_rank": Try(None),
    # Of TRL's.
    "model_init_kwargs": Try(None), "chat_template_path": Try(None), "dataset_kwargs": Try({"skip_prepare_dataset": False}),
    "router_aux_loss_coef": Try(0.5, {"_model": "Mixtral"}),
    "dataset_text_field": "words", "dataset_num_proc": 1, "eos_token": ".", "pad_token": ".",
    "max_length": 30, "truncation_mode": Try("keep_end", {"max_length": 30}),
    "packing": Try(True, {"max_length": 64}),
    "packing_strategy": [Try(x, {"packing": True, "max_length": 40}) for x in ("bfd_split", "wrapped")],
    "padding_free": Try(True, {"max_length": None}), "pad_to_multiple_of": 8,
    "eval_packing": Try(True, {"max_length": 64}),
    "completion_only_loss": Try(False, {"_data": "completion"}),
    "assistant_only_loss": Try(True, {"_data": "chat"}),
    "SFTConfig.loss_type": "dft",
    "DPOConfig.loss_type": [
        Try([x], {"label_smoothing": 0.1, **_SGD} if x in ("exo_pair", "robust") else {})
        for x in (
            "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
            "apo_zero", "apo_down", "discopop", "sft",
        )
    ],
    "precompute_ref_log_probs": Try(None), "precompute_ref_batch_size": Try(None),
    "loss_weights": Try([0.5, 2.0], {"loss_type": ["sigmoid", "sft"]}),
    "ld_alpha": Try(0.5, _SGD), "f_divergence_type": [
        Try(x, limit=SINGLE) for x in ("forward_kl", "js_divergence", "alpha_divergence")
    ],
    "f_alpha_divergence_coef": Try(0.7, {"f_divergence_type": "alpha_divergence"}, SINGLE),
    "use_weighting": Try(True, limit=5e-6), "label_smoothing": Try(0.1, {"loss_type": ["robust"]}), "discopop_tau": Try(0.2, {"loss_type": ["discopop"]}),
    "sync_ref_model": Try(True, {"ref_model_sync_steps": 1}),
    "ref_model_mixup_alpha": Try(0.3, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "ref_model_sync_steps": Try(1, {"sync_ref_model": True}),
    "GRPOConfig.sync_ref_model": Try(True, {"ref_model_sync_steps": 1, "beta": 0.5}),
    "GRPOConfig.ref_model_mixup_alpha": Try(0.3, {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.5}),
    "GRPOConfig.ref_model_sync_steps": Try(1, {"sync_ref_model": True, "beta": 0.5}),
    "num_generations": Try(4, {"per_device_train_batch_size": 4, "num_generations_eval": 2}),
    "num_generations_eval": Try(4, {"per_device_eval_batch_size": 4}),
    "GRPOConfig.max_completion_length": Try(7, {"loss_type": "dr_grpo"}), "RLOOConfig.max_completion_length": 7,
    "generation_batch_size": Try(None), "steps_per_generation": 2,
    "temperature": 0.7, "top_k": 5, "min_p": 0.1, "generation_kwargs": Try({"do_sample": False}), "cache_implementation": "static",
    "chat_template_kwargs": Try({"a": 1}), "vllm_structured_outputs_regex": "a", "vllm_server_base_url": "a", "vllm_mode": "server",
    "vllm_max_model_length": 9, "vllm_model_impl": "a", "vllm_server_host": "a", "max_tool_calling_iterations": 2,
    "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.1, "vllm_importance_sampling_cap": Try(None),
    "num_iterations": 2, "epsilon": Try(0.001, _TWICE), "epsilon_high": Try(0.001, _TWICE), "delta": Try(1.0001, _TWICE),
    "sapo_temperature_neg": Try(2.0, {"loss_type": "sapo", **_TWICE}),
    "sapo_temperature_pos": Try(2.0, {"loss_type": "sapo", **_TWICE}),
    "vespo_k_pos": Try(1.0, _VESPO), "vespo_lambda_pos": Try(1.0, _VESPO),
    "vespo_k_neg": Try(1.0, _VESPO), "vespo_lambda_neg": Try(1.0, _VESPO),
    "importance_sampling_level": Try("sequence", _TWICE), "reward_weights": Try([1.0, 0.1]),
    "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": [Try("batch", {"per_device_train_batch_size": 4}), Try("none")],
    "GRPOConfig.loss_type": [
        Try(x, {"gradient_accumulation_steps": 2})
        for x in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
    ],
    "GRPOConfig.beta": 0.1, "use_bias_correction_kl": Try(False, {"beta": 0.5, **_TWICE}),
    "entropy_coef": 0.05, "use_adaptive_entropy": Try(True, {"entropy_coef": 0.05}), "top_entropy_quantile": 0.5,
    "entropy_coef_min": Try(0.04, {**_ENTROPY, "entropy_target": 0.1}), "entropy_coef_max": Try(0.06, {**_ENTROPY, "entropy_target": 9.0}),
    "entropy_coef_delta": Try(0.01, {**_ENTROPY, "entropy_target": 9.0}), "entropy_target": Try(9.0, _ENTROPY),
    "off_policy_mask_threshold": Try(1e-6, _TWICE), "cast_lm_head_to_fp32": Try(True, limit=SINGLE),
    "reward_clip_range": Try((-0.2, 0.3)), "log_completions_hub_repo": "a", "num_completions_to_print": 1,
    "transformers_continuous_batching_config": Try(None), "use_transformers_paged": Try(None),
    "KTOConfig.gradient_checkpointing": Try(True, {"learning_rate": 1e-4}, SINGLE),
    "KTOConfig.train_sampling_strategy": Try("batch_rebalance", {"loss_type": "apo_zero_unpaired"}),
    "RewardConfig.max_length": 90, "GKDConfig.max_length": 75,
    "GKDConfig.truncation_mode": Try("keep_end", {"max_length": 75}),
    "KTOConfig.loss_type": "apo_zero_unpaired", "center_rewards_coefficient": 0.1,
    "CPOConfig.loss_type": [Try(x, _SGD) for x in ("hinge", "ipo", "simpo")],
    "TPOConfig.loss_type": [Try(x, _SGD) for x in ("hinge", "ipo", "tpo-l")],
    "CPOConfig.label_smoothing": 0.1, "TPOConfig.label_smoothing": 0.1,
    "simpo_gamma": Try(0.25, {"loss_type": "simpo"}), "tpo_l_gamma": Try(0.25, {"loss_type": "tpo-l"}),
    "CPOConfig.max_completion_length": 9, "ORPOConfig.max_completion_length": 9, "padding_value": 5,
    "GKDConfig.loss_type": "dft", "lmbda": each(0.0, 1.0),
    "GKDConfig.beta": 0.25, "max_new_tokens": Try(3, {"lmbda": 1.0}), "GKDConfig.temperature": Try(0.7, {"lmbda": 1.0}),
    "seq_kd": Try(True, {"lmbda": 0.0}), "teacher_model_name_or_path": "a",
    "teacher_model_init_kwargs": Try(None),
}  # fmt: skip

#: Reasons in a word why an option has no effect on what is computed, or is not run here.
_WORDS = {
    "saving": (
        "output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node",
        "enable_jit_checkpoint", "save_projection", "save_indices", "save_only_topk_weights",
        "save_precomputed_indices", "restore_callback_states_from_checkpoint",
    ),
    "logging": (
        "logging_nan_inf_filter", "log_on_each_node", "log_level", "log_level_replica", "disable_tqdm",
        "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
        "debug", "skip_memory_metrics", "progressbar", "log_completions", "log_multimodal",
        "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo",
    ),
    "hub": (
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision", "trust_remote_code", "model_init_kwargs", "teacher_model_name_or_path", "teacher_model_init_kwargs", "base_model_name_or_path", "revision",
        "tokenizer_name_or_path", "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_kwargs",
        "prompt_tuning_init_state_dict_path", "shadow_model", "chat_template_path",
    ),
    "GPU": ("fp16", "fp16_full_eval", "tf32", "use_cpu", "torch_compile_mode", "activation_offloading",
            "fsdp", "fsdp_config", "runtime_config", "runtime_offload_base_weight"),
    "library": (
        "optim_target_modules", "use_liger_kernel", "liger_kernel_config", "deepspeed", "megatron_config",
        "megatron_core", "loftq_config", "parallelism_config", "AdamssConfig", "generate_during_eval",
    ),
    "memory": (
        "activation_checkpointing", "gradient_checkpointing", "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs", "torch_empty_cache_steps", "auto_find_batch_size",
        "eval_accumulation_steps", "use_cache",
    ),
    "speed": (
        "torch_compile", "torch_compile_backend", "dataloader_num_workers", "dataloader_pin_memory",
        "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
        "dataloader_in_order", "dataset_num_proc", "pad_to_multiple_of", "padding_free",
    ),
    "ranks": (
        "eval_use_gather_object",
        "average_tokens_across_devices", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank",
        "accelerator_config",
    ),
    "scripts": ("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "ignore_data_skip"),
    "names": (
        "label_names", "remove_unused_columns", "pad_token", "length_column_name", "dataset_kwargs", "layers_pattern",
        "peft_type", "task_type", "auto_mapping", "peft_version",
    ),
    "inference": ("inference_mode", "sample_at_inference", "generator_seed"),
    "sampling": (  # completions are recorded
        "top_p", "top_k", "min_p", "generation_kwargs", "repetition_penalty", "cache_implementation",
        "chat_template_kwargs", "RLOOConfig.max_completion_length", "max_tool_calling_iterations",
        "generation_batch_size",
    ),
    "vLLM": (
        "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
        "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
        "transformers_continuous_batching_config", "use_transformers_paged", "ds3_gather_for_generation",
    ),
    "Conv1D": ("fan_in_fan_out",),
    "Conv2d": ("use_effective_conv2d",),
    "tied": ("ensure_weight_tying",),
    "model": ("disable_dropout",),  # it has no dropout
    "precision": ("cast_lm_head_to_fp32",),  # the head is in float32 or wider
    # TRL computes them when it is built, before there is a ring, and several ranks share a file.
    "files": ("precompute_ref_log_probs", "precompute_ref_batch_size"),
    "seeds": ("full_determinism",),
    "collator": tuple(  # GKD's own reads chats, and SFT's options are not for it
        f"GKDConfig.{x}" for x in (
            "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eos_token", "packing",
            "packing_strategy", "eval_packing", "loss_type", "shuffle_dataset", "truncation_mode",
        )
    ),
    "TRL": ("GKDConfig.router_aux_loss_coef",),  # one device fails
    "encoder-decoder": (
        "is_encoder_decoder", "CPOConfig.max_completion_length", "ORPOConfig.max_completion_length",
    ),
    "uninitialised": ("TinyLoraConfig.init_weights",),
    "single": ("AdaptionPromptConfig.target_modules", "TrainableTokensConfig.target_modules", "mask_type", "poly_type"),  # a type with one value
    "PEFT": ("XLoraConfig.hidden_size", "XLoraConfig.adapters", "target_svd_config", "HiraConfig.rank_pattern", "AdaLoraConfig.use_dora",
             "AdaLoraConfig.alora_invocation_tokens", "AdaLoraConfig.target_parameters"),
    "unused": ("OFTConfig.module_dropout", "boft_n_butterfly_factor", "init_v_bound", "AdaLoraConfig", "PsoftConfig"),  # by this class, or before its update
    "adapters": ("arrow_config",),  # needs several that are trained
    "data": ("eva_config", "corda_config", "lora_ga_config"),
    "quantized": ("use_qalora", "qalora_group_size"),
}  # fmt: skip
REASONS: dict[str, str] = {name: word for word, names in _WORDS.items() for name in names}
