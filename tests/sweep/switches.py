"""Switches of released checkpoints: fields of configs that send a model another way.

A small default config leaves them out. Fields of a config's own docstring that are true or false,
or have named choices, are found in its class; those without a default have a value here, by name;
and what several fields do together is here by model type, as conversion scripts and config files of
released checkpoints have it. Each switch is run like the class itself, and its verdict committed.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from sweep.page import REFUSED, Result
from sweep.tiny import WINDOW, bare_config, configs_in

TABLE = Path(__file__).parent / "switches.jsonl"

#: Fields that are no switch: sizes, tokens, other configs, initial weights, biases, functions of
#: one number, how a model is run, and what is random in training alone.
NO_SWITCH = re.compile(
    r".*(size|dim|rank|width|heads|heads_per_layer|experts|layers|per_stack|group|positions|axis|idxs?|patch)"
    r"|.*_(index|indices|ids?|configs?|act|fn|eps|range|std|factor|head|types?|tok|map|language|cycles)"
    r"|.*(bias|activation|dropout|pdrop|layerdrop|jitter|drop_path|_prob|noise|init|loss|dtype|adapter).*"
    r"|encoder|decoder|n_inner|attn_impl|softmax_scale|use_cache|tie_word_embeddings|output_router_logits"
    r"|add_cross_attention|rope_(parameters|scaling|theta)|layer_rope_theta|suppress_tokens|pooling|pad_mode"
    r"|(summary|vision|image|video|audio|spatial|mask_feature|classifier|mamba_d|linear_a)_.*|.*_multipliers"
    r"|use_mamba_kernels|use_mambapy|use_associative_scan|deterministic_flash_attn|apply_spec_augment"
    r"|residual_in_fp32|enable_moe_fp32_combine|moe_shared_expert_overlap|rescale_prenorm_residual"
    r"|upsampling_ratios|downsample_mode|duration_delta|chunk_left_context|swiglu_limits.*|.*projector.*"
    r"|drop_vision_last_layer|vocab.*|mamba_ssm.*"
)  # fmt: skip

#: Values of fields that have none by default, or a name, which their docstrings do not type.
VALUES: Mapping[str, Any] = {
    "attention_multiplier": 0.5, "attn_logit_softcapping": 5.0, "clip_qkv": 0.5,
    "embedding_scale": 2.0, "feed_forward_proj": "gated-gelu", "final_logit_softcapping": 5.0,
    "first_k_dense_replace": 2, "logit_scale": 0.5, "moe_router_logit_softcapping": 5.0,
    "num_ln_in_parallel_attn": 1, "query_pre_attn_scalar": 16,
    "shared_expert_combination_strategy": "sum", "sliding_window": WINDOW,
    "topk_method": "group_limited_greedy",
}  # fmt: skip

_BOTH = ["sliding_attention", "full_attention"]
_SHARED = {"num_hidden_layers": 4, "layer_types": _BOTH * 2, "num_kv_shared_layers": 2}

#: Fields that released checkpoints set together, by model type.
RELEASED: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    # Gemma 4 E2B and E4B; 31B and 26B-A4B. EmbeddingGemma. ModernBERT, as it was trained.
    "gemma4_text": (
        {**_SHARED, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
        {"attention_k_eq_v": True, "use_bidirectional_attention": "vision", "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 48, "top_k_experts": 2},
    ),
    "gemma4_unified_text": (_SHARED,), "gemma3n_text": (_SHARED,),
    "gemma3_text": ({"use_bidirectional_attention": True, "num_hidden_layers": 2, "layer_types": _BOTH},),
    "modernbert": ({"sparse_prediction": True},),
    # ESM-2; ESM-1b.
    "esm": (
        {"position_embedding_type": "rotary", "token_dropout": True},
        {"position_embedding_type": "absolute", "token_dropout": True, "emb_layer_norm_before": True},
    ),
    # Qwen2.5 with its window; Qwen1.5-MoE. Falcon 40B; Falcon RW. OPT 350m.
    "qwen2": ({"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},),
    "qwen2_moe": ({"decoder_sparse_step": 2, "mlp_only_layers": [0]},),
    "falcon": ({"new_decoder_architecture": True, "num_kv_heads": 2}, {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "opt": ({"do_layer_norm_before": False, "word_embed_proj_dim": 16},),
    # GPT-2 of Mistral (Stanford); Pythia's other residual. StableLM 2 12B; Persimmon; Phi-1.
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},),
    "gpt_neox": ({"use_parallel_residual": False, "attention_bias": False},),
    "stablelm": ({"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},),
    "phi": ({"qk_layernorm": True, "partial_rotary_factor": 0.5},),
    # DeepSeek V2 Lite and V3. Llama 4 Scout and Maverick.
    "deepseek_v2": ({"q_lora_rank": None}, {"topk_method": "group_limited_greedy", "n_group": 2}),
    "deepseek_v3": ({"q_lora_rank": None}, {"norm_topk_prob": False, "rope_interleave": False}),
    "llama4_text": (
        {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5, "num_hidden_layers": 2, "no_rope_layers": [1, 0]},
        {"use_qk_norm": False, "interleave_moe_layer_step": 2, "moe_layers": [1]},
    ),
    # SmolLM3; Exaone 4; Granite; OLMo.
    "smollm3": ({"num_hidden_layers": 2, "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": WINDOW},),
    "exaone4": ({"sliding_window": None, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},),
    "granite": ({"attention_multiplier": 0.5, "residual_multiplier": 0.5, "logits_scaling": 2.0},),
    "olmo": ({"clip_qkv": 0.5, "attention_bias": True},),
    # T5 1.1 and mT5; NLLB, M2M-100 and Marian scale embeddings. BLOOM, MPT, RoFormer, Electra.
    "t5": ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},),
    "marian": ({"scale_embedding": True, "static_position_embeddings": True},),
    "mbart": ({"scale_embedding": True, "normalize_before": True, "add_final_layer_norm": True},),
    "bloom": ({"apply_residual_connection_post_layernorm": True, "slow_but_exact": True},),
    "mpt": ({"no_bias": False},), "roformer": ({"rotary_value": True, "embedding_size": 16},),
    "electra": ({"embedding_size": 16, "is_decoder": True},),
}  # fmt: skip

#: Model types of configs of towers and of what joins them to the text.
TOWERS = re.compile(
    r"vision|visual|image|img|audio|speech|video|tower|pixel|protein|codec|vq|clip|siglip|projector|depth|flow"
)


@dataclass(frozen=True)
class Switch:
    """Fields of one config of a model class that are set otherwise than by default.

    Attributes:
        kind: Model type of the config, which may be one within the class's own.
        values: Values by the names of the fields.
    """

    kind: str
    values: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Name of the switch in the table, as ``esm: token_dropout=true``."""
        pairs = (f"{name}={json.dumps(value)}" for name, value in self.values.items())
        return f"{self.kind}: {', '.join(pairs)}"


