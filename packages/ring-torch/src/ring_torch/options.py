"""Options of a call: their types, for functions that pass them on, and their record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

from torch import Tensor

from ring_core import KernelConfig, Mask, StrategyConfig
from ring_core.masks.mask import Window as Window


class AttentionOptions(TypedDict, total=False):
    """Keyword options of :func:`ring_torch.ring_attention`, for functions that pass them on."""

    seq_len: int | tuple[int, int] | None
    causal: bool
    window: Window | None
    chunk_size: int | None
    cu_seqlens: Sequence[int] | None
    segment_ids: Tensor | tuple[Tensor, Tensor] | None
    mask: Mask | Tensor | None
    softmax_scale: float | None
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int | None
    deterministic: bool
    kernel: str | KernelConfig
    strategy: str | StrategyConfig
    transport: str


class CallOptions(NamedTuple):
    """Options of one call as the caller gave them, in the order of the public function."""

    seq_len: int | tuple[int, int] | None = None
    causal: bool = False
    window: Window | None = None
    chunk_size: int | None = None
    cu_seqlens: Sequence[int] | None = None
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None
    mask: Mask | Tensor | None = None  # no tensor any more once it has become a bias
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    deterministic: bool = False
    return_lse: bool = False
    kernel: str | KernelConfig = "auto"
    strategy: str | StrategyConfig = "auto"
    transport: str = "auto"
    # Not an option of the caller: whether the bias is one that the caller gave, a boolean mask in
    # the form of a bias, or both.
    bias_role: Literal["added", "mask", "both"] = "added"
