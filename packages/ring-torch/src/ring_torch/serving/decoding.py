"""Attention of new tokens, which every rank has, to a cache whose pages are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from ring_core.base.arguments import refuse_foreign_options
from ring_torch.capture import is_capturing, untraced
from ring_torch.options import Window
from ring_torch.recurrent.arguments import Explained, SplitsSequences, explains
from ring_torch.serving.arguments import (
    KernelName,
    ServingCall,
    ServingOptions,
    TransportName,
    checked_call,
)
from ring_torch.serving.cache import KVCache
from ring_torch.serving.kernels import attend_by
from ring_torch.serving.merging import bytes_of_merge, merge_over_ranks
from ring_torch.serving.paged import PagedKeys
from ring_torch.serving.state import positions_of
from ring_torch.serving.tripwire import Sample, raise_faults

#: Queries that are attended with, and exchanged, at a time.
_PIECE = 16
_READ_IN_10_US = 38e6  # bytes of keys and values, measured on an H200


@overload
def decode(
    cp: SplitsSequences, q: Tensor, cache: KVCache, *, layer: int, requests: Sequence[int] | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[ServingOptions],
) -> Tensor: ...  # fmt: skip
@overload
def decode(
    cp: SplitsSequences, q: Tensor, cache: KVCache, *, layer: int, requests: Sequence[int] | None = ...,
    return_lse: Literal[True], **options: Unpack[ServingOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@untraced
@refuse_foreign_options
def decode(
    cp: SplitsSequences, q: Tensor, cache: KVCache, *, layer: int,
    requests: Sequence[int] | None = None, window: Window | None = None,
    chunk_size: int | None = None, softmax_scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, return_lse: bool = False,
    kernel: KernelName = "auto", transport: TransportName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute causal attention of the last tokens of some requests to all that precedes them.

    Each rank attends with all queries to the keys of its own pages; one exchange merges the
    results. There is no backward.

    Args:
        cp: The ``ContextParallel`` that the cache was made with.
        q: Queries of the last ``n`` tokens of each request, ``[B, n, H, D]``, equal on all ranks;
            the keys of these tokens have been written. Query ``i`` is at position ``length - n +
            i`` of its request.
        cache: The cache.
        layer: Number of the layer.
        requests: The requests, a row each; ``None`` for those of the last ``extend``, in its order.
            Rows behind these are padding, and see nothing.
        window: ``(left, right)``: a query sees the ``left`` keys before its own, of which there are
            none to the right; ``None`` leaves a side unbounded.
        chunk_size: Positions of a chunk: a query sees only keys of its own chunk.
        softmax_scale: Factor of the scores; ``None`` is ``D ** -0.5``.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``[H]`` or ``[H, n]``, logits that join each row's softmax and have no value.
        alibi_slopes: ``[H]`` or ``[B, H]``: ``-slope * abs(i - j)`` is added to the scores.
        return_lse: Return ``lse`` too.
        kernel: ``eager``, in torch's operations; ``triton``, Ring's own split-KV kernel on CUDA; or
            ``auto``, the latter where it can be.
        transport: ``auto`` or ``p2p``, collectives of ``torch.distributed``.

    Returns:
        ``out [B, n, H, Dv]`` in the dtype of ``q``, the same bits on all ranks; with ``return_lse``
        also ``lse [B, H, n]``, natural log, float32 (float64 for float64 inputs).

    Raises:
        ValueError: An argument is malformed or requires a gradient, or the layer was not written
            since the last ``extend``; nothing was sent.
        UnsupportedError: No kernel or transport can do this; nothing was sent.
        RankMismatchError: Ranks make different calls, or have made other changes of the cache.
        RuntimeError: A peer failed or did not answer within the group's timeout.

    Example::

        cache.extend(requests, 1)
        cache.write(k, v, layer=0)  # [B, 1, K, D]
        out = cp.decode(q, cache, layer=0)  # [B, 1, H, Dv]
    """
    options: ServingOptions = {
        "window": window, "chunk_size": chunk_size, "softmax_scale": softmax_scale,
        "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
        "kernel": kernel, "transport": transport,
    }  # fmt: skip
    call = checked_call("decode", cp, q, cache, layer, requests, options, return_lse)
    call.cache.check_rows("q", q, call.known, is_exact=requests is not None)
    call.cache.check_call(call.ranks, layer, call.known, q.shape[1])
    if explains():
        raise _explained(call, q)
    message = None
    with call.agreed(q.device):
        # If the tripwire checks this call, it is one request that it looks at.
        row = call.checked % len(call.known)
        end = call.cache.lengths[call.known[row]]
        sample = Sample(call, row, q[row], lambda _: np.arange(end - q.shape[1], end))
        keys, ends = call.cache.keys_of(layer, call.known, len(q), is_last=requests is None)
        with sample.watch() as watch:
            pieces = [_decoded(call, piece, keys, ends, first) for first, piece in _pieces(q)]
        out, lse = (
            torch.cat(x, dim=dim) if len(x) > 1 else x[0]
            for x, dim in zip(zip(*pieces, strict=True), (1, 2), strict=True)
        )
        out, lse = call.finished(out, lse, q.dtype)
        if watch is not None:
            message = sample.faults(out[row], lse[row], watch.sent, _sent(call, q)[0])
    raise_faults(message)
    return (out, lse.contiguous()) if return_lse else out