@dataclass
class Row:
    """Verdicts of one class on the switches of its configs.

    Attributes:
        version: Version of transformers.
        name: Name of the class.
        verdicts: By switch: ``exact`` as without it, ``refused: `` with the reason of
            ``check_model``, ``not run: `` with the error of the whole model; others are bad.
    """

    version: str
    name: str
    verdicts: dict[str, str]

    @property
    def key(self) -> str:
        """Order of the table's rows."""
        return self.name

    @property
    def is_bad(self) -> bool:
        """Return True if a switch is neither exact nor refused nor not run."""
        return not all(map(re.compile("exact$|refused: |not run: ").match, self.verdicts.values()))


def verdict(outcome: Result, default: Result) -> str:
    """Return the verdict of a switch, given the result with it and the one without it."""
    if outcome.result == "exact":
        parts = (x for x in ("loss", "padding", "images") if getattr(default, x) == "exact")
        differing = [f"{x} {y}" for x in parts if (y := getattr(outcome, x)) != "exact"]
        return "; ".join(differing) or "exact"
    if outcome.result == "refused" and outcome.reason.startswith(REFUSED):
        return f"refused: {outcome.reason.removeprefix(REFUSED)}"
    text = f"{outcome.result}: {outcome.reason}"
    return f"not run: {text[:160]}" if outcome.result.startswith("does not") else text


def switches_of(entry: Result) -> list[Switch]:
    """Return the switches of the configs of a model class, towers left out."""
    config = bare_config(entry.model_type, getattr(transformers, entry.name))
    by_label = {
        switch.label: switch
        for each in configs_in(config)
        if each is config or not TOWERS.search(each.model_type)
        for switch in _switches_in(type(each))
    }
    return [*by_label.values()]


def _switches_in(config: type[PreTrainedConfig]) -> Iterator[Switch]:
    """Yield the switches of one class of configs."""
    yield from (Switch(config.model_type, x) for x in RELEASED.get(config.model_type, ()))
    for name, values in values_of(config):
        yield from (Switch(config.model_type, {name: value}) for value in values)


def values_of(config: type[PreTrainedConfig]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the fields of a class of configs that may be switches, with their other values.

    Of a field that :data:`VALUES` lacks there are none.
    """
    common = {x.name for x in fields(PreTrainedConfig)}
    for each in fields(config):
        name, default = each.name, each.default
        if name in common or NO_SWITCH.fullmatch(name):
            continue
        if isinstance(default, bool) or (default is None and bool in typing.get_args(each.type)):
            yield name, (not default,)
        elif choices := tuple(_choices(each.type)):
            yield name, tuple(x for x in choices if x != default)
        elif default is None or isinstance(default, str) or default == 0:
            yield name, (VALUES[name],) if name in VALUES else ()


def _choices(annotation: Any) -> Iterator[Any]:
    """Yield the values that an annotation names by ``Literal``."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    elif typing.get_origin(annotation) is not dict:
        for inner in typing.get_args(annotation):
            yield from _choices(inner)
