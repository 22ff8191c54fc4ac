"""Classes of transformers that write their attention out, and make positions of their own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from ring_torch.models.code import parameters_of


@dataclass(frozen=True)
class Written:
    """What is known of a class whose attention is written out.

    Attributes:
        hides_by_itself: It hides later tokens by a buffer, beside the mask that it is given.
        local: The attribute that says ``"local"``, where the config's ``window_size`` counts.
        slopes: The method of its model that makes slopes of ALiBi.
    """

    hides_by_itself: bool = False
    local: str = ""
    slopes: str = ""


_PLAIN = Written()

#: By the name of the class. Each is run by ``tests/sweep``.
WRITTEN: Mapping[str, Written] = MappingProxyType({
    "BigBirdPegasusSelfAttention": _PLAIN,
    "BigBirdSelfAttention": _PLAIN,
    "BloomAttention": Written(slopes="build_alibi_tensor"),
    "CodeGenAttention": _PLAIN,
    "FalconAttention": _PLAIN,
    "GPTJAttention": _PLAIN,
    "GPTNeoSelfAttention": Written(hides_by_itself=True, local="attention_type"),
    "GPTNeoXJapaneseAttention": _PLAIN,
    "MegatronBertSelfAttention": _PLAIN,
    "MptAttention": Written(slopes="build_mpt_alibi_tensor"),
    "MvpAttention": _PLAIN,
    "RemBertSelfAttention": _PLAIN,
    "RoFormerSelfAttention": _PLAIN,
    "TrOCRAttention": _PLAIN,
    "XGLMAttention": _PLAIN,
})  # fmt: skip


#: Classes of layers that mix tokens one after another: they are given whole sequences.
RECURRENT = frozenset({
    "BailingHybridDeltaAttention", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer",
    "JambaMambaMixer", "KimiLinearDeltaAttention", "Lfm2MoeShortConv", "Lfm2ShortConv",
    "Lfm3ShortConv", "MiniMaxLightningAttention", "NemotronHMamba2Mixer", "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet",
    "RecurrentGemmaRecurrentBlock", "Zamba2MambaMixer",
})  # fmt: skip


def is_recurrent(module: nn.Module) -> bool:
    """Whether it mixes tokens one after another, and can be given whole sequences."""
    return type(module).__name__ in RECURRENT


def written_form(module: nn.Module) -> Written | None:
    """What is known of a module whose attention is written out."""
    return WRITTEN.get(type(module).__name__)


def layer_window(module: Any, form: Written) -> tuple[int, int] | None:
    """The window of its layer, other keys to the left and right."""
    if form.local and getattr(module, form.local) == "local":
        return module.config.window_size - 1, 0
    return None


def makes_positions(module: nn.Module) -> bool:
    """Whether it makes positions of a sequence's length, if it is given none."""
    return {"past_key_values_length", "position_ids"} <= parameters_of(type(module)) and (
        "Position" in type(module).__name__
    )


def counts_positions(module: nn.Module) -> bool:
    """Whether it counts positions among the tokens it is given, padding left out."""
    return hasattr(type(module), "create_position_ids_from_input_ids")


def makes_bias(module: nn.Module) -> bool:
    """Whether it makes a bias of relative positions, as T5 does, of as many queries as it sees."""
    function = getattr(type(module), "compute_bias", None)
    return function is not None and "past_seen_tokens" in inspect.signature(function).parameters
