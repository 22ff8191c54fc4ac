"""Values of options that need others, or other limits; plain ones are those of the table's rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.jsonl"


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

#: Values of options by name, or by class and name, that are no plain ones, or with what they need.
VALUES: dict[str, Any] = {
    "num_train_epochs": Try(0.5, _EPOCHS),
    "lr_scheduler_kwargs": Try({"num_cycles": 2}, {"lr_scheduler_type": "cosine_with_restarts"}),
    "optim_args": Try("momentum=0.5", {"optim": "sgd"}), "bf16": Try(True, _STILL, _HALF),
    "bf16_full_eval": Try(True, _STILL, _HALF), "activation_checkpointing": Try(True, limit=SINGLE),
    "gradient_checkpointing": Try(True, limit=SINGLE),
    "activation_checkpointing_kwargs": Try({"use_reentrant": True}, {"activation_checkpointing": True}, SINGLE),
    "gradient_checkpointing_kwargs": Try({"use_reentrant": True}, {"gradient_checkpointing": True}, SINGLE),
    "torch_compile": Try(True, {"torch_compile_backend": "eager"}, SINGLE),
    "torch_compile_backend": Try("aot_eager", {"torch_compile": True}, SINGLE),
    "logging_first_step": Try(True, {"logging_steps": 2}),
    "eval_strategy": Try("steps", {"eval_steps": 2}),
    "eval_steps": Try(2, {"eval_strategy": "steps"}), "eval_delay": Try(2, _STEPS),
    "save_strategy": Try("steps", {"save_steps": 2}),
    "save_steps": Try(1, {"save_strategy": "steps"}),
    "save_total_limit": Try(1, {"save_strategy": "steps", "save_steps": 1}),
    "save_only_model": Try(True, {"save_strategy": "steps", "save_steps": 2}),
    "load_best_model_at_end": Try(True, {**_BEST, "load_best_model_at_end": False, "greater_is_better": True}),
    "metric_for_best_model": Try("eval_right", _BEST), "greater_is_better": Try(True, _BEST),
    "dataloader_drop_last": Try(True, _EPOCHS), "dataloader_num_workers": Try(1, _FORKED),
    "dataloader_persistent_workers": Try(True, _WORKER),
    "dataloader_prefetch_factor": Try(1, _WORKER),
    "dataloader_multiprocessing_context": Try("fork", {"dataloader_num_workers": 1}),
    "dataloader_in_order": Try(False, _WORKER),
    "router_aux_loss_coef": Try(0.5, {"_model": "Mixtral"}),
    "truncation_mode": Try("keep_end", {"max_length": 30}),
    "packing": Try(True, {"max_length": 64}),
    "packing_strategy": [Try(x, {"packing": True, "max_length": 40}) for x in ("bfd_split", "wrapped")],
    "padding_free": Try(True, {"max_length": None}), "eval_packing": Try(True, {"max_length": 64}),
    "completion_only_loss": Try(False, {"_data": "completion"}),
    "assistant_only_loss": Try(True, {"_data": "chat"}),
    "DPOConfig.loss_type": [Try([x], {"label_smoothing": 0.1, **_SGD} if x in ("exo_pair", "robust") else {}) for x in ("hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft")],
    "loss_weights": Try([0.5, 2.0], {"loss_type": ["sigmoid", "sft"]}), "ld_alpha": Try(0.5, _SGD),
    "f_divergence_type": [Try(x, limit=SINGLE) for x in ("forward_kl", "js_divergence", "alpha_divergence")],
    "f_alpha_divergence_coef": Try(0.7, {"f_divergence_type": "alpha_divergence"}, SINGLE),
    "use_weighting": Try(True, limit=5e-6), "label_smoothing": Try(0.1, {"loss_type": ["robust"]}),
    "discopop_tau": Try(0.2, {"loss_type": ["discopop"]}),
    "sync_ref_model": Try(True, {"ref_model_sync_steps": 1}),
    "ref_model_mixup_alpha": Try(0.3, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "ref_model_sync_steps": Try(1, {"sync_ref_model": True}),
    "GRPOConfig.sync_ref_model": Try(True, {"ref_model_sync_steps": 1, "beta": 0.5}),
    "GRPOConfig.ref_model_mixup_alpha": Try(0.3, {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.5}),
    "GRPOConfig.ref_model_sync_steps": Try(1, {"sync_ref_model": True, "beta": 0.5}),
    "num_generations": Try(4, {"per_device_train_batch_size": 4, "num_generations_eval": 2}),
    "num_generations_eval": Try(4, {"per_device_eval_batch_size": 4}),
    "GRPOConfig.max_completion_length": Try(7, {"loss_type": "dr_grpo"}),
    "epsilon": Try(0.001, _TWICE), "epsilon_high": Try(0.001, _TWICE), "delta": Try(1.0001, _TWICE),
    "sapo_temperature_neg": Try(2.0, {"loss_type": "sapo", **_TWICE}),
    "sapo_temperature_pos": Try(2.0, {"loss_type": "sapo", **_TWICE}),
    "vespo_k_pos": Try(1.0, _VESPO), "vespo_lambda_pos": Try(1.0, _VESPO),
    "vespo_k_neg": Try(1.0, _VESPO), "vespo_lambda_neg": Try(1.0, _VESPO),
    "importance_sampling_level": Try("sequence", _TWICE),
    "scale_rewards": [Try("batch", {"per_device_train_batch_size": 4}), Try("none")],
    "GRPOConfig.loss_type": [Try(x, {"gradient_accumulation_steps": 2}) for x in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")],
    "use_bias_correction_kl": Try(False, {"beta": 0.5, **_TWICE}),
    "use_adaptive_entropy": Try(True, {"entropy_coef": 0.05}),
    "entropy_coef_min": Try(0.04, {**_ENTROPY, "entropy_target": 0.1}),
    "entropy_coef_max": Try(0.06, {**_ENTROPY, "entropy_target": 9.0}),
    "entropy_coef_delta": Try(0.01, {**_ENTROPY, "entropy_target": 9.0}),
    "entropy_target": Try(9.0, _ENTROPY), "off_policy_mask_threshold": Try(1e-6, _TWICE),
    "cast_lm_head_to_fp32": Try(True, limit=SINGLE),
    "KTOConfig.gradient_checkpointing": Try(True, {"learning_rate": 1e-4}, SINGLE),
    "KTOConfig.train_sampling_strategy": Try("batch_rebalance", {"loss_type": "apo_zero_unpaired"}),
    "GKDConfig.truncation_mode": Try("keep_end", {"max_length": 75}),
    "CPOConfig.loss_type": [Try(x, _SGD) for x in ("hinge", "ipo", "simpo")],
    "TPOConfig.loss_type": [Try(x, _SGD) for x in ("hinge", "ipo", "tpo-l")],
    "simpo_gamma": Try(0.25, {"loss_type": "simpo"}),
    "tpo_l_gamma": Try(0.25, {"loss_type": "tpo-l"}), "max_new_tokens": Try(3, {"lmbda": 1.0}),
    "GKDConfig.temperature": Try(0.7, {"lmbda": 1.0}), "seq_kd": Try(True, {"lmbda": 0.0}),
    "CPOConfig.label_smoothing": 0.1, "TPOConfig.label_smoothing": 0.1,
}  # fmt: skip
