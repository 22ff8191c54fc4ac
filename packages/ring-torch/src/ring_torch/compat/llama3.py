"""Functions of packed documents that were split over the ranks as one stream."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import UnsupportedError, checks
from ring_torch.comm.ranks import Group, Ranks, ranks_of
from ring_torch.compat.call import Options, as_asked, checked, kvpacked, qkvpacked, run
from ring_torch.compat.documents import check_longest, check_shards, check_slopes, offsets_of


class Prepared(NamedTuple):
    """What :func:`llama3_flash_attn_prepare_cu_seqlens` was asked and answered."""

    documents: tuple[int, ...]
    causal: bool
    rank: int
    world_size: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    stop: int


class DocumentSlice(int):
    """The start of a slice of keys, which remembers all documents.

    A rank's own offsets do not say where documents of other ranks begin, and a plan, which is the
    same on all ranks, has to know: an integer that the caller passes on anyway carries it.
    """

    prepared: Prepared
    tensors: tuple[tuple[Tensor, int | None], ...]  # as they were given out, with their versions


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What a rank needs of packed documents of which it holds one contiguous piece of the stream.

    Args:
        cu_seqlens: Integers ``(0, ..., T)``, offsets of the documents in the stream.
        causal: What will be passed to the function.
        rank: This rank in the group.
        world_size: Ranks of the group; it must divide ``T``.

    Returns:
        ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)``: offsets of
        the documents' parts in this rank's queries, and in the slice of all keys that these see;
        the longest part of each; that slice. Offsets have the dtype and device of ``cu_seqlens``.

    Raises:
        ValueError: An argument is malformed, or ranks cannot hold equal pieces.
    """
    prepared: tuple[Tensor, Tensor, int, int, slice]
    prepared = _prepare_on_host(cu_seqlens, causal, rank, world_size)
    return prepared


# It reads numbers. A function of its own, for torch.compile takes this off what it is given itself.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _prepare_on_host(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    checks.check_flag("causal", causal)
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    documents = offsets_of("cu_seqlens", cu_seqlens)
    total = documents[-1]
    if total % world_size:
        raise ValueError(
            f"cu_seqlens ends at {total}, which {world_size} ranks cannot share equally; add a "
            f"document of {-total % world_size} tokens of padding"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    prepared, start = _prepared(documents, causal, rank, world_size)
    q, k = (
        torch.tensor(offsets, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        for offsets in (prepared.cu_seqlens_q, prepared.cu_seqlens_k)
    )
    at = DocumentSlice(start)
    at.prepared, at.tensors = prepared, ((q, _version(q)), (k, _version(k)))
    return (
        q, k, _longest(prepared.cu_seqlens_q), _longest(prepared.cu_seqlens_k),
        slice(at, prepared.stop),
    )  # fmt: skip


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Any:
    """Exact attention of a stream of packed documents, a contiguous piece of it on every rank.

    Documents may be of any length and begin and end on any rank.

    Args:
        q: ``[T_local, H, D]``, float16, bfloat16, float32 or float64.
        k: ``[T_local, K, D]`` with ``H % K == 0``.
        v: ``[T_local, K, Dv]``.
        cu_seqlens_q: From :func:`llama3_flash_attn_prepare_cu_seqlens`, as the next four.
        cu_seqlens_k: Likewise.
        max_seqlen_q: Likewise; it may be larger.
        max_seqlen_k: Likewise; it may be larger.
        heads_k_stride: A divisor of ``K``. It changes no result, and nothing else here: memory is
            that of ``strategy="auto"`` in :func:`ring_torch.ring_attention`.
        local_k_slice: As returned, for it knows all documents.
        dropout_p: Probability to drop a softmax weight. The seed is drawn from torch's default
            generator of the CPU, which has to be in the same state on all ranks.
        softmax_scale: Default ``D ** -0.5``.
        causal: A query sees keys of its document at its own position and before.
        window_size: ``(left, right)``, the keys a query sees on each side besides its own position
            in the document; -1 leaves a side without a limit.
        alibi_slopes: ``[H]``, one row of slopes for all documents; no gradient.
        deterministic: Only use kernels whose backward repeats bit for bit.
        return_attn_probs: Return ``lse`` and ``None`` too; weights are never formed.
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised.

    Returns:
        ``out [T_local, H, Dv]`` in the inputs' dtype; with ``return_attn_probs`` ``(out, lse,
        None)``, ``lse [H, T_local]`` in float32 (float64 for float64 inputs) without a gradient.

    Raises:
        ValueError: An argument is malformed or was prepared for another call; nothing was sent.
        UnsupportedError: No kernel can do this, slopes differ by document, or the slice was made by
            other means; nothing was sent.
        RankMismatchError: Ranks make different calls.
    """
    return _attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride,
        local_k_slice,
        Options(
            dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
            return_attn_probs,
        ),
        group,
    )  # fmt: skip


llama3_flash_attn_varlen_kvpacked_func = kvpacked(llama3_flash_attn_varlen_func, dim=1)
llama3_flash_attn_varlen_qkvpacked_func = qkvpacked(llama3_flash_attn_varlen_func, dim=1)


def _prepared(
    documents: tuple[int, ...], causal: bool, rank: int, world_size: int
) -> tuple[Prepared, int]:
    """The offsets a rank needs, and where its slice of keys starts."""
    share = documents[-1] // world_size
    first, last = rank * share, (rank + 1) * share
    left, right = bisect_left(documents, first), bisect_left(documents, last)
    left -= documents[left] != first
    inner, start = documents[left + 1 : right], documents[left]
    stop = last if causal else documents[right]
    return Prepared(
        documents, causal, rank, world_size,
        cu_seqlens_q=(0, *(offset - first for offset in inner), share),
        cu_seqlens_k=(0, *(offset - start for offset in inner), stop - start),
        stop=stop,
    ), start  # fmt: skip


def _longest(offsets: tuple[int, ...]) -> int:
    return max(stop - start for start, stop in pairwise(offsets))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor, heads_k_stride: int,
    local_k_slice: slice, options: Options, group: Group,
) -> Any:  # fmt: skip
    """Attention of contiguous shards ``[T_local, H, D]`` of a stream of documents."""
    ring = ranks_of(group)
    check_shards(q, k, v)
    at = _checked_start(local_k_slice, ring, causal=options.causal)
    for name, tensor, longest, offsets, (known, version) in (
        ("q", cu_seqlens_q, max_seqlen_q, at.prepared.cu_seqlens_q, at.tensors[0]),
        ("k", cu_seqlens_k, max_seqlen_k, at.prepared.cu_seqlens_k, at.tensors[1]),
    ):
        if tensor is not known or version is None or version != _version(tensor):  # else ask no GPU
            _check_same(f"cu_seqlens_{name}", tensor, offsets)
        check_longest(f"max_seqlen_{name}", longest, _longest(offsets))
    check_stride(heads_k_stride, k.shape[1])
    documents = at.prepared.documents
    check_slopes(options.alibi_slopes, len(documents) - 1)
    call, inputs = checked(ring, "contiguous", q[None], k[None], v[None], options, documents)
    out, lse = run(call, inputs)
    return as_asked(out[0], lse[0], options)


