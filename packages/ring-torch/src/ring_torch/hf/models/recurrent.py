"""Recurrent layers of transformers: which there are, and which functions of theirs mix tokens.

A layer's forward looks up its convolution and its scan among the globals of its module, under names
that all families share. So they are known by these: a layer that calls them, and no other function
that could mix tokens, is split, whatever its class is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any

from torch import nn

from ring_core.base.arguments import not_none
from ring_torch.hf.models.code import (
    forward_of,
    functions_in_forward,
    parameters_of,
    reads_in_forward,
)

_CONVOLUTION = "causal_conv1d_fn"

#: Functions that carry a state from token to token.
SCANS = frozenset({
    "chunk_kimi_delta_attention", "mamba2_chunk_scan", "mamba_selective_scan", "torch_chunk_gated_delta_rule",
})  # fmt: skip

#: All functions that have an operation of Ring in their place when a layer is split: fused ones of
#: training, too, which hold a convolution, a scan and more.
REPLACED = SCANS | {_CONVOLUTION, "mamba2_split_conv1d_scan_combined", "mamba_inner_fn"}

#: Functions that mix no tokens, and those of a step of decoding, which take a cache.
_OTHERS = frozenset({
    "apply_mask_to_padding_states", "causal_conv1d_update", "mamba2_selective_state_update",
    "mamba_selective_state_update", "recurrent_kimi_delta_attention", "torch_recurrent_gated_delta_rule",
})  # fmt: skip

#: Layers that are convolutions alone.
CONVOLUTIONS = frozenset({"Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv"})

#: Layers whose scan stands in their own code, of which Ring computes all or a part anew; and the
#: attributes and functions that their forwards read. One that reads others is not known to Ring.
INLINE: Mapping[str, frozenset[str]] = MappingProxyType({
    "MiniMaxLightningAttention": frozenset({
        "act_fn", "apply_mask_to_padding_states", "block_size", "diagonal_decay", "head_dim", "key_decay", "layer_idx", "norm",
        "num_attention_heads", "out_proj", "output_gate", "qkv_proj", "query_decay", "slope_rate",
    }),
    "RecurrentGemmaRecurrentBlock": frozenset({
        "act_fn", "conv1d_state", "conv1d_width", "conv_1d", "hidden_size", "linear_out", "linear_x",
        "linear_y", "lru_width", "rg_lru",
    }),
})  # fmt: skip

#: Recurrent layers whose code calls no function of the table, in the newest release or before it.
RECURRENT = CONVOLUTIONS | frozenset({
    "BailingHybridDeltaAttention", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer",
    "JambaMambaMixer", "KimiLinearDeltaAttention", "MiniMaxLightningAttention", "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet",
    "RecurrentGemmaRecurrentBlock", "Zamba2MambaMixer",
})  # fmt: skip


def is_recurrent(module: nn.Module) -> bool:
    """Return True for a recurrent or convolutional layer that is split or run whole."""
    cls = type(module)
    is_known = bool(functions_in_forward(cls) & SCANS)
    return cls.__name__ in RECURRENT or (is_known and "attention_mask" in parameters_of(cls))


def carries_states(module: nn.Module) -> bool:
    """Return True for a recurrent layer that is no convolution alone."""
    return type(module).__name__ not in CONVOLUTIONS


def whole_reason(module: nn.Module) -> str:
    """Return the reason why a recurrent layer runs on whole sequences; nothing if it is split."""
    name, called = type(module).__name__, functions_in_forward(type(module))
    replaced = getattr(vars(module).get("forward"), "__module__", "ring_torch")
    if not replaced.startswith("ring_torch") or any(
        hasattr(x, "_hf_hook") for x in module.modules()
    ):
        return f"the forward of {name} was replaced, or accelerate moves its weights"
    if (read := INLINE.get(name)) is not None:
        known = read == reads_in_forward(type(module), "self") | called
        return "" if known else f"{name} has its scan in its own code, which is another release's"
    if _CONVOLUTION not in called or (carries_states(module) and not called & SCANS):
        return f"{name} has its scan in its own code"
    if unknown := sorted(called - REPLACED - _OTHERS):
        return f"{name} calls {', '.join(unknown)}, which may mix tokens"
    return ""


def rounded_otherwise(module: nn.Module, chunk_size: int) -> Callable[..., Any]:
    """Return the function ``forward`` of a layer's class, with scans in chunks of another size.

    What it returns differs by the rounding of the scan, which no other attention shows.
    """
    globals_ = not_none(forward_of(type(module))).__globals__
    names = SCANS & functions_in_forward(type(module))
    return forward_with(
        module, {name: partial(globals_[name], chunk_size=chunk_size) for name in names}
    )


def forward_with(module: nn.Module, replaced: Mapping[str, object]) -> Callable[..., Any]:
    """Return a copy of the function ``forward`` of a module's class that sees other globals.

    Those of its module, which other models and other threads read, stay as they are.
    """
    forward = not_none(forward_of(type(module)))
    copy = FunctionType(
        forward.__code__, {**forward.__globals__, **replaced}, forward.__name__,
        forward.__defaults__, forward.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
