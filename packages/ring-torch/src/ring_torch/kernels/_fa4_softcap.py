"""The soft cap for FlashAttention-4, whose own takes an approximation for the hyperbolic tangent.

Functions in its language, which it compiles into its kernels; imported where one is asked for.
"""

# They are compiled: their arguments have no types in Python.
# ruff: noqa: ANN001, ANN202, ARG001
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cutlass import cute  # type: ignore[import-not-found]


@lru_cache(maxsize=64)
def capped(cap: float) -> Any:
    """``cap * tanh(score / cap)``."""

    @cute.jit
    def score_mod(scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return cap * cute.math.tanh(scores / cap, fastmath=False)

    return score_mod


@lru_cache(maxsize=64)
def slope(cap: float) -> Any:
    """The gradient of a score from that of what became of it."""

    @cute.jit
    def score_mod_bwd(
        gradients, scores, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors
    ):
        squashed = cute.math.tanh(scores / cap, fastmath=False)
        return gradients * (1.0 - squashed * squashed)

    return score_mod_bwd
