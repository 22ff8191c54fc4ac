"""Functions of ring_flash_attn for packed documents that are split over the ranks as one stream."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_core import StrategyConfig, UnsupportedError, checks
from ring_torch.capture import untraced
from ring_torch.comm.ranks import Group, Ranks, ranks_of
from ring_torch.compat.call import (
    FlashAttnOptions,
    as_requested,
    checked,
    kvpacked,
    qkvpacked,
    run_call,
)
from ring_torch.compat.documents import check_longest, check_shards, check_slopes, offsets_of


class Prepared(NamedTuple):
    """Arguments and results of :func:`llama3_flash_attn_prepare_cu_seqlens`, kept for later checks.

    Attributes:
        documents: Offsets of the documents in the stream.
        causal: True for causal attention.
        rank: This rank.
        world_size: Number of ranks.
        cu_seqlens_q: Offsets of the documents' parts in this rank's queries.
        cu_seqlens_k: Offsets of the documents' parts in the keys that these see.
        stop: End of these keys in the stream.
    """

    documents: tuple[int, ...]
    causal: bool
    rank: int
    world_size: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    stop: int


class PreparedSliceStart(int):
    """Start of a slice of keys: an ``int`` that also carries the offsets of all documents.

    The offsets of one rank do not say where documents on other ranks begin, and the plan of a call,
    which is equal on all ranks, needs to know. The caller passes this integer on anyway, so it
    carries them.

    Attributes:
        prepared: Arguments and results of the preparation.
        tensors: Offset tensors as they were returned, with their version counters.
    """

    prepared: Prepared
    tensors: tuple[tuple[Tensor, int | None], ...]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return the arguments of :func:`llama3_flash_attn_varlen_func` that depend on documents.

    Args:
        cu_seqlens: Integers ``(0, ..., T)``, offsets of the documents in the stream.
        causal: The value that will be passed to that function.
        rank: This rank in the group.
        world_size: Number of ranks in the group; it must divide ``T``.

    Returns:
        ``(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice)``: offsets of
        the documents' parts in this rank's queries, and in the slice of all keys that these see;
        the longest part of each; that slice. Offsets have the dtype and device of ``cu_seqlens``.

    Raises:
        ValueError: An argument is malformed, or ranks cannot hold equal pieces.

    Example::

        prepared = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, world_size)
        cu_seqlens_q, cu_seqlens_k, max_q, max_k, local_k_slice = prepared
        out = llama3_flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, 1, local_k_slice, causal=True
        )
    """
    return _prepare_on_host(cu_seqlens, causal, rank, world_size)


