"""Attention of a prompt, or a part of it, that is sharded over ranks, to a cache and to itself.

New keys go to the ranks of their pages first; then all that the queries see is in pages, and a rank
attends to pages alone, its own and those of others. Either pages go round the ring, past the
queries of each rank; or every rank gets all queries, attends to its own pages, and sends the
results to the ranks of the queries. Bytes decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, Unpack, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Layout
from ring_core.base.arguments import Ints, refuse_foreign_options
from ring_torch.accumulate import merge_in_torch, unseen_state
from ring_torch.capture import untraced
from ring_torch.comm.ranks import DONE, run_collective
from ring_torch.options import Window
from ring_torch.positions import on_device
from ring_torch.records import AttentionState
from ring_torch.recurrent.arguments import Explained, SplitsSequences, explains
from ring_torch.serving import flash_pages
from ring_torch.serving.arguments import (
    KernelName,
    ServingCall,
    ServingOptions,
    TransportName,
    checked_call,
)
from ring_torch.serving.cache import KVCache
from ring_torch.serving.kernels import attend_by
from ring_torch.serving.merging import combine, pack
from ring_torch.serving.paged import PagedKeys
from ring_torch.serving.tripwire import Sample, raise_faults

#: Queries that are attended with at a time; of flash-attn-4, for which keys around them are left.
_ROWS, _ROWS_OF_FLASH = 256, 1024


@overload
def prefill(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor | None, cache: KVCache, *, layer: int,
    request: int, return_lse: Literal[False] = ..., **options: Unpack[ServingOptions],
) -> Tensor: ...  # fmt: skip
@overload
def prefill(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor | None, cache: KVCache, *, layer: int,
    request: int, return_lse: Literal[True], **options: Unpack[ServingOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@untraced
@refuse_foreign_options
def prefill(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor | None, cache: KVCache, *, layer: int,
    request: int, window: Window | None = None, chunk_size: int | None = None,
    softmax_scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, return_lse: bool = False, kernel: KernelName = "auto",
    transport: TransportName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Write a layer's keys and values of new tokens, and attend to the cache and to themselves.

    It follows ``cache.extend([request], n)``, for each layer. The ``n`` new tokens are sharded in
    the layout of ``cp``, with padding as ``cp.shard(x, pad=True)`` adds it, which is not written;
    there may be fewer tokens than ranks. There is no backward.

    Args:
        cp: The ``ContextParallel`` that the cache was made with.
        q: This rank's queries ``[1, T_local, H, D]``.
        k: Its keys ``[1, T_local, K, D]``.
        v: Its values ``[1, T_local, K, Dv]``; ``None`` as of :meth:`KVCache.write`.
        cache: The cache.
        layer: Number of the layer.
        request: The request.
        window: As all options, of :meth:`ContextParallel.decode`.
        chunk_size: Positions of a chunk, counted from the request's first.
        softmax_scale: Factor of the scores.
        softcap: Soft cap of the scores.
        sinks: Logits that join each row's softmax.
        alibi_slopes: Slopes of a bias by distance.
        return_lse: Return ``lse`` too.
        kernel: As of :func:`decode`; or ``fa4``, flash-attn-4 over the pages, on Hopper. ``auto``
            takes that for many queries, without ALiBi, chunks and a soft cap.
        transport: ``auto`` or ``p2p``.

    Returns:
        ``out [1, T_local, H, Dv]``, in the dtype of ``q``, 0 in padding; with ``return_lse`` also
        ``lse [1, H, T_local]``, ``-inf`` in padding without sinks.

    Raises:
        ValueError: An argument is malformed or requires a gradient, or nothing is reserved; nothing
            was sent.
        UnsupportedError: No kernel or transport can do this; nothing was sent.
        RankMismatchError: Ranks make different calls, or have made other changes of the cache.
        RuntimeError: A peer failed or did not answer within the group's timeout.

    Example::

        (request,) = cache.add()
        cache.extend([request], n)
        q, k, v = (cp.shard(x, pad=True) for x in (q, k, v))  # [1, n, ...] to [1, T_local, ...]
        out = cp.prefill(q, k, v, cache, layer=0, request=request)
    """
    options: ServingOptions = {
        "window": window, "chunk_size": chunk_size, "softmax_scale": softmax_scale,
        "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes,
        "kernel": kernel, "transport": transport,
    }  # fmt: skip
    return prefill_padded(cp, q, k, v, cache, layer, request, options, return_lse=return_lse)


