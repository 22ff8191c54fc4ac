"""Functions of packed documents that are each split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ring_torch.comm.ranks import Group
from ring_torch.compat.call import Options, kvpacked, qkvpacked
from ring_torch.compat.documents import attend_documents


def ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Any:
    """Exact attention of packed documents, each split into equal contiguous pieces, one a rank.

    Documents of 4096 tokens a rank and more get a call each. All others share one, between two
    exchanges among all ranks: of the rows of Q, K and V there, and of those of the answer back.

    Args:
        q: ``[T_local, H, D]``, this rank's pieces of the documents, one after the other.
        k: ``[T_local, K, D]`` with ``H % K == 0``.
        v: ``[T_local, K, Dv]``.
        cu_seqlens: ``(0, ..., T_local)``, offsets of those pieces, the same on all ranks. From a
            GPU they are copied to the host, which has to wait for them: pass a CPU tensor or
            a list.
        max_seqlen: At least the longest piece.
        dropout_p: Probability to drop a softmax weight.
        softmax_scale: Default ``D ** -0.5``.
        causal: A query sees keys of its document at its own position and before.
        window_size: ``(left, right)``, by positions in the document.
        alibi_slopes: ``[H]``; one row of slopes for all documents.
        deterministic: Only use kernels whose backward repeats bit for bit.
        return_attn_probs: Return ``lse`` and ``None`` too.
        group: As there.

    Returns:
        ``out [T_local, H, Dv]``; with ``return_attn_probs`` ``(out, lse, None)``, ``lse [H,
        T_local]``.

    Raises:
        ValueError: An argument is malformed; nothing was sent.
        UnsupportedError: No kernel can do this, or slopes differ by document; nothing was sent.
        RankMismatchError: Ranks make different calls.
    """
    return attend_documents(
        "contiguous", q, k, v, cu_seqlens, max_seqlen,
        Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs,
        ),
        group,
    )  # fmt: skip


ring_flash_attn_varlen_kvpacked_func = kvpacked(ring_flash_attn_varlen_func, dim=1)
ring_flash_attn_varlen_qkvpacked_func = qkvpacked(ring_flash_attn_varlen_func, dim=1)


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Any:
    """:func:`ring_flash_attn_varlen_func` of documents in ``2 * P`` chunks each.

    Of each document rank ``r`` of ``P`` holds chunks ``r`` and ``2 * P - 1 - r``, one after the
    other.
    """
    return attend_documents(
        "zigzag", q, k, v, cu_seqlens, max_seqlen,
        Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs,
        ),
        group,
    )  # fmt: skip


zigzag_ring_flash_attn_varlen_kvpacked_func = kvpacked(zigzag_ring_flash_attn_varlen_func, dim=1)
zigzag_ring_flash_attn_varlen_qkvpacked_func = qkvpacked(zigzag_ring_flash_attn_varlen_func, dim=1)
