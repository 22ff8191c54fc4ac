"""Functions of ring_flash_attn for packed documents, each of which is split over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ring_core import Layout, LayoutName, StrategyConfig, UnsupportedError, divisor_of
from ring_core.movement import Movement, pack_documents
from ring_torch.call import Call
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
from ring_torch.movement.rows import MoveCall, move
from ring_torch.records import Inputs

#: Tokens a rank from which a document gets a call of its own. On two H200 (32 query heads, 8
#: key/value heads, head dim 128, forward and backward) its kernels then run for longer than the
#: 4 ms that a call takes the host, so equal work on each rank is worth more than fewer calls.
LONG = 4096


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
    *,
    strategy: str | StrategyConfig = "auto",
) -> Any:
    """Compute exact attention of packed documents; each rank holds a contiguous piece of each.

    A document with at least 4096 tokens on each rank gets a ring attention call of its own. All
    shorter ones, if several, share one call, between all-to-all exchanges: one that moves the rows
    of Q, K and V, and one that moves the result back, with ``return_attn_probs`` another for
    ``lse``. One rank runs one call for all documents.

    Args:
        q: ``[T_local, H, D]``, this rank's pieces of the documents, one after the other.
        k: ``[T_local, K, D]`` with ``H % K == 0``.
        v: ``[T_local, K, Dv]``.
        cu_seqlens: ``(0, ..., T_local)``, offsets of those pieces, the same on all ranks. Pass a
            CPU tensor or a list: from a GPU it is copied to the host, which has to wait.
        max_seqlen: Length of the longest piece, or more.
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
        ValueError: An argument is malformed; nothing was sent.
        UnsupportedError: No kernel can do this, or slopes differ by document; nothing was sent.
        RankMismatchError: Ranks make different calls.

    Example::

        cu_seqlens = [0, 512, 2048]  # two documents, of 512 and 1536 tokens on each rank
        out = ring_flash_attn_varlen_func(q, k, v, cu_seqlens, 1536, causal=True, group=group)
    """
    return attend_documents(
        "contiguous",
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
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
    *,
    strategy: str | StrategyConfig = "auto",
) -> Any:
    """Compute :func:`ring_flash_attn_varlen_func` for documents that are each in the zigzag layout.

    Each document is cut into ``2 * P`` chunks. Rank ``r`` of ``P`` holds chunks ``r`` and ``2 * P -
    1 - r``, one after the other, which gives all ranks equal work in causal attention.
    """
    return attend_documents(
        "zigzag",
        q,
        k,
        v,
        cu_seqlens,
        max_seqlen,
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


zigzag_ring_flash_attn_varlen_kvpacked_func = kvpacked(zigzag_ring_flash_attn_varlen_func, dim=1)
zigzag_ring_flash_attn_varlen_qkvpacked_func = qkvpacked(zigzag_ring_flash_attn_varlen_func, dim=1)


@dataclass(frozen=True)
class _SharedCall:
    """Documents that share a ring attention call, and that call.

    Attributes:
        spans: Start and stop of each document's piece among this rank's tokens.
        offsets: Offsets of the pieces after they were joined, ``(0, ..., T)``.
        call: The checked call.
        inputs: Its inputs.
    """

    spans: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    call: Call
    inputs: Inputs


@untraced
def attend_documents(
    layout: LayoutName,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int | Tensor,
    options: FlashAttnOptions,
    group: Group,
) -> Any:
    """Compute attention of shards ``[T_local, H, D]`` that hold a piece of every document.

    Each document is a sequence in the layout. Among several ranks a long one gets a call of its
    own, and short ones share one. Windows, slopes and dropout depend on positions within a
    document. Where a document goes on on the next rank, these positions jump by a step that depends
    on its length, so no single layout of all tokens describes them. Therefore the rows of Q, K and
    V are first moved to where the layout puts the tokens of the packed documents as one sequence,
    and the result is moved back.
    """
    ranks = ranks_of(group)
    check_shards(q, k, v)
    offsets = offsets_of("cu_seqlens", cu_seqlens, q.shape[0])
    lengths = np.diff(offsets)
    check_longest("max_seqlen", max_seqlen, int(lengths.max(initial=0)))
    check_slopes(options.alibi_slopes, int(np.count_nonzero(lengths)))
    odd = np.flatnonzero(lengths % (divisor_of(layout, 2) // 2))
    if odd.size:
        raise ValueError(
            f"document {odd[0]} of cu_seqlens has {lengths[odd[0]]} tokens a rank; they must be "
            f"even, for each rank holds two chunks of a document: pad documents to multiples of "
            f"{2 * ranks.size} tokens"
        )
    # Check all calls before any of them sends.
    shared_calls = [
        _shared_call(ranks, layout, q, k, v, options, spans)
        for spans in _spans_by_call(ranks, offsets)
    ]
    results: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    # Run the calls one after the other, and cut each result into the pieces of its documents ...
    for shared_call in shared_calls:
        out, lse = _attend_documents(ranks, layout, shared_call, options)
        sizes = [stop - start for start, stop in shared_call.spans]
        outputs = zip(out.split(sizes), lse.split(sizes, dim=1), strict=True)
        results |= dict(zip(shared_call.spans, outputs, strict=True))
    # ... which are joined in the order of this rank's tokens.
    outs, lses = zip(*(results[span] for span in sorted(results)), strict=True)
    return as_requested(torch.cat(outs), torch.cat(lses, dim=1), options)


def _spans_by_call(ranks: Ranks, offsets: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Return the documents of each call: long ones alone, all short ones together, if any.

    On one rank all are together. Empty documents are left out.
    """
    spans = [(start, stop) for start, stop in pairwise(offsets) if stop > start]
    if ranks.size == 1 or len(spans) < 2:
        return [tuple(spans) or ((0, 0),)]
    # A call costs the host the same whatever it computes, so short documents share one.
    short = tuple(span for span in spans if span[1] - span[0] < LONG)
    return [(span,) for span in spans if span not in short] + ([short] if short else [])


