"""Exchanges of ``symm_mem`` by one kernel: of short passes' K/V and dK/dV, and tokens for heads.

Copies that hide behind kernels need streams, events and a comparison of calls beside them: more of
the host's time than short kernels take. Here each direction is one kernel on the caller's stream,
which writes, waits for the other ranks and reads (:mod:`ring_torch.transports.exchange_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from ring_core import GatherProgram
from ring_core.programs.gather import Fetch
from ring_torch.buffers import (
    HeadBuffer,
    HeadCarrier,
    KeyGradBuffer,
    KVPayload,
    Orders,
    are_rows,
    flat,
)
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks
from ring_torch.launches.cache import tensors_key
from ring_torch.records import Inputs
from ring_torch.transports import exchange_kernel, head_kernel
from ring_torch.transports.api import (
    IndexMap,
    PendingGrads,
    PendingKV,
    SessionSpec,
    is_counted,
    note_reads,
    nothing,
    program_of,
    requests_to,
    sent_spans,
)
from ring_torch.transports.exchange_kernel import Blocks, KeyExchange
from ring_torch.transports.exchange_state import ExchangeState, exchange_state_of
from ring_torch.transports.peer_copies import comes_in_parts, copy


@dataclass(frozen=True)
class OneKernel:
    """A :class:`ring_torch.transports.api.GatherSession` for short passes of one group of heads.

    A rank's memory holds its K/V, and behind them its dK/dV of the keys that it fetched. A pass is
    one exchange for K/V and, in a backward, one for dK/dV. Ranks whose digests differ end in a
    device assert: the host has gone on.
    """

    spec: SessionSpec
    state: ExchangeState
    setup: exchange_kernel.ExchangeSetup
    digest: int  # identifies this pass of this call

    @classmethod
    def of(cls, spec: SessionSpec, grad_bytes: int, digest: int) -> OneKernel:
        """Open a session whose memory also holds ``grad_bytes`` bytes of dK/dV sums."""
        state = exchange_state_of(spec.ranks)
        return cls(spec, state, state.reserve(spec.keys.message.size + grad_bytes), digest)

    def fetch(
        self, gather: GatherProgram, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Write own K/V where peers read them, and fetch all K/V that this rank's queries see."""
        # On the same stream, and so ahead of the exchange: a late peer is waited for behind it.
        meanwhile()
        spec, keys, (k, v) = self.spec, self.spec.keys, inputs[1:3]
        shape = keys.batch, gather.length, keys.width
        target = torch.empty(shape, dtype=keys.dtype, device=spec.device)
        from_peers = self._from_peers(gather)
        aligned = (k.data_ptr() | v.data_ptr()) % 16 == 0
        key = (gather, keys, k.stride(), v.stride()) if aligned else None
        # Attention is queued behind the kernel on the same stream, so it has nothing to wait for.
        pending = PendingKV([target], lambda _fetches: None)
        # The kernel waits until peers have read what lies in `own` from the pass before, writes,
        # waits until all ranks have written, and reads. The host waits for nothing.
        if key is not None and (exchange := self.state.prepared(key)) is not None:
            exchange(self.digest, k, v, target)
        else:
            own_k, own_v = (x if are_rows(x) else x.contiguous() for x in (k, v))
            own = self._keys_of(self.setup.rank)
            columns = self.state.table((gather, keys, "own"), 1, lambda: self._own_columns(gather))
            run = partial(
                exchange_kernel.exchange_keys, self.setup, self.digest, own_k, own_v, own, columns,
                target,
            )  # fmt: skip
            num_tokens = sum(fetch.target.stop - fetch.target.start for fetch in from_peers)
            if spec.by_parts and comes_in_parts(keys, num_tokens):
                exchange, pending = self._fetch_columns(gather, run, target)
            else:
                exchange = run(self.state.table((gather, keys), 3, lambda: self._pieces(gather)))
            if key is not None and own_k is k and own_v is v:
                self.state.keep(key, exchange)
        if is_counted():
            note_reads(target[:, fetch.target] for fetch in from_peers)
        yield pending

    def _fetch_columns(
        self, gather: GatherProgram, run: Callable[..., KeyExchange | None], target: torch.Tensor
    ) -> tuple[KeyExchange | None, PendingKV]:
        """Fetch K/V; in a CUDA graph half of the heads beside the kernels of the others.

        Copy engines fetch that half, which take no multiprocessor. Each launch has a stream, so
        kernels of the second half fill the multiprocessors that those of the first leave. Returns
        the exchange, if later calls can repeat it, and what is in flight.
        """
        halves, blocks = _columns_of_halves(self.spec.keys), _block_of(self.spec.keys)
        # Outside of graphs both tables are made and all kernels loaded: inside neither is possible.
        of_half, of_all = (
            self.state.table(
                (gather, self.spec.keys, n), 4, partial(self._blocks, gather, blocks, halves[:n])
            )
            for n in (1, 2)
        )
        if not is_capturing():
            exchange = run(of_all, blocks)
            exchange_kernel.finish_reading(self.setup)
            return exchange, PendingKV([target], lambda _fetches: None)
        run(of_half, blocks)
        # Peers have signalled: copies may read. Nobody overwrites what they read before this rank
        # says that it has finished, which is queued behind them.
        main, num_items = torch.cuda.current_stream(), len(gather.items)
        side, *streams = self.state.side_streams(2 * num_items - 1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for fetch in self._from_peers(gather):
                for n, source in enumerate(self._keys_of(fetch.rank)[:, fetch.source]):
                    for columns in halves[1]:
                        copy(target[n, fetch.target, columns], source[:, columns])
            exchange_kernel.finish_reading(self.setup)
        # Launches of a part run beside each other, behind the exchange or behind the copies.
        firsts, seconds = [main, *streams[: num_items - 1]], [side, *streams[num_items - 1 :]]
        for arrived, *others in (firsts, seconds):
            for stream in others:
                stream.wait_stream(arrived)

        def wait(_fetches: int | None) -> None:
            """Let the caller's stream wait for the copies, and for what was launched beside it."""
            for stream in (side, *streams):
                main.wait_stream(stream)

        parts = [[partial(torch.cuda.stream, x) for x in part] for part in (firsts, seconds)]
        return None, PendingKV([target], wait, parts)

    def accumulators(
        self, gather: GatherProgram, sums: KeyGradBuffer, *, zero: bool
    ) -> list[torch.Tensor]:
        """Return the buffer of dK/dV, where the owners of the keys will read them.

        It is filled with zeros if ``zero``, and uninitialised otherwise.
        """
        if gather.length == 0:  # nobody reads any
            grad_sums = torch.empty(0, dtype=self.spec.acc_dtype, device=self.spec.device)
        else:
            grad_sums = self._grads_of(self.spec.ranks.rank, sums, gather.length)
        # The kernel waits until peers have read what the exchange before left for them.
        key = gather, sums, zero
        if gather.length > 0 and (launch := self.state.prepared(key)) is not None:
            launch({})
        else:
            launch = exchange_kernel.wait_reusable(self.setup, grad_sums, zero=zero)
            if gather.length > 0:
                self.state.keep(key, launch)
        return [grad_sums]

    def return_grads(
        self, gather: GatherProgram, sums: KeyGradBuffer, grads: torch.Tensor, group: int, *, overlapped: bool,
        before_last_item: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """Return what makes the exchange of dK/dV: all of them go home in one kernel at the end.

        So nothing is sent early.
        """
        del grads, group, overlapped
        if before_last_item:
            return lambda _total, _length, _index_map: None
        return lambda *total: self._add(gather, sums, *total)

    def _add(
        self,
        gather: GatherProgram,
        sums: KeyGradBuffer,
        total: torch.Tensor,
        length: int,
        index_map: IndexMap,
    ) -> None:
        """Exchange dK/dV: let peers read this rank's, and add theirs for own keys to ``total``."""
        spans = sent_spans(self.spec.plan, self.spec.ranks.rank, like=gather)
        starts = tuple([index_map(span).start for span in spans])
        key = gather, sums, length, starts
        if (exchange := self.state.prepared(key)) is not None and total.data_ptr() % 16 == 0:
            exchange(self.digest, total)
            return
        num_peers = max(self.spec.ranks.size - 1, 1)
        table = self.state.table(
            key, 2 + num_peers,
            lambda: self._sums_of_peers(gather, sums, length, zip(spans, starts, strict=True), num_peers),
        )  # fmt: skip
        exchange = exchange_kernel.reduce_from_peers(self.setup, self.digest, table, total)
        if total.data_ptr() % 16 == 0:
            self.state.keep(key, exchange)
        if is_counted():
            for _, fetch in requests_to(self.spec.plan, self.spec.ranks.rank, like=gather):
                note_reads(sums.strided_views(total, length, index_map(fetch.source)))

    def _own_columns(self, gather: GatherProgram) -> Sequence[Sequence[int]]:
        """Return the column of the gathered buffer to which each own token goes, or -1 for none."""
        columns = [-1] * self.spec.keys.length
        for fetch in gather.fetches:
            if fetch.rank == self.setup.rank:
                columns[fetch.source] = range(fetch.target.start, fetch.target.stop)
        return [(column,) for column in columns]

    def _pieces(self, gather: GatherProgram) -> Sequence[Sequence[int]]:
        """Return the rows of the table by which :func:`exchange_keys` fetches peers' K/V."""
        token = self.spec.keys.width * self.spec.keys.dtype.itemsize
        rows: dict[int, list[Sequence[int]]] = {}
        # A row of a peer's batch is contiguous there and here. It is cut into chunks, which the
        # programs of the kernel take in turns.
        for fetch in self._from_peers(gather):
            for n, keys_of_rank in enumerate(self._keys_of(fetch.rank)[:, fetch.source]):
                size, offset = (
                    keys_of_rank.shape[0] * token,
                    (n * gather.length + fetch.target.start) * token,
                )
                rows.setdefault(fetch.rank, []).extend(
                    (
                        keys_of_rank.data_ptr() + start,
                        offset + start,
                        min(exchange_kernel.CHUNK, size - start),
                    )
                    for start in range(0, size, exchange_kernel.CHUNK)
                )
        return exchange_kernel.interleaved(list(rows.values()))

    def _blocks(
        self, gather: GatherProgram, shape: Blocks, halves: Sequence[Sequence[slice]]
    ) -> Sequence[Sequence[int]]:  # fmt: skip
        """Return the rows of the table by which :func:`exchange_keys` fetches columns of K/V."""
        itemsize = self.spec.keys.dtype.itemsize
        token = self.spec.keys.width * itemsize
        rows: dict[int, list[Sequence[int]]] = {}
        for fetch in self._from_peers(gather):
            for n, keys_of_rank in enumerate(self._keys_of(fetch.rank)[:, fetch.source]):
                tokens, offset = len(keys_of_rank), (n * gather.length + fetch.target.start) * token
                rows.setdefault(fetch.rank, []).extend(
                    (
                        keys_of_rank.data_ptr() + start * token + columns.start * itemsize,
                        offset + start * token + columns.start * itemsize,
                        min(shape.tokens, tokens - start),
                        (columns.stop - columns.start) * itemsize,
                    )
                    for start in range(0, tokens, shape.tokens)
                    for half in halves
                    for columns in half
                )
        return exchange_kernel.interleaved(list(rows.values()))

    def _sums_of_peers(
        self, gather: GatherProgram, sums: KeyGradBuffer, length: int,
        spans: Iterable[tuple[slice, int]], width: int,
    ) -> Sequence[Sequence[int]]:  # fmt: skip
        """Return the rows of the table of :func:`reduce_from_peers`, with ``width`` addresses each.

        Each span of own keys is cut into runs that are contiguous in ``total`` and on all peers.
        """
        like = torch.empty(sums.numel(length), dtype=self.spec.acc_dtype, device="meta")
        requests = requests_to(self.spec.plan, self.spec.ranks.rank, like=gather)
        rows: list[list[Sequence[int]]] = []
        # Each number of `total` is in one row of the table: one program adds all peers' sums to it,
        # in the order of the requests, so sums are repeatable.
        for span, start in spans:
            tokens = span.stop - span.start
            peer_sums = []
            for peer, fetch in requests:
                if fetch.source.start <= span.start and span.stop <= fetch.source.stop:
                    peer_length = program_of(self.spec.plan, peer, like=gather).length
                    first_column = fetch.target.start + span.start - fetch.source.start
                    flat = self._grads_of(peer, sums, peer_length)
                    peer_sums.append(
                        sums.strided_views(
                            flat, peer_length, slice(first_column, first_column + tokens)
                        )
                    )
            own_sums = sums.strided_views(like, length, slice(start, start + tokens))
            absent = [0] * (width - len(peer_sums))
            rows.append([
                (
                    row.storage_offset() + offset, min(exchange_kernel.NUMBERS, row.numel() - offset),
                    *(x.data_ptr() + offset * x.itemsize for x in peers), *absent,
                )
                for total_rows, *parts in zip(own_sums, *peer_sums, strict=True)
                for row, *peers in zip(total_rows, *parts, strict=True)
                for offset in range(0, row.numel(), exchange_kernel.NUMBERS)
            ])  # fmt: skip
        return exchange_kernel.interleaved(rows)

    def _from_peers(self, gather: GatherProgram) -> list[Fetch]:
        """Return the fetches of a program that read peers' memory."""
        return [fetch for fetch in gather.fetches if fetch.rank != self.setup.rank]

    def _keys_of(self, rank: int) -> torch.Tensor:
        """Return where a rank's own K/V lie for its peers."""
        return self.state.memory.views(rank, 0, self.spec.keys.message)[0]

    def _grads_of(self, rank: int, sums: KeyGradBuffer, length: int) -> torch.Tensor:
        """Return where a rank's dK/dV of ``length`` fetched keys lie for the keys' owners."""
        packing = flat(sums.numel(length), self.spec.acc_dtype)
        return self.state.memory.views(rank, self.spec.keys.message.size, packing)[0]


def _columns_of_halves(keys: KVPayload) -> list[tuple[slice, slice]]:
    """Return the columns of K and of V, in K/V side by side, of each half of the heads."""
    k, v = keys.heads // 2 * keys.dim, keys.heads // 2 * keys.v_dim
    return [
        (slice(n * k, (n + 1) * k), slice(2 * k + n * v, 2 * k + (n + 1) * v)) for n in range(2)
    ]


def _block_of(keys: KVPayload) -> Blocks:
    """Return the shape of the blocks in which half of the heads of some tokens is fetched."""
    words = keys.heads // 2 * max(keys.dim, keys.v_dim) * keys.dtype.itemsize // 8
    columns = 1 << (words - 1).bit_length()
    tokens = max(1, exchange_kernel.CHUNK // (8 * columns))
    return Blocks(tokens, columns, keys.width * keys.dtype.itemsize // 8)


@dataclass(frozen=True)
class HeadTrade(HeadCarrier):
    """A carrier whose kernel writes messages into this rank's memory and reads those of peers.

    It waits until peers have read what the exchange before left there, writes, waits until all
    ranks have written, and reads. The host waits for nothing.
    """

    state: ExchangeState
    setup: exchange_kernel.ExchangeSetup
    digest: int  # identifies this pass of this call

    @classmethod
    def of(cls, ranks: Ranks, digest: int, size: int) -> Self:
        """Make the carrier of a pass, for exchanges of at most ``size`` bytes a rank."""
        state = exchange_state_of(ranks)
        return cls(state, state.reserve(size), digest)

    def __call__(
        self, layout: HeadBuffer, sources: Sequence[torch.Tensor], results: Sequence[torch.Tensor],
        orders: Orders, *, splits_heads: bool,
    ) -> None:  # fmt: skip
        """Run the exchange in one kernel."""
        key = layout, splits_heads, tensors_key(*sources, *results, *orders)
        if (trade := self.state.prepared(key)) is not None:
            trade(self.digest, sources, results, orders)
        else:
            self.state.keep_in_graph(orders)
            trade = head_kernel.trade_heads(
                self.setup, self.state.memory.header, self.digest, layout, sources, results, orders,
                splits_heads=splits_heads,
            )  # fmt: skip
            self.state.keep(key, trade)
        if is_counted():
            message, rank = flat(layout.message.size, torch.uint8), self.setup.rank
            start = rank * layout.message.size
            peers = (peer for peer in range(layout.ranks) if peer != rank)
            note_reads(self.state.memory.views(peer, start, message)[0] for peer in peers)
