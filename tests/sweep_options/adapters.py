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

from sweep_options.values import Try

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

#: Values of options by name, or by class and name, as in :mod:`sweep_options.values`.
VALUES: dict[str, Any] = {
    "layers_pattern": Try("layers", {"layers_to_transform": [0]}),
    "velora_config": [Try(VeloraConfig(num_groups=4, init_type=x)) for x in ("batch_average", "random")],
    "use_qalora": Try(True, {"qalora_group_size": 8}),
    "qalora_group_size": Try(4, {"use_qalora": True}),
    "monteclora_config": Try(MontecloraConfig(num_samples=2, sample_scaler=0.1), limit=2e-4),
    "runtime_config": LoraRuntimeConfig(ephemeral_gpu_offload=True),
    "arrow_config": ArrowConfig(top_k=1),
    "use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2, match_strict=False),
    "kasa_config": KasaConfig(), "boft_block_num": Try(4, {"boft_block_size": 0}),
    "OFTConfig.r": Try(4, {"oft_block_size": 0}), "coft": Try(True, {"eps": 1e-3}),
    "eps": Try(1e-2, {"coft": True}), "cayley_neumann_eps": Try(0.5, {"use_cayley_neumann": True}),
    "num_cayley_neumann_terms": Try(3, {"use_cayley_neumann": True}),
    "SupertuningConfig.lora_alpha": Try(3.0, {"r": 2}),
    "PsoftConfig.psoft_svd_lowrank_niter": Try(2, {"psoft_svd": "lowrank"}),
    "PsoftConfig.random_seed": Try(3, {"psoft_svd": "lowrank"}),
    "mini_r": Try(2, {"init_weights": "mini"}), "init_scale": Try(0.5, {"init_weights": False}),
    "decompose_both": Try(True, {"r": 1, "decompose_factor": 4}),
    "rank_dropout_scale": Try(True, {"rank_dropout": 0.5}),
    "svd_threshold": Try(0.5, {"use_dynamic_rank": True}),
}  # fmt: skip
VALUES |= {  # options of AdaMSS that act when a Trainer calls it
    name: Try(value, {"use_asa": True})
    for name, value in {
        "asa_target_subspaces": 1, "init_warmup": 1, "final_warmup": 3, "mask_interval": 1,
    }.items()
}  # fmt: skip


def adapted(*arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model with an adapter, its weights random, and more arguments of its calls."""
    with torch._C.DisableTorchFunction():  # adapters begin in float32, whatever the run is in
        return _adapted(*arguments)


def _adapted(
    owner: str, base: Any, options: dict[str, Any], folder: str
) -> tuple[Any, dict[str, Any]]:
    cls = peft.LoraConfig if owner == "PeftConfig" else getattr(peft, owner)
    fields = {x.name for x in dataclasses.fields(cls)}
    needed = {
        "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4,
        "num_virtual_tokens": 3, **NEEDED.get(owner, {}), **options,
    }  # fmt: skip
    base = base.float()
    base.config.use_cache = False
    torch.manual_seed(0)
    if owner == "XLoraConfig":
        needed["adapters"] = {name: str(Path(folder) / name) for name in ("0", "1")}
        lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        for path in needed["adapters"].values():  # as PEFT numbers them
            one = peft.get_peft_model(base, lora)
            one.save_pretrained(path)
            base = one.unload()
    config = cls(**{n: x for n, x in needed.items() if n in fields})
    model = peft.get_peft_model(base, config).train()
    with torch.no_grad():  # adapters begin as nothing, which would hide that they are unused
        for weight in model.parameters():
            if weight.requires_grad and weight.is_floating_point():
                weight.add_(torch.randn_like(weight), alpha=0.05)
    return model, {"task_ids": torch.tensor([0, 1])} if owner in _PAIR else {}
