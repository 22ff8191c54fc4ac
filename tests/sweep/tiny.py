"""Shrinks configs of any architecture of transformers, by the names of their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import transformers
from transformers import PreTrainedConfig

VOCAB, POSITIONS, WINDOW = 64, 132, 5

#: Names of attributes by their size, in every config of a model.
_NAMES: dict[int, str] = {
    32: (
        "hidden_size d_model n_embd dim embedding_size d_embed embed_dim word_embed_proj_dim"
        " lru_width attention_hidden_size emb_dim hidden_dim width decoder_hidden_size"
        " encoder_hidden_size projection_dim d_kv_model cross_attention_hidden_size"
        " out_hidden_size vision_output_dim projector_output_dim"
    ),
    48: (
        "intermediate_size ffn_dim n_inner d_inner d_ff dff ffn_hidden_size encoder_ffn_dim"
        " decoder_ffn_dim moe_intermediate_size intermediate_size_mlp"
        " shared_expert_intermediate_size shared_intermediate_size feedforward_dim"
        " expert_ffn_hidden_size moe_shared_expert_intermediate_size mlp_dim"
        " dense_intermediate_size decoder_intermediate_size encoder_intermediate_size"
        " ffn_intermediate_size prefix_dense_intermediate_size"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"
        " decoder_attention_heads num_decoder_heads num_encoder_heads decoder_num_attention_heads"
        " encoder_num_attention_heads linear_num_heads num_experts num_local_experts"
        " n_routed_experts moe_num_experts num_routed_experts ffn_num_experts n_experts"
        " laurel_rank"
    ),
    2: (
        "num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads n_kv_heads"
        " num_kv_heads index_n_heads mamba_n_groups n_groups linear_num_key_heads"
        " linear_num_value_heads num_global_key_value_heads n_mamba_heads num_hidden_layers"
        " n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
        " num_encoder_layers depth decoder_num_hidden_layers encoder_num_hidden_layers"
        " num_hidden_blocks num_conv_layers num_experts_per_tok moe_k num_experts_per_token"
        " moe_topk top_k_experts n_group moe_top_k experts_per_token num_selected_experts"
        " altup_num_inputs type_vocab_size"
    ),
    8: (
        "head_dim v_head_dim qk_nope_head_dim d_kv d_head global_head_dim kv_channels q_lora_rank"
        " kv_lora_rank attention_head_dim index_head_dim qk_rope_head_dim swa_head_dim o_lora_rank"
        " linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_d_state"
        " ssm_state_size state_size mamba_headdim mamba_chunk_size chunk_size block_size"
        " rotary_dim sparse_chunk linear_head_dim hidden_size_per_layer_input"
    ),
    1: (
        "topk_group n_shared_experts moe_num_shared_experts num_shared_experts"
        " first_k_dense_replace decoder_sparse_step moe_layer_start_index moe_layer_interval"
        " expert_interval encoder_sparse_step"
    ),
    VOCAB: (
        "vocab_size text_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size"
        " entity_vocab_size decoder_vocab_size encoder_vocab_size char_vocab_size audio_vocab_size"
        " codebook_vocab_size encoder_hash_byte_group_vocab"
    ),
    POSITIONS: (
        "max_position_embeddings n_positions max_seq_len max_sequence_length context_length"
        " max_source_positions max_target_positions n_ctx original_max_position_embeddings"
        " max_length max_2d_position_embeddings seq_length max_seq_length"
    ),
    WINDOW: (
        "sliding_window local_attention window_size attention_chunk_size local_window_size"
        " sliding_window_size attention_window_size"
    ),
    16: "qk_head_dim num_hash_buckets",
    0: "num_kv_shared_layers num_nextn_predict_layers",
    28: "image_size",
}  # fmt: skip
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPE_BY_KIND = {"full_attention": _ROPE, "sliding_attention": _ROPE}

#: Types whose towers have windows, of more pixels than a patch.
_WINDOWED = (
    "qwen2_5_vl", "qwen2_5_omni_thinker", "exaone4_5", "hyperclovax_vision_v2", "qwen2_5_omni",
)  # fmt: skip

#: What no name tells, by model type.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 11},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass": {"rope_parameters": _ROPE_BY_KIND},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_KIND},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 5, "pad_token_id": 1},
    "hunyuan_vl": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8},
    "zamba2": {"n_mamba_heads": 8, "attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": [1]},
    "bailing_hybrid": {"num_group": 2, "n_group": 2, "topk_group": 1},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "mamba2": {"num_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    **{kind: {"window_size": 56} for kind in _WINDOWED},
    "gemma3": {"mm_tokens_per_image": 1},
    "llama4": {"no_rope_layers": [1, 0], "floor_scale": 4, "intermediate_size": 128, "projector_input_dim": 32},
    **{kind: {"patch_size": 14} for kind in ("idefics2", "idefics3", "smolvlm", "aria")},
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 4},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "mistral4": {"head_dim": 16},
    "step3p7": {"sliding_window": WINDOW},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (11, 12)},
}  # fmt: skip

#: Types that turn by positions in three directions, whose config does not say how many of each.
_MROPE = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni")

_LAYERS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "attn_layer_types")


def bare_config(
    model_type: str, cls: Any, kind: str = "", values: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedConfig:
    """Return the default config of this type for a model class, of its own size.

    The config of type ``kind``, which may be one within it, is made with ``values``.
    """
    own = getattr(cls, "config_class", None)  # may be the config of the text part only
    config = (own or transformers.CONFIG_MAPPING[model_type])()
    if not values:
        return config
    if config.model_type == kind:
        return type(config)(**deepcopy(dict(values)))
    for owner in configs_in(config):
        for name, value in list(vars(owner).items()):
            if isinstance(value, PreTrainedConfig) and value.model_type == kind:
                new = type(value)(**deepcopy(dict(values)))
                for extra in vars(value).keys() - vars(new).keys():  # its owner's
                    setattr(new, extra, getattr(value, extra))
                setattr(owner, name, new)
    return config


def config_of(
    model_type: str, cls: Any, kind: str = "", values: Mapping[str, Any] = MappingProxyType({}), **changes: Any,
) -> PreTrainedConfig:  # fmt: skip
    """Return a small config of this type for a model class; sub-configs are shrunk, too.

    The config of type ``kind`` keeps ``values`` as they are.
    """
    config = bare_config(model_type, cls, kind, values)
    for each in configs_in(config):
        _shrink(each)
        for name, value in CHANGES.get(model_type, {}).items():
            if hasattr(each, name):
                setattr(each, name, value)
        for name, value in values.items() if each.model_type == kind else ():
            _set(each, name, value)
        rope = getattr(each, "rope_parameters", None)
        if model_type.startswith(_MROPE) and isinstance(rope, dict):
            rope["mrope_section"] = [1, 1, 0] if model_type == "glm4v_moe" else [2, 1, 1]
    for name, value in changes.items():
        setattr(config, name, value)
    config._experts_implementation = "eager"
    return config


def configs_in(config: PreTrainedConfig) -> Iterable[PreTrainedConfig]:
    """Yield a config and its sub-configs."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from configs_in(value)


DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def _shrink(config: PreTrainedConfig) -> None:
    had = dict(vars(config))
    kinds = _layers(had)
    for name, value in had.items():
        if name.endswith(("_token_id", "_token_index")):
            _set(config, name, _token(value, name))
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            is_depth = kinds and name.lstrip("_") in DEPTHS
            size = SIZES.get(name.lstrip("_"), value)
            _set(config, name, len(kinds) if is_depth else min(value, size))
    for name in ("head_dim", "num_key_value_heads"):
        if name in had and had[name] is None:
            _set(config, name, SIZES[name])
    for name in ("num_key_value_heads", "n_kv_heads", "num_kv_heads"):
        if had.get(name) == had.get("num_attention_heads") is not None:
            _set(config, name, SIZES["num_attention_heads"])
    for name in _LAYERS:
        if isinstance(had.get(name), list | tuple) and kinds:
            _set(config, name, [had[name][kind] for kind in kinds])
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if had.get(name) is None:
            _set(config, name, 2)
    _set(config, "use_cache", False)
    _complete(config, had)


def _complete(config: PreTrainedConfig, had: dict[str, Any]) -> None:
    """Set what a model needs to run: short angles, the decoder's start token, a small image."""
    rope = had.get("rope_parameters")
    for parameters in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(parameters, dict):
            own = {"original_max_position_embeddings": POSITIONS, "mrope_section": [2, 1, 1]}
            parameters |= {name: own[name] for name in own.keys() & parameters.keys()}
    if isinstance(had.get("image_size"), list | tuple):
        _set(config, "image_size", [SIZES["image_size"]] * 2)
    if getattr(config, "is_encoder_decoder", False) and not had.get("decoder_start_token_id"):
        _set(config, "decoder_start_token_id", 2)


def _set(config: PreTrainedConfig, name: str, value: object) -> None:
    # It may be a property, or the config's own checks refuse the value.
    with suppress(AttributeError, TypeError, ValueError):
        setattr(config, name, value)


def _layers(had: dict[str, Any]) -> list[int]:
    """Return the layers to keep: one of each kind, at least two; none if there are no kinds."""
    lists = [tuple(had[n]) for n in _LAYERS if isinstance(had.get(n), list | tuple) and had[n]]
    if not lists:
        return []
    rows = list(zip(*lists, strict=False))
    kept = [layer for layer, row in enumerate(rows) if row not in rows[:layer]]
    while len(kept) < min(2, len(rows)):
        kept.append(next(layer for layer in range(len(rows)) if layer not in kept))
    return sorted(kept)


def _token(value: object, name: str) -> object:
    """Return a token of the small vocabulary that batches do not contain."""
    if isinstance(value, list):
        return [_token(x, name) for x in value]
    if not isinstance(value, int) or isinstance(value, bool) or value < 4:
        return value
    if name in ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"):
        return 2
    return VOCAB - 1 - sum(map(ord, name)) % 10
