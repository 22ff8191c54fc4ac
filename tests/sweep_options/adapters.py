"""Small adapters of PEFT: what each class needs, and values of its options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    KasaConfig,
    LoraRuntimeConfig,
    MontecloraConfig,
    VeloraConfig,
)

from sweep_options.values import Try, each

_PAIR = ("PolyConfig", "MultitaskPromptTuningConfig")

#: Options without which a class makes no adapter of a small model, or one too large for it.
NEEDED: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10, "init_r": 4, "target_r": 2},
    "AdamssConfig": {"r": 4, "num_subspaces": 2},
    "AdaptionPromptConfig": {"adapter_len": 3, "adapter_layers": 1, "target_modules": "self_attn"},
    "C3AConfig": {"block_size": 8}, "FourierFTConfig": {"n_frequency": 20},
    "CPTConfig": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "FrodConfig": {"progressbar": False},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "MultitaskPromptTuningConfig": {"num_tasks": 2}, "PolyConfig": {"n_tasks": 2},
    "OFTConfig": {"r": 0, "oft_block_size": 8}, "RoadConfig": {"group_size": 8},
    "ShadowConfig": {"target_modules": None, "shadow_dropout": 0.0},
    "TrainableTokensConfig": {"token_indices": [1, 2, 9], "target_modules": ["embed_tokens"]},
    "VBLoRAConfig": {"vector_length": 8, "num_vectors": 6}, "WaveFTConfig": {"n_frequency": 20},
    "XLoraConfig": {"hidden_size": 32, "xlora_dropout_p": 0.0, "xlora_depth": 2, "xlora_size": 8},
}  # fmt: skip

#: Classes that compute in float32 alone.
SINGLE = ("FourierFTConfig",)

#: Values of options by name, or by class and name.
VALUES: dict[str, Any] = {
    "OFTConfig.module_dropout": 0.7, "xlora_depth": 3, "TinyLoraConfig.init_weights": Try(None),
    "peft_type": Try(None), "task_type": "FEATURE_EXTRACTION", "auto_mapping": {}, "peft_version": "0",
    "base_model_name_or_path": "a", "revision": "a",
    "r": 2, "target_modules": ["k_proj", "up_proj"], "exclude_modules": ["v_proj"],
    "LNTuningConfig.target_modules": ["norm"], "LNTuningConfig.exclude_modules": ["layers.0.input_layernorm"],
    "IA3Config.target_modules": ["k_proj", "down_proj"],
    "AdaptionPromptConfig.target_modules": Try(None), "ShadowConfig.target_modules": ["layers.1"],
    "ShadowConfig.exclude_modules": ["layers.0"],
    "TrainableTokensConfig.target_modules": Try(None), "modules_to_save": ["lm_head"],
    "layers_to_transform": [0], "layers_pattern": Try("layers", {"layers_to_transform": [0]}),
    "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 3}, "lambda_pattern": {"q_proj": 3},
    "OSFConfig.rank_pattern": {"q_proj": 3}, "bias": "all", "GloraConfig.bias": "all",
    "block_size_pattern": {"q_proj": 4}, "n_frequency_pattern": {"q_proj": 9},
    "megatron_config": Try(None), "megatron_core": Try(None),
    "trainable_token_indices": {"embed_tokens": [1, 2, 9]},
    "init_lora_weights": each("gaussian", "olora", "pissa", "orthogonal", False),
    "loftq_config": Try(None), "eva_config": Try(None), "corda_config": Try(None), "lora_ga_config": Try(None),
    "velora_config": each(
        *(VeloraConfig(num_groups=4, init_type=x) for x in ("batch_average", "random"))
    ),
    "alora_invocation_tokens": [1, 2],
    "use_qalora": Try(True, {"qalora_group_size": 8}), "qalora_group_size": Try(4, {"use_qalora": True}),
    "monteclora_config": Try(MontecloraConfig(num_samples=2, sample_scaler=0.1), limit=2e-4),
    "layer_replication": [(0, 2), (1, 2)],
    "runtime_config": LoraRuntimeConfig(ephemeral_gpu_offload=True),
    "target_parameters": ["mlp.gate_proj.weight"], "arrow_config": ArrowConfig(top_k=1),
    "use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2, match_strict=False),
    "kasa_config": KasaConfig(),
    "tinit": 1, "tfinal": 1, "total_step": 20, "init_r": 3,
    "AdamssConfig.init_weights": Try(None), "adapter_len": 2, "adapter_layers": 2,
    "boft_block_size": 8, "boft_block_num": Try(4, {"boft_block_size": 0}),
    "block_size": 4, "num_virtual_tokens": 2, "cpt_token_ids": [5, 6, 8], "cpt_mask": [1, 1, 0],
    "cpt_tokens_type_mask": [1, 2, 2], "opt_weighted_loss_type": "decay",
    "token_dim": 32, "num_transformer_submodules": 1, "num_attention_heads": 4, "num_layers": 2,
    "tokenizer_name_or_path": "a", "prompt_tuning_init": Try(None), "prompt_tuning_init_text": Try(None),
    "tokenizer_kwargs": Try(None), "prompt_tuning_init_state_dict_path": Try(None),
    "alpha": 3, "num_subspaces": 1, "n_frequency": 10, "feedforward_modules": ["v_proj", "down_proj"],
    "mask_type": Try(None), "random_seed": 3, "effective_rank": 3, "target_svd_config": {"q_proj": 3},
    "encoder_hidden_size": 16, "act_fn": "gelu", "poly_type": Try(None), "oft_block_size": 4, "OFTConfig.r": Try(4, {"oft_block_size": 0}),
    "coft": Try(True, {"eps": 1e-3}), "eps": Try(1e-2, {"coft": True}),
    "cayley_neumann_eps": Try(0.5, {"use_cayley_neumann": True}),
    "num_cayley_neumann_terms": Try(3, {"use_cayley_neumann": True}),
    "generator_seed": 3, "shadow_model": Try(None), "shadow_num_hidden_layers": 2, "shadow_hidden_size": 16,
    "shadow_num_attention_heads": 2, "shadow_intermediate_size": 16, "update_hidden_size": 16,
    "SupertuningConfig.r": 2, "SupertuningConfig.lora_alpha": Try(3.0, {"r": 2}), "sparsity": 0.5, "PsoftConfig.psoft_svd_lowrank_niter": Try(2, {"psoft_svd": "lowrank"}), "PsoftConfig.random_seed": Try(3, {"psoft_svd": "lowrank"}),
    "token_indices": [1, 3], "wavelet_family": "db2", "group_size": 4, "vector_length": 4, "num_vectors": 5,
    "XLoraConfig.hidden_size": Try(None), "XLoraConfig.adapters": Try(None), "top_k_lora": 1, "stride_A": 2, "num_B": 3,
    "hybrid_r": 2, "gralora_k": 4, "GraloraConfig.r": 8, "mini_r": Try(2, {"init_weights": "mini"}), "init_scale": Try(0.5, {"init_weights": False}), "decompose_both": Try(True, {"r": 1, "decompose_factor": 4}), "rank_dropout_scale": Try(True, {"rank_dropout": 0.5}), "decompose_factor": 2,
    "svd_threshold": Try(0.5, {"use_dynamic_rank": True}),
    "theta_d_length": 64, "u": 3, "n_tasks": 3, "n_skills": 3, "n_splits": 2,
}  # fmt: skip
VALUES |= {  # options of AdaMSS that act when a Trainer calls it
    name: Try(value, {"use_asa": True})
    for name, value in (
        ("asa_target_subspaces", 1),
        ("init_warmup", 1),
        ("final_warmup", 3),
        ("mask_interval", 1),
    )
}


def adapted(
    owner: str, base: Any, options: dict[str, Any], folder: str
) -> tuple[Any, dict[str, Any]]:
    """Return a model with an adapter, its weights random, and more arguments of its calls."""
    with torch._C.DisableTorchFunction():  # adapters begin in float32, whatever the run is in
        return _adapted(owner, base, options, folder)


def _adapted(
    owner: str, base: Any, options: dict[str, Any], folder: str
) -> tuple[Any, dict[str, Any]]:
    cls = peft.LoraConfig if owner == "PeftConfig" else getattr(peft, owner)
    fields = {x.name for x in dataclasses.fields(cls)}
    needed: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    needed |= {"r": 4, "num_virtual_tokens": 3} | NEEDED.get(owner, {}) | options
    base = base.float()
    base.config.use_cache = False
    torch.manual_seed(0)
    if owner == "XLoraConfig":
        adapters: dict[str, str] = {}
        for name in ("0", "1"):  # as PEFT numbers them
            one = peft.get_peft_model(
                base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
            )
            one.save_pretrained(adapters.setdefault(name, str(Path(folder) / name)))
            base = one.unload()
        needed |= {"adapters": adapters}
    config = cls(**{n: x for n, x in needed.items() if n in fields})
    model = peft.get_peft_model(base, config).train()
    with torch.no_grad():  # adapters begin as nothing, which would hide that they are unused
        for weight in model.parameters():
            if weight.requires_grad and weight.is_floating_point():
                weight.add_(torch.randn_like(weight), alpha=0.05)
    return model, {"task_ids": torch.tensor([0, 1])} if owner in _PAIR else {}