def check_stride(heads_k_stride: int, heads: int) -> None:
    """Check the number of K/V heads that would be gathered at once.

    Raises:
        ValueError: It does not divide the heads.
    """
    if not isinstance(heads_k_stride, int) or heads_k_stride < 1 or heads % heads_k_stride:
        raise ValueError(
            f"heads_k_stride must be an integer that divides the {heads} heads of k, got "
            f"{heads_k_stride!r}"
        )


def _checked_start(local_k_slice: slice, ring: Ranks, *, causal: bool) -> DocumentSlice:
    """The start of a slice that was prepared for this call.

    Raises:
        ValueError: It was prepared for another one.
        UnsupportedError: It was made by other means.
    """
    at = local_k_slice.start if isinstance(local_k_slice, slice) else None
    if not isinstance(at, DocumentSlice):
        raise UnsupportedError(
            f"local_k_slice={local_k_slice!r} does not say where documents of other ranks begin; "
            f"pass the one that ring_torch.compat.llama3_flash_attn_prepare_cu_seqlens returns"
        )
    prepared = at.prepared
    facts = {
        "causal": (prepared.causal, causal), "rank": (prepared.rank, ring.rank),
        "world_size": (prepared.world_size, ring.size), "stop": (local_k_slice.stop, prepared.stop),
    }  # fmt: skip
    wrong = [f"{name}={a} there and {b} here" for name, (a, b) in facts.items() if a != b]
    if wrong or local_k_slice.step not in (None, 1):
        raise ValueError(
            f"local_k_slice={local_k_slice!r} was prepared for another call: {', '.join(wrong)}; call "
            f"llama3_flash_attn_prepare_cu_seqlens for this one"
        )
    return at


def _check_same(name: str, given: Tensor, expected: tuple[int, ...]) -> None:
    offsets = tuple(given.tolist()) if isinstance(given, Tensor) and given.ndim == 1 else given
    if offsets != expected:
        raise ValueError(
            f"{name} is {offsets!r}, but that of local_k_slice is {expected}; pass both as "
            f"llama3_flash_attn_prepare_cu_seqlens returns them"
        )


def _version(x: Tensor) -> int | None:
    """How often a tensor was written to; inference tensors do not count."""
    return None if not isinstance(x, Tensor) or x.is_inference() else x._version  # noqa: SLF001