def prefill_padded(
    cp: SplitsSequences, q: Tensor, k: Tensor, v: Tensor | None, cache: KVCache, layer: int,
    request: int, options: ServingOptions, *, return_lse: bool = False, skipped: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run :func:`prefill` on rows of which the first ``skipped`` are padding, as in a batch."""
    call = checked_call("prefill", cp, q, cache, layer, (request,), options, return_lse)
    part = _Part.of(call, q, skipped)
    call.cache.check_call(call.ranks, layer, (), 0)
    call.cache.check_new(k, v, part.layout.local_len)
    if explains():
        raise _explained(part)
    message = None
    with call.agreed(q.device):
        # The tokens go to the ranks of their pages, and then are keys like all others.
        n = part.layout.seq_len - skipped
        call.cache.write_shards(k, v, layer, request, n, call.sharding.layout, skipped)
        call.cache.note_written(layer, (request,))
        sample = Sample(call, 0, q[0], part.positions)
        with sample.watch() as watch:
            out, lse = part.by_queries() if part.queries_travel else part.by_keys()
        out, lse = call.finished(out, lse, q.dtype)
        if watch is not None:
            message = sample.faults(out[0], lse[0], watch.sent, part.sent)
    raise_faults(message)
    return (out, lse) if return_lse else out


class _Part(NamedTuple):
    """The part of one rank in a call, and what travels.

    Attributes:
        call: The call.
        q: This rank's queries ``[1, T_local, H, D]``.
        layout: Layout of the new tokens, and of padding before them.
        start: Position of the first new token.
        skipped: Number of rows of padding before it.
    """

    call: ServingCall
    q: Tensor
    layout: Layout
    start: int
    skipped: int

    @classmethod
    def of(cls, call: ServingCall, q: Tensor, skipped: int) -> _Part:
        """Make the part of a rank.

        Raises:
            ValueError: ``q`` is no rank's part of the reserved tokens.
        """
        (request,) = call.known
        n = call.cache.reserved([request])
        layout = Layout.padded(call.sharding.layout, n + skipped, call.ranks.size)
        if len(q) != 1 or q.shape[1] != layout.local_len:
            raise ValueError(
                f"q must be [1, {layout.local_len}, H, D], this rank's part of the {n} reserved tokens in "
                f"layout {call.sharding.layout!s}, as cp.shard(x, pad=True) returns it; got {list(q.shape)}"
            )
        return cls(call, q, layout, call.cache.lengths[request] - n, skipped)

    @property
    def first_key(self) -> int:
        """First position that any of the queries sees."""
        return self.call.rules.first_key(self.start)

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.layout.seq_len - self.skipped

    @property
    def width(self) -> int:
        """Most pages that a rank has of those that the queries see."""
        ranks, page_size = self.call.ranks.size, self.call.cache.page_size
        pages = -(-self.stop // page_size) - self.first_key // page_size
        return -(-pages // ranks)

    @property
    def bytes_of_keys(self) -> int:
        """Bytes that a rank sends if pages travel."""
        cache = self.call.cache
        row = cache.row_numbers * self.q.element_size()
        return (self.call.ranks.size - 1) * self.width * cache.page_size * row

    @property
    def bytes_of_queries(self) -> int:
        """Bytes that a rank sends if queries travel, and results return."""
        _, tokens, heads, dim = self.q.shape
        result = (self.call.cache.value_dim + 1) * self._wide.itemsize
        return (self.call.ranks.size - 1) * tokens * heads * (dim * self.q.element_size() + result)

    @property
    def queries_travel(self) -> bool:
        """True if queries travel, as they and their results are fewer bytes than pages."""
        return self.bytes_of_queries <= self.bytes_of_keys

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, but for those of writing."""
        return self.bytes_of_queries if self.queries_travel else self.bytes_of_keys

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.q.dtype, torch.float32)

    def positions(self, rank: int) -> Ints:
        """Return the positions of a rank's queries, -1 for padding."""
        rows = self.layout.positions(rank)
        is_token = (rows >= self.skipped) & (rows < self.layout.seq_len)
        return np.where(is_token, rows - self.skipped + self.start, -1)

    def by_keys(self) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of this rank's queries, past which all pages travel."""
        call, ranks = self.call, self.call.ranks
        out, lse = unseen_state(self.q, call.cache.value_dim, self._wide)
        positions = self.positions(ranks.rank)
        held = call.cache.pages_of(call.layer, call.known[0], self.first_key, self.stop, self.width)
        spare = torch.empty_like(held) if ranks.size > 1 else held
        for step in range(ranks.size):
            # Send the pages we hold to the next rank, and receive the previous rank's into the
            # spare buffer ...
            is_last = step == ranks.size - 1
            transfer = DONE if is_last else ranks.rotate(_flat(held), _flat(spare), 1, beside=True)
            # ... while attention reads the pages that are being sent; both only read them.
            owner = (ranks.rank - step) % ranks.size
            keys = call.cache.as_keys(held, owner, self.first_key)
            hidden = keys.table.shape[1] - self.width  # columns before the first page held
            numbers = [*[0] * hidden, *range(self.width)]
            state = AttentionState(out, lse)
            self._attend_to(keys, numbers, self.q, positions, state, is_first=step == 0)
            # The received pages become the current ones. What was sent may be overwritten now.
            transfer.wait()
            held, spare = spare, held
        return out, lse

    def by_queries(self) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of this rank's queries, which travel to all pages."""
        call, ranks, cache = self.call, self.call.ranks, self.call.cache
        q = self.q
        if ranks.size > 1:
            gathered = q.new_empty(ranks.size * q.shape[1], *q.shape[2:])
            run_collective(
                ranks,
                lambda: dist.all_gather_into_tensor(
                    _flat(gathered), _flat(self.q.contiguous()), group=ranks.group, async_op=True
                ),
            )
            q = gathered[None]
        positions = np.concatenate([self.positions(rank) for rank in range(ranks.size)])
        keys, _ = cache.keys_of(call.layer, call.known, 1, is_last=False)
        numbers = cache.page_numbers(call.known[0])
        if ranks.size == 1 and call.kernel == "fa4" and not self.skipped:
            ((out, lse),) = self._parts(keys, numbers, q, positions, by_flash=True)
            return out, lse
        # All queries see this rank's pages, where they are.
        out, lse = unseen_state(q, cache.value_dim, self._wide)
        self._attend_to(keys, numbers, q, positions, AttentionState(out, lse), is_first=True)
        if ranks.size == 1:
            return out, lse
        # Each rank gets the results of its queries over all pages, and merges them.
        sent = pack(out, lse).view(ranks.size, -1, *out.shape[2:-1], out.shape[-1] + 1)
        received = torch.empty_like(sent)
        ranks.trade(sent, received).wait()
        merged = combine(received)[None]
        return merged[..., :-1], merged[..., -1].transpose(1, 2).contiguous()

    def _attend_to(
        self, keys: PagedKeys, numbers: Sequence[int], q: Tensor, positions: Ints,
        state: AttentionState, *, is_first: bool,
    ) -> None:  # fmt: skip
        """Merge attention over some pages into results, some queries at a time.

        ``numbers`` are those of the pages, by column. With ``is_first`` no row has seen anything.
        """
        by_flash = self.call.kernel == "fa4"
        most = _ROWS if not by_flash else _ROWS_OF_FLASH if keys.ranks > 1 else len(positions)
        for rows in _runs(positions, keys.ranks, most):
            parts = self._parts(keys, numbers, q[:, rows], positions[rows], by_flash=by_flash)
            into = state.take(rows)
            for number, part in enumerate(parts):
                if is_first and number == 0:
                    into.out.copy_(part[0])
                    into.lse.copy_(part[1])
                else:
                    merge_in_torch(into, *part)

    def _parts(
        self, keys: PagedKeys, numbers: Sequence[int], q: Tensor, positions: Ints, *, by_flash: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(out, lse)`` of queries at ascending positions, over what they see of pages."""
        rules, page_size = self.call.rules, self.call.cache.page_size
        start, stop = int(positions[0]), int(positions[-1]) + 1
        columns, before = keys.columns(rules.first_key(start), stop), 0
        if by_flash and keys.ranks == 1:
            # All keys are here, so that the last of them is the last query's.
            first = columns.start * page_size
            yield flash_pages.attend(
                q, keys, columns, numbers[columns.start : columns.stop], stop - first, rules,
                is_band=True,
            )  # fmt: skip
            return
        if by_flash and rules.mask.band[0] is None:
            # Turns of pages, one of each rank, that end before the first query.
            before = start // (page_size * keys.ranks)
            if before:
                yield flash_pages.attend(
                    q, keys, range(before), numbers[:before], before * page_size, rules,
                    is_band=False,
                )  # fmt: skip
            # In the others positions count from there: the rules go by distances alone.
            keys = keys._replace(table=keys.table[:, before:])
            columns = range(columns.stop - before)
        if columns:
            at = on_device(positions[None] - before * page_size * keys.ranks, q.device)
            yield attend_by(self.call.kernel)(q, at, keys, columns, rules)


def _runs(positions: Ints, ranks: int, most: int) -> Iterator[slice]:
    """Yield slices of rows that are no padding, at most so many, whose positions ascend closely.

    In a striped layout each is ``ranks`` behind the last.
    """
    steps, is_token = np.diff(positions), positions >= 0
    cuts = np.flatnonzero((steps < 1) | (steps > ranks) | np.diff(is_token)) + 1
    for start, stop in pairwise((0, *cuts.tolist(), len(positions))):
        for first in range(start, stop if is_token[start] else start, most):
            yield slice(first, min(first + most, stop))


def _flat(x: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes: gloo knows few dtypes."""
    return x.view(-1).view(torch.uint8)


def _explained(part: _Part) -> Explained:
    """Return what a call would do."""
    keys, queries = part.bytes_of_keys, part.bytes_of_queries
    travels = "queries travel, and results return" if part.queries_travel else "keys travel"
    return Explained(
        f"prefill over {part.call.ranks.size} ranks, {part.call.sharding.layout!s}: "
        f"{part.stop - part.start:,} "
        f"new tokens behind {part.start:,}, {part.call.rules.mask.describe()}\n"
        f"kernel {part.call.kernel}{f' ({part.call.reason})' * bool(part.call.reason)}\n{travels}: a "
        f"rank sends {queries:,} bytes of queries and results, or {keys:,} of keys", part.sent,
    )  # fmt: skip