def _pieces(q: Tensor) -> list[tuple[int, Tensor]]:
    """Return queries in pieces, with the distance of each piece's first from the end."""
    pieces = q.split(_PIECE, dim=1)
    return [(q.shape[1] - n * _PIECE, piece) for n, piece in enumerate(pieces)]


def _decoded(
    call: ServingCall, q: Tensor, keys: PagedKeys, ends: Tensor, before_end: int
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of a piece of queries; its first is ``before_end`` from the end."""
    cache, n = call.cache, q.shape[1]
    # The host knows all lengths, but not those that a graph will be replayed with.
    columns = range(keys.table.shape[1])
    if not is_capturing():
        lengths = [cache.lengths[request] for request in call.known]
        start = min(call.rules.first_key(length - before_end) for length in lengths)
        columns = keys.columns(start, max(lengths) - before_end + n)
    positions = positions_of(ends, n, before_end)
    out, lse = attend_by(call.kernel)(q, positions, keys, columns, call.rules)
    return merge_over_ranks(call.ranks, out, lse)


def _sent(call: ServingCall, q: Tensor) -> tuple[int, bool]:
    """Return the bytes that a rank sends, and whether some pieces are merged by head."""
    itemsize = torch.promote_types(q.dtype, torch.float32).itemsize
    sizes = [
        bytes_of_merge(call.ranks.size, (*piece.shape[:3], call.cache.value_dim), itemsize)
        for _, piece in _pieces(q)
    ]
    return sum(size for size, _ in sizes), any(by_head for _, by_head in sizes)


def _explained(call: ServingCall, q: Tensor) -> Explained:
    """Return what a call would do."""
    sent, by_head = _sent(call, q)
    pieces, wide = len(_pieces(q)), torch.promote_types(q.dtype, torch.float32)
    row, ranks = call.cache.row_numbers * q.element_size(), call.ranks.size
    alone = "" if ranks == 1 else (
        f"\none GPU alone is faster below about {round(_READ_IN_10_US / row / (1 - 1 / ranks)):,} tokens for each "
        f"10 us that the exchange takes, at the 3.8 TB/s of an H200"
    )  # fmt: skip
    longest = max(call.cache.lengths[request] for request in call.known)
    return Explained(
        f"decode over {call.ranks.size} ranks: {len(call.known)} requests of up to {longest:,} tokens, "
        f"{q.shape[1]} new, {call.rules.mask.describe()}\n"
        f"kernel {call.kernel}{f' ({call.reason})' * bool(call.reason)}: each rank reads its own pages\n"
        f"exchange: {pieces} {'pieces' if pieces > 1 else 'piece'} of partial results in {wide}, "
        f"{'an all-to-all by head and an all-gather' if by_head else 'an all-gather'}; a rank sends "
        f"{sent:,} bytes{alone}", sent,
    )  # fmt: skip