def _shared_call(
    ranks: Ranks,
    layout: LayoutName,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: FlashAttnOptions,
    spans: tuple[tuple[int, int], ...],
) -> _SharedCall:
    """Check the call of some documents, and return it with their pieces joined.

    Several documents become one sequence with ``cu_seqlens``.
    """
    offsets = (0, *accumulate(stop - start for start, stop in spans))
    documents = None
    if len(spans) == 1:
        q, k, v = (x[slice(*spans[0])] for x in (q, k, v))
    else:
        q, k, v = (torch.cat([x[slice(*span)] for span in spans]) for x in (q, k, v))
        # Offsets of the whole sequence: every rank holds an equal piece of each document.
        documents = tuple(ranks.size * offset for offset in offsets)
    call, inputs = checked(ranks, layout, q[None], k[None], v[None], options, documents)
    return _SharedCall(spans, offsets, call, inputs)


def _attend_documents(
    ranks: Ranks, layout: LayoutName, shared_call: _SharedCall, options: FlashAttnOptions
) -> tuple[Tensor, Tensor]:
    """Run the call of some documents, and return their ``out [T, H, Dv]`` and ``lse [H, T]``."""
    call, inputs = shared_call.call, shared_call.inputs
    if (
        ranks.size == 1 or len(shared_call.spans) == 1
    ):  # no exchange: the rows are in layout order already
        out, lse = run_call(call, inputs)
        return out[0], lse[0]
    # Move the rows of Q, K and V, side by side in one tensor, to the ranks where the layout of the
    # packed documents has them.
    pack = PackMove(layout, shared_call.offsets)
    qkv = (inputs.q, inputs.k, inputs.v)
    widths = [x.shape[2] * x.shape[3] for x in qkv]
    rows = pack.run(ranks, torch.cat([x[0].flatten(1) for x in qkv], dim=1))
    moved = zip(rows.split(widths, dim=1), qkv, strict=True)
    q, k, v = (rows.view(x.shape) for rows, x in moved)
    out, lse = run_call(call, inputs._replace(q=q, k=k, v=v))
    # Move the rows of the result back to the ranks that hold their documents' pieces.
    return (
        pack.run(ranks, out[0], back=True),
        pack.run(ranks, lse[0].t(), back=True).t() if options.return_attn_probs else lse[0],
    )