# This reads numbers of tensors, which torch.compile must not trace. The decorator is on an inner
# function, as torch.compile ignores it on the function that it is given itself.
@untraced
def _prepare_on_host(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Compute the arguments on the host; see :func:`llama3_flash_attn_prepare_cu_seqlens`."""
    checks.check_flag("causal", causal)
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    documents = offsets_of("cu_seqlens", cu_seqlens)
    total = documents[-1]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    if total % world_size:
        raise ValueError(
            f"cu_seqlens ends at {total}, which {world_size} ranks cannot share equally; add a "
            f"document of {-total % world_size} tokens of padding"
        )
    prepared, start = _prepared(documents, causal, rank, world_size)
    q, k = (
        torch.tensor(offsets, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        for offsets in (prepared.cu_seqlens_q, prepared.cu_seqlens_k)
    )
    slice_start = PreparedSliceStart(start)
    slice_start.prepared, slice_start.tensors = prepared, ((q, _version(q)), (k, _version(k)))
    return (
        q, k, _longest(prepared.cu_seqlens_q), _longest(prepared.cu_seqlens_k),
        slice(slice_start, prepared.stop),
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
    *,
    strategy: str | StrategyConfig = "auto",
) -> Any:
    """Compute exact attention of a stream of packed documents; each rank holds a piece of it.

    The pieces are contiguous and of one length. Documents may be of any length, and may begin and
    end on any rank. All ranks of the group must call it.

    Args:
        q: ``[T_local, H, D]``, float16, bfloat16, float32 or float64.
        k: ``[T_local, K, D]`` with ``H % K == 0``.
        v: ``[T_local, K, Dv]``.
        cu_seqlens_q: Offsets in the queries, from :func:`llama3_flash_attn_prepare_cu_seqlens`.
        cu_seqlens_k: Offsets in the keys, from the same call.
        max_seqlen_q: Longest part in the queries, from the same call, or more.
        max_seqlen_k: Longest part in the keys, from the same call, or more.
        heads_k_stride: A divisor of ``K``, which is checked. It has no other effect: memory is that
            of the strategy.
        local_k_slice: The slice from the same call, unchanged: it carries all documents' offsets.
        dropout_p: Probability to drop a softmax weight. The seed is drawn from torch's default CPU
            generator, which must be in the same state on all ranks.
        softmax_scale: Factor of the scores; default ``D ** -0.5``.
        causal: True if a query sees only keys of its document at its own position and before.
        window_size: ``(left, right)``, numbers of keys that a query sees on each side besides its
            own position in the document; -1 for no limit.
        alibi_slopes: ``[H]``, the same slopes for all documents; no gradient.
        deterministic: Use only kernels whose backward repeats bit for bit.
        return_attn_probs: Return ``lse`` and ``None`` too. Attention weights are never formed.
        group: A process group or one-dimensional ``DeviceMesh``; ``None`` is the default group, or
            this process alone where none is initialised.
        strategy: As in :func:`ring_torch.ring_attention`; ring_flash_attn has no such argument.

    Returns:
        ``out [T_local, H, Dv]`` in the inputs' dtype. With ``return_attn_probs`` it is ``(out, lse,
        None)``, where ``lse [H, T_local]`` is in float32 (float64 for float64 inputs) without a
        gradient.

    Raises:
        ValueError: An argument is malformed or was prepared for another call; nothing was sent.
        UnsupportedError: No kernel can do this, slopes differ by document, or the slice was made by
            other means; nothing was sent.
        RankMismatchError: Ranks make different calls.

    Example::

        cu_seqlens_q, cu_seqlens_k, max_q, max_k, local_k_slice = prepared
        out = llama3_flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, 1, local_k_slice, causal=True
        )
    """
    return _attend_stream(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        heads_k_stride,
        local_k_slice,
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


llama3_flash_attn_varlen_kvpacked_func = kvpacked(llama3_flash_attn_varlen_func, dim=1)
llama3_flash_attn_varlen_qkvpacked_func = qkvpacked(llama3_flash_attn_varlen_func, dim=1)


def _prepared(
    documents: tuple[int, ...], causal: bool, rank: int, world_size: int
) -> tuple[Prepared, int]:
    """Return the offsets that a rank needs, and the start of its slice of keys."""
    share = documents[-1] // world_size
    first_token, end = rank * share, (rank + 1) * share
    # Keys start with the document that this rank's first token is in. They end with this rank's
    # last token if causal, else with the document that it is in.
    left, right = bisect_left(documents, first_token), bisect_left(documents, end)
    left -= documents[left] != first_token
    # Borders inside of this rank's tokens cut its queries; those before them are of documents that
    # began on earlier ranks.
    inner, start = documents[left + 1 : right], documents[left]
    stop = end if causal else documents[right]
    return Prepared(
        documents,
        causal,
        rank,
        world_size,
        cu_seqlens_q=(0, *(offset - first_token for offset in inner), share),
        cu_seqlens_k=(0, *(offset - start for offset in inner), stop - start),
        stop=stop,
    ), start


def _longest(offsets: tuple[int, ...]) -> int:
    """Return the length of the longest document of these offsets."""
    return max(stop - start for start, stop in pairwise(offsets))


@untraced
def _attend_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    heads_k_stride: int,
    local_k_slice: slice,
    options: FlashAttnOptions,
    group: Group,
) -> Any:
    """Compute attention of contiguous shards ``[T_local, H, D]`` of a stream of documents."""
    ranks = ranks_of(group)
    check_shards(q, k, v)
    slice_start = _checked_start(local_k_slice, ranks, causal=options.causal)
    for name, tensor, longest, offsets, (returned, version) in (
        (
            "q",
            cu_seqlens_q,
            max_seqlen_q,
            slice_start.prepared.cu_seqlens_q,
            slice_start.tensors[0],
        ),
        (
            "k",
            cu_seqlens_k,
            max_seqlen_k,
            slice_start.prepared.cu_seqlens_k,
            slice_start.tensors[1],
        ),
    ):
        # Compare values only if the tensor is not the one returned, or was written to since: a
        # comparison would wait for the GPU.
        if tensor is not returned or version is None or version != _version(tensor):
            _check_offsets_of_slice(f"cu_seqlens_{name}", tensor, offsets)
        check_longest(f"max_seqlen_{name}", longest, _longest(offsets))
    check_stride(heads_k_stride, k.shape[1])
    documents = slice_start.prepared.documents
    check_slopes(options.alibi_slopes, len(documents) - 1)
    # Keys need not be gathered by document: the plan knows from all offsets what each rank sees.
    call, inputs = checked(ranks, "contiguous", q[None], k[None], v[None], options, documents)
    out, lse = run_call(call, inputs)
    return as_requested(out[0], lse[0], options)


def check_stride(heads_k_stride: int, heads: int) -> None:
    """Check ``heads_k_stride``, the number of K/V heads that ring_flash_attn gathers at once.

    Raises:
        ValueError: It does not divide the number of heads.
    """
    if not isinstance(heads_k_stride, int) or heads_k_stride < 1 or heads % heads_k_stride:
        raise ValueError(
            f"heads_k_stride must be an integer that divides the {heads} heads of k, got "
            f"{heads_k_stride!r}"
        )


def _checked_start(local_k_slice: slice, ranks: Ranks, *, causal: bool) -> PreparedSliceStart:
    """Return the start of a slice, after checking that it was prepared for this call.

    Raises:
        ValueError: It was prepared for another call.
        UnsupportedError: It does not come from the preparing function.
    """
    slice_start = local_k_slice.start if isinstance(local_k_slice, slice) else None
    if not isinstance(slice_start, PreparedSliceStart):
        raise UnsupportedError(
            f"local_k_slice={local_k_slice!r} does not say where documents of other ranks begin; "
            f"pass the one that ring_torch.compat.llama3_flash_attn_prepare_cu_seqlens returns"
        )
    prepared = slice_start.prepared
    facts = {
        "causal": (prepared.causal, causal), "rank": (prepared.rank, ranks.rank),
        "world_size": (prepared.world_size, ranks.size), "stop": (prepared.stop, local_k_slice.stop),
    }  # fmt: skip
    wrong = [f"{name}={a} there and {b} here" for name, (a, b) in facts.items() if a != b]
    if local_k_slice.step not in (None, 1):
        wrong.append(f"step=1 there and {local_k_slice.step} here")
    if wrong:
        raise ValueError(
            f"local_k_slice={local_k_slice!r} was prepared for another call: {', '.join(wrong)}; call "
            f"llama3_flash_attn_prepare_cu_seqlens for this one"
        )
    return slice_start


def _check_offsets_of_slice(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Check that offsets are those of ``local_k_slice``.

    Raises:
        ValueError: They are those of another slice.
    """
    offsets = tuple(tensor.tolist()) if isinstance(tensor, Tensor) and tensor.ndim == 1 else tensor
    if offsets != expected:
        raise ValueError(
            f"{name} is {offsets!r}, but that of local_k_slice is {expected}; pass both as "
            f"llama3_flash_attn_prepare_cu_seqlens returns them"
        )


def _version(x: Tensor) -> int | None:
    """Return a tensor's version counter, which each write raises; inference tensors have none."""
    return None if not isinstance(x, Tensor) or x.is_inference() else x._version  # noqa: SLF001 - counts writes in place
