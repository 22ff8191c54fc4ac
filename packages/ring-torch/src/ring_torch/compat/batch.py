"""Functions of ring_flash_attn for batches ``[B, T_local, H, D]``: each row is one sequence.

Each has two more that take K and V, or Q, K and V, stacked along dimension 2 of one tensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ring_core import StrategyConfig
from ring_torch.comm.ranks import Group
from ring_torch.compat.call import FlashAttnOptions, attend_batch, kvpacked, qkvpacked


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
    *,
    strategy: str | StrategyConfig = "auto",
) -> Any:
    """Compute exact attention over a sequence of which each rank holds one contiguous piece.

    All ranks of the group must call it, with pieces of one length.

    Args:
        q: ``[B, T_local, H, D]``, float16, bfloat16, float32 or float64.
        k: ``[B, T_local, K, D]`` with ``H % K == 0``.
        v: ``[B, T_local, K, Dv]``.
        dropout_p: Probability to drop a softmax weight. The seed is drawn from torch's default CPU
            generator, which must be in the same state on all ranks.
        softmax_scale: Factor of the scores; default ``D ** -0.5``.
        causal: True if a query sees only keys at its own position and before.
        window_size: ``(left, right)``, numbers of keys that a query sees on each side besides its
            own position in the whole sequence; -1 for no limit.
        alibi_slopes: ``[H]`` or ``[B, H]``; scores get ``-slope * abs(i - j)``; no gradient.
        deterministic: Use only kernels whose backward repeats bit for bit.
        return_attn_probs: Return ``lse`` and ``None`` too. Attention weights are never formed.
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised.
        strategy: As in :func:`ring_torch.ring_attention`; ring_flash_attn has no such argument.

    Returns:
        ``out [B, T_local, H, Dv]`` in the inputs' dtype. With ``return_attn_probs`` it is ``(out,
        lse, None)``, where ``lse [B, H, T_local]`` has natural logarithms in float32 (float64 for
        float64 inputs) without a gradient, and ``-inf`` in rows that see no key.

    Raises:
        ValueError: An argument is malformed; nothing was sent.
        UnsupportedError: No kernel can do this; nothing was sent.
        RankMismatchError: Ranks make different calls.

    Example::

        out = ring_flash_attn_func(q, k, v, causal=True, group=group)
    """
    return attend_batch(
        "contiguous",
        q,
        k,
        v,
        FlashAttnOptions(
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            strategy,
        ),
        group,
    )


ring_flash_attn_kvpacked_func = kvpacked(ring_flash_attn_func, dim=2)
ring_flash_attn_qkvpacked_func = qkvpacked(ring_flash_attn_func, dim=2)


def zigzag_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
    *,
    strategy: str | StrategyConfig = "auto",
) -> Any:
    """Compute :func:`ring_flash_attn_func` over a sequence in the zigzag layout.

    The sequence is cut into ``2 * P`` chunks. Rank ``r`` of ``P`` holds chunks ``r`` and ``2 * P -
    1 - r``, one after the other, which gives all ranks equal work in causal attention.
    """
    return attend_batch(
        "zigzag",
        q,
        k,
        v,
        FlashAttnOptions(
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            strategy,
        ),
        group,
    )


zigzag_ring_flash_attn_kvpacked_func = kvpacked(zigzag_ring_flash_attn_func, dim=2)
zigzag_ring_flash_attn_qkvpacked_func = qkvpacked(zigzag_ring_flash_attn_func, dim=2)


def stripe_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
    *,
    strategy: str | StrategyConfig = "auto",
) -> Any:
    """Compute :func:`ring_flash_attn_func` over a sequence in the striped layout.

    Rank ``r`` of ``P`` holds tokens ``r``, ``r + P``, ``r + 2 * P`` and so on, which gives all
    ranks equal work in causal attention.
    """
    return attend_batch(
        "striped",
        q,
        k,
        v,
        FlashAttnOptions(
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            strategy,
        ),
        group,
    )


stripe_flash_attn_kvpacked_func = kvpacked(stripe_flash_attn_func, dim=2)
stripe_flash_attn_qkvpacked_func = qkvpacked(stripe_flash_attn_func, dim=2)