def offsets_of(
    name: str, cu_seqlens: Tensor | Sequence[int], tokens: int | None = None
) -> tuple[int, ...]:
    """Return the offsets of documents as a tuple of ints on the host, after checking them.

    Args:
        name: Name of the argument, for messages.
        cu_seqlens: ``(0, ..., tokens)``, ascending; a document may be empty.
        tokens: Number at which they must end; ``None`` for any.

    Raises:
        ValueError: They are not ascending integers from 0 to the number of tokens.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
            raise ValueError(
                f"{name} must be integers [documents + 1], got {cu_seqlens.dtype} "
                f"{list(cu_seqlens.shape)}"
            )
        cu_seqlens = cu_seqlens.tolist()
    offsets = tuple(cu_seqlens)
    if not all(isinstance(offset, int | np.integer) for offset in offsets):
        raise ValueError(f"{name} must be integers, got {_offsets_text(offsets)}")
    if len(offsets) < 2 or offsets[0] != 0:
        raise ValueError(
            f"{name} must be (0, ..., T), with the end of each document, got {_offsets_text(offsets)}"
        )
    if tokens is not None and offsets[-1] != tokens:
        raise ValueError(
            f"{name} must end at the {tokens} tokens of this rank, got {_offsets_text(offsets)}; "
            f"tokens that belong to no document can be one of their own"
        )
    if any(stop < start for start, stop in pairwise(offsets)):
        raise ValueError(f"{name} must be ascending, got {_offsets_text(offsets)}")
    return offsets


def check_shards(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that Q, K and V are tensors of packed tokens, ``[T_local, heads, D]``.

    Raises:
        ValueError: One is not.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            actual = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor [T_local, heads, D], got {actual}")


def check_longest(name: str, stated: int | Tensor, longest: int) -> None:
    """Check a stated maximum of the documents' lengths, which may be larger than the longest.

    Raises:
        ValueError: A document is longer.
    """
    if int(stated) < longest:
        raise ValueError(f"{name} is {int(stated)}, but the longest document has {longest} tokens")


def check_slopes(slopes: Tensor | None, documents: int) -> None:
    """Refuse ALiBi slopes that differ by document.

    Raises:
        UnsupportedError: There is a row of slopes for each of several documents.
    """
    if slopes is not None and slopes.ndim == 2 and (slopes.shape[0] != 1 or documents > 1):
        raise UnsupportedError(
            f"alibi_slopes {list(slopes.shape)}: packed documents share one row of slopes, [H]; "
            f"documents with slopes of their own need a call each"
        )


@dataclass(frozen=True)
class PackMove:
    """Movement of rows from split documents to the layout of their pack.

    Attributes:
        layout: Layout of each document, and of the pack.
        offsets: Offsets of the documents' pieces among a rank's tokens.
    """

    name: ClassVar[str] = "pack of documents"
    fill: ClassVar[float] = 0
    layout: LayoutName
    offsets: tuple[int, ...]

    def movement(self, tokens: int, size: int) -> Movement:
        """Return the plan for a pack of ``tokens``."""
        return pack_documents(Layout(self.layout, tokens, size), self.offsets)

    def run(self, ranks: Ranks, x: Tensor, *, back: bool = False) -> Tensor:
        """Return this rank's rows after the movement of ``x [T_local, ...]``, or its return."""
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        call = MoveCall(ranks, self, 0, needs_grad, ranks.next_call(), int(back))
        return move(x, call, ranks.size * self.offsets[-1])


def _offsets_text(offsets: tuple[int, ...]) -> str:
    """Return offsets as text for messages, shortened if there are many."""
    return str(offsets) if len(offsets) < 9 else f"({offsets[0]}, ..., {offsets[-1]})"
