"""Functions of batches: every row one sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ring_torch.comm.ranks import Group
from ring_torch.compat.call import Options, attend_batch, kvpacked, qkvpacked


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
) -> Any:
    """Exact attention over a sequence split into equal contiguous pieces, one a rank.

    Args:
        q: ``[B, T_local, H, D]``, float16, bfloat16, float32 or float64.
        k: ``[B, T_local, K, D]`` with ``H % K == 0``.
        v: ``[B, T_local, K, Dv]``.
        dropout_p: Probability to drop a softmax weight. The seed is drawn from torch's default
            generator of the CPU, which has to be in the same state on all ranks.
        softmax_scale: Default ``D ** -0.5``.
        causal: A query sees keys at its own position and before.
        window_size: ``(left, right)``, the keys a query sees on each side besides its own position
            in the whole sequence; -1 leaves a side without a limit.
        alibi_slopes: ``[H]`` or ``[B, H]``: adds ``-slope * abs(i - j)``; no gradient.
        deterministic: Only use kernels whose backward repeats bit for bit.
        return_attn_probs: Return ``lse`` and ``None`` too; weights are never formed.
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised.

    Returns:
        ``out [B, T_local, H, Dv]`` in the inputs' dtype; with ``return_attn_probs`` ``(out, lse,
        None)``, ``lse [B, H, T_local]`` being natural logs in float32 (float64 for float64
        inputs) without a gradient, ``-inf`` where a row sees nothing.

    Raises:
        ValueError: An argument is malformed; nothing was sent.
        UnsupportedError: No kernel can do this; nothing was sent.
        RankMismatchError: Ranks make different calls.
    """
    return attend_batch(
        "contiguous", q, k, v,
        Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs,
        ),
        group,
    )  # fmt: skip


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
) -> Any:
    """:func:`ring_flash_attn_func` of a sequence in ``2 * P`` chunks.

    Rank ``r`` of ``P`` holds chunks ``r`` and ``2 * P - 1 - r``, one after the other, so that
    causal work is even.
    """
    return attend_batch(
        "zigzag", q, k, v,
        Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs,
        ),
        group,
    )  # fmt: skip


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
) -> Any:
    """:func:`ring_flash_attn_func` of a sequence assigned token by token.

    Rank ``r`` of ``P`` holds tokens ``r``, ``r + P``, ``r + 2 * P`` and so on, so that causal work
    is even.
    """
    return attend_batch(
        "striped", q, k, v,
        Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs,
        ),
        group,
    )  # fmt: skip


stripe_flash_attn_kvpacked_func = kvpacked(stripe_flash_attn_func, dim=2)
stripe_flash_attn_qkvpacked_func = qkvpacked(stripe_flash_attn_func, dim=2)
