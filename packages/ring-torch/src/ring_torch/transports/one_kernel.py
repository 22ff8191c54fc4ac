"""Exchanges of ``symm_mem`` by one kernel: of short passes' K/V and dK/dV, and tokens for heads.

Copies that hide behind kernels need streams, events and a comparison of calls beside them: more of
the host's time than short kernels take. Here each direction is one kernel on the caller's stream,
which writes, waits for the other ranks and reads (:mod:`ring_torch.transports.exchange_kernel`). A
CUDA graph takes none of the host's time, so there copies fetch a part of the K/V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ring_core import GatherProgram, Plan
from ring_core.base.arguments import not_none
from ring_core.programs.gather import Fetch
from ring_torch.buffers import (
    HeadBuffer,
    HeadCarrier,
    KVPayload,
    Orders,
    are_rows,
    flat,
)
from ring_torch.call import Call, IndexMap, PendingGrads, PendingKV, SessionSpec, nothing
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import timeout_of
from ring_torch.launches.cache import tensors_key
from ring_torch.launches.direct import PreparedLaunch, has_launch_hooks
from ring_torch.records import Inputs
from ring_torch.transports import exchange_kernel
from ring_torch.transports.api import is_counted, note_reads, program_of, requests_to
from ring_torch.transports.exchange_kernel import (
    CHUNK,
    DIGEST,
    NUMBERS,
    ORDERS,
    RESULTS,
    SOURCES,
    TARGET,
    TOTAL,
    WHOLE,
    Blocks,
    ExchangeSetup,
    K,
    V,
)
from ring_torch.transports.symm_buffer import (
    MOST_RANKS,
    SymmetricMemory,
    comes_in_parts,
    copy,
)

_MOST = 1024  # tables, and launches, that are kept
#: Rows of a table that tells a kernel what a rank reads of its peers, and where it goes.
Rows = Sequence[Sequence[int]]


@dataclass
class ExchangeState:
    """Symmetric memory of a group for exchanges by one kernel, and what is kept for later ones.

    Index tables and launches are kept for passes with equal keys. They hold addresses of the memory
    that ranks share. Launches hold addresses of tables, too, and live no longer than these.
    """

    memory: SymmetricMemory
    _setup: ExchangeSetup | None = None
    _stream: torch.cuda.Stream | None = None  # stream of the last pass outside of CUDA graphs
    _side_streams: list[torch.cuda.Stream] = field(default_factory=list)
    _tables: dict[object, Tensor] = field(default_factory=dict)
    launches: dict[object, PreparedLaunch | None] = field(default_factory=dict)

    def begin_pass(self, size: int, digest: int) -> ExchangePass:
        """Ensure ``size`` bytes of data, and let this pass follow the last one.

        All ranks call it with equal sizes. New memory makes all tables void, which hold addresses.
        If there are too many, all are dropped here, too: a pass's own stay until it ends.
        """
        setup = None if self.memory.reserve(size) else self._setup
        if setup is None or len(self._tables) > _MOST or len(self.launches) > _MOST:
            self._tables.clear()
            self.launches.clear()
        if setup is None:
            headers, ranks = self.memory.headers(), self.memory.ranks
            assert ranks.size <= MOST_RANKS
            device = headers[ranks.rank].device
            headers[ranks.rank][2] = 1  # the number of the next exchange
            addresses = [x.data_ptr() for x in headers]
            patience = timeout_of(not_none(ranks.group), device) // timedelta(microseconds=1)
            setup = self._setup = ExchangeSetup(
                torch.tensor(addresses, dtype=torch.int64, device=device),
                addresses[ranks.rank],
                ranks.rank,
                *_programs(device),
                1000 * patience,
            )
        # A pass that is captured or whose bytes are counted has more to do, and repeats none.
        is_captured = is_capturing()
        if is_captured:
            self.memory.ranks.state.captured[id(setup)] = setup
        launches = {} if is_captured or is_counted() or has_launch_hooks() else self.launches
        self._wait_last()
        return ExchangePass(self, setup, launches, digest)

    def keep_in_graph(self, objects: Iterable[object]) -> None:
        """Keep objects alive whose memory a CUDA graph reads, if one is being captured."""
        if is_capturing():
            self.memory.ranks.state.captured |= {id(x): x for x in objects if x is not None}

    def table(
        self, key: object, width: int, rows: Callable[[], Rows], device: torch.device
    ) -> Tensor:
        """Return a table on the device, int64 ``[n, width]``, made by ``rows`` once a key.

        Raises:
            ValueError: A CUDA graph is being captured, and the table is not there: it was dropped
                since the call was made, as the memory has grown, or there were too many.
        """
        if key not in self._tables:
            if is_capturing():
                raise ValueError(
                    "a call is captured into a CUDA graph, and what was kept of it has been dropped: by a "
                    "larger call, which moves the memory that ranks share, or by many others. Instead: "
                    "make it once more outside of a graph, then capture it"
                )
            values = torch.tensor(rows(), dtype=torch.int64, device=device).view(-1, width)
            self._tables[key] = values
        self.keep_in_graph([self._tables[key]])
        return self._tables[key]

    def _wait_last(self) -> None:
        """Let the current stream wait for the last pass, if that ran on another stream.

        Exchanges are numbered, so two of a group must never run at the same time.
        """
        last_stream, device = self._stream, torch.cuda.current_device()
        handle = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - streams take longer
        if (last_stream is not None and last_stream.cuda_stream == handle) or is_capturing():
            return
        self._stream = torch.cuda.current_stream()
        if last_stream is not None:
            self._stream.wait_stream(last_stream)

    def side_streams(self, number: int) -> Sequence[torch.cuda.Stream]:
        """Return streams beside the caller's, for a CUDA graph that is being captured."""
        while len(self._side_streams) < number:
            self._side_streams.append(torch.cuda.Stream())
        return self._side_streams[:number]


def _programs(device: torch.device) -> tuple[int, int]:
    """Return how many thread blocks the exchange kernels launch, and how many trade heads.

    K/V and dK/dV are exchanged by half of the GPU's multiprocessors. The blocks wait for other
    ranks, so all of them must run at once. If they held all multiprocessors, a kernel of NCCL on
    another stream might wait for one here, while its peer holds those that the blocks there need: a
    deadlock.

    Tokens are traded for heads by all multiprocessors but 36. Those are left for NCCL, which takes
    up to 32. With fewer blocks the kernel is slower than NCCL: it writes and reads all of q, k and
    v, not K/V alone.
    """
    processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return processors // 2, max(processors // 2, processors - 36)


def exchange_state_of(ranks: Ranks) -> ExchangeState:
    """Return the exchange state of a group, with memory of its own, made the first time."""
    if ranks.state.exchanges is None:
        ranks.state.exchanges = ExchangeState(SymmetricMemory(ranks, header=1024))
    state: ExchangeState = ranks.state.exchanges
    return state


class ExchangePass(NamedTuple):
    """A pass of this rank through the memory by which its group exchanges."""

    state: ExchangeState
    setup: ExchangeSetup
    #: Launches that it may repeat, by key: none if it is captured or counted. No copy: they lose
    #: what a later pass drops.
    launches: Mapping[object, PreparedLaunch | None]
    digest: int  # identifies this pass of this call


class OneKernel(NamedTuple):
    """A :class:`ring_torch.call.GatherSession` for short passes of one group of heads.

    A rank's memory holds its K/V, and behind them its dK/dV of the keys that it fetched. A pass is
    one exchange for K/V and, in a backward, one for dK/dV. Ranks whose digests differ end in a
    device assert: the host has gone on.
    """

    call: Call
    spec: SessionSpec
    exchange: ExchangePass

    def fetch(
        self, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Write own K/V where peers read them, and fetch all K/V that this rank's queries see."""
        # On the same stream, and so ahead of the exchange: a late peer is waited for behind it.
        meanwhile()
        state, setup, launches, digest = self.exchange
        (gather, keys, _, _, by_parts), (k, v) = self.spec, inputs[1:3]
        # `new_empty(*sizes)` takes the host half the time of `torch.empty(shape, dtype=, device=)`.
        target = k.new_empty(keys.batch, gather.length, keys.width)
        # Without parts attention is queued behind the kernel on its stream, and waits for nothing.
        pending = PendingKV([target], None)
        # The kernel waits until peers have read what lies in `own` from the pass before, writes,
        # waits until all ranks have written, and reads. The host waits for nothing.
        key = gather, keys, by_parts, tensors_key(k, v)
        if (launch := launches.get(key)) is not None:
            launch({DIGEST: digest, K: k.data_ptr(), V: v.data_ptr(), TARGET: target.data_ptr()})
        else:
            own_k, own_v = (x if are_rows(x) else x.contiguous() for x in (k, v))
            from_peers = [fetch for fetch in gather.fetches if fetch.rank != setup.rank]
            places = state.table(
                (gather, keys, "own"),
                1,
                partial(_places, gather, setup.rank, keys.length),
                self.call.device,
            )
            in_parts = by_parts and comes_in_parts(keys, from_peers)
            blocks = _blocks_of_half(keys) if in_parts else WHOLE
            # Outside of graphs both tables are made and all kernels loaded: inside neither is
            # possible.
            tables = [
                state.table(
                    (gather, keys, n),
                    4,
                    partial(self._pieces, from_peers, halves=n, at_once=blocks.tokens),
                    self.call.device,
                )
                for n in ((1, 2) if in_parts else (0,))
            ]
            is_halved = in_parts and is_capturing()
            if in_parts and not is_halved:
                exchange_kernel.finish_reading(setup, ends=False)
            launch = exchange_kernel.exchange_keys(
                setup,
                digest,
                own_k,
                own_v,
                self._keys_of(setup.rank),
                places,
                target,
                tables[0 if is_halved else -1],
                blocks,
                ends=not is_halved,
            )
            if is_halved:
                pending = self._copy_half(from_peers, target)
            elif own_k is k and own_v is v:
                state.launches[key] = launch
            # A pass whose bytes are counted repeats no launch, so it comes here.
            note_reads(target[:, fetch.target] for fetch in from_peers)
        yield pending

    def _copy_half(self, from_peers: Sequence[Fetch], target: Tensor) -> PendingKV:
        """Fetch half of the heads, in a CUDA graph, beside the kernels of the others.

        Copy engines fetch that half, which take no multiprocessor. Each launch has a stream, so
        kernels of the second half fill the multiprocessors that those of the first leave.
        """
        state, setup, *_ = self.exchange
        # Peers have signalled: copies may read. Nobody overwrites what they read before this rank
        # says that it has finished, which is queued behind them.
        main, num_items = torch.cuda.current_stream(), len(self.spec.gather.items)
        side, *streams = state.side_streams(2 * num_items - 1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for fetch in from_peers:
                for n, source in enumerate(self._keys_of(fetch.rank)[:, fetch.source]):
                    for columns in _columns_of_halves(self.spec.keys)[2:]:
                        copy(target[n, fetch.target, columns], source[:, columns])
            exchange_kernel.finish_reading(setup)
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
        return PendingKV([target], wait, parts)

    def accumulators(self, *, zero: bool) -> list[Tensor]:
        """Return the buffer of dK/dV, where the owners of the keys will read them.

        It is filled with zeros if ``zero``, and uninitialised otherwise.
        """
        (state, setup, launches, _), call = self.exchange, self.call
        gather, _, _, sums, _ = self.spec
        grad_sums = (
            self._grads_of(setup.rank, gather.length)
            if gather.length > 0
            else torch.empty(0, dtype=call.acc_dtype, device=call.device)  # nobody reads
        )
        # The kernel waits until peers have read what the exchange before left for them.
        key = gather, sums, zero
        if (launch := launches.get(key)) is not None:
            launch({})
        else:
            state.launches[key] = exchange_kernel.wait_reusable(setup, grad_sums, zero=zero)
        return [grad_sums]

    def return_grads(
        self, grads: Tensor, group: int, *, overlapped: bool, before_last_item: bool | None = None
    ) -> PendingGrads:
        """Return what makes the exchange of dK/dV: all of them go home in one kernel at the end.

        So nothing is sent early.
        """
        del grads, group, overlapped
        return nothing if before_last_item else self._add

    def _add(self, total: Tensor, length: int, index_map: IndexMap) -> None:
        """Exchange dK/dV: let peers read this rank's, and add theirs for own keys to ``total``."""
        state, setup, launches, digest = self.exchange
        plan, rank, (gather, _, _, sums, _) = self.call.plan, setup.rank, self.spec
        key = gather, sums, length, index_map, total.data_ptr() % 16
        if (launch := launches.get(key)) is not None:
            launch({DIGEST: digest, TOTAL: total.data_ptr()})
            return
        num_peers = max(self.call.ranks.size - 1, 1)
        columns = [(x, index_map(x).start) for x in _sent_spans(plan, rank, gather)]
        # By what an index map gives: the same call, prepared anew, has another one.
        starts = tuple([start for _, start in columns])
        table = state.table(
            (gather, sums, length, starts),
            2 + num_peers,
            partial(self._sums_of_peers, length, columns, num_peers),
            self.call.device,
        )
        state.launches[key] = exchange_kernel.reduce_from_peers(setup, digest, table, total)
        # As in `fetch`: where bytes are counted, a pass comes here.
        note_reads(
            x
            for _, fetch in requests_to(plan, rank, like=gather)
            for x in sums.strided_views(total, length, index_map(fetch.source))
        )

    def _pieces(self, from_peers: Sequence[Fetch], *, halves: int, at_once: int) -> Rows:
        """Return the table by which :func:`exchange_keys` fetches K/V of peers.

        It is for whole tokens or, if ``halves`` is not 0, for so many halves of the heads, in
        blocks of at most ``at_once`` tokens.
        """
        gather, keys, *_ = self.spec
        itemsize = keys.dtype.itemsize
        token, columns = keys.width * itemsize, _columns_of_halves(keys)[: 2 * halves]
        rows: dict[int, list[Sequence[int]]] = {}
        # A row of a peer's batch is contiguous there and here. It is cut into pieces, which
        # programs of the kernel take in turns: each begins so many bytes behind both addresses.
        for fetch in from_peers:
            for n, source in enumerate(self._keys_of(fetch.rank)[:, fetch.source]):
                tokens, size = len(source), len(source) * token
                offset = (n * gather.length + fetch.target.start) * token
                pieces = (
                    [
                        (
                            start * token + x.start * itemsize,
                            min(at_once, tokens - start),
                            (x.stop - x.start) * itemsize,
                        )
                        for start in range(0, tokens, at_once)
                        for x in columns
                    ]
                    if halves
                    else [(start, 1, min(CHUNK, size - start)) for start in range(0, size, CHUNK)]
                )
                rows.setdefault(fetch.rank, []).extend(
                    (source.data_ptr() + start, offset + start, *shape) for start, *shape in pieces
                )
        return _interleaved(list(rows.values()))

    def _sums_of_peers(self, length: int, spans: Iterable[tuple[slice, int]], width: int) -> Rows:
        """Return the table of :func:`reduce_from_peers`, with ``width`` addresses in a row.

        Args:
            length: Tokens of ``total``, to which they are added.
            spans: Spans of own keys, each with its first column in ``total``; a fetch covers a span
                wholly or not at all.
            width: Most peers that have sums for a span.
        """
        plan, rank, (gather, _, _, sums, _) = self.call.plan, self.exchange.setup.rank, self.spec
        # dK/dV that peers have summed up for what they fetched of this rank, in the order in which
        # they are added.
        parts = [
            (fetch, self._grads_of(peer, peer_length), peer_length)
            for peer, fetch in requests_to(plan, rank, like=gather)
            for peer_length in [program_of(plan, peer, like=gather).length]
        ]
        like = torch.empty(sums.numel(length), dtype=self.call.acc_dtype, device="meta")
        rows: list[list[Sequence[int]]] = []
        # Each number of `total` is in one row of the table: one program adds all peers' sums to it,
        # in the order of the parts, so sums are repeatable.
        for span, start in spans:
            peer_sums = [
                sums.strided_views(
                    peer_flat, peer_length, slice(span.start + shift, span.stop + shift)
                )
                for fetch, peer_flat, peer_length in parts
                if fetch.source.start <= span.start and span.stop <= fetch.source.stop
                for shift in [fetch.target.start - fetch.source.start]
            ]
            own_sums = sums.strided_views(
                like, length, slice(start, start + span.stop - span.start)
            )
            absent = [0] * (width - len(peer_sums))
            # A span is cut into runs that are contiguous in `total` and on all peers.
            rows.append(
                [
                    (
                        row.storage_offset() + offset,
                        min(NUMBERS, row.numel() - offset),
                        *(x.data_ptr() + offset * x.itemsize for x in peers),
                        *absent,
                    )
                    for total_rows, *parts_of_row in zip(own_sums, *peer_sums, strict=True)
                    for row, *peers in zip(total_rows, *parts_of_row, strict=True)
                    for offset in range(0, row.numel(), NUMBERS)
                ]
            )
        return _interleaved(rows)

    def _keys_of(self, rank: int) -> Tensor:
        """Return where a rank's own K/V lie for its peers."""
        return self.exchange.state.memory.views(rank, 0, self.spec.keys.message)[0]

    def _grads_of(self, rank: int, length: int) -> Tensor:
        """Return where a rank's dK/dV of ``length`` fetched keys lie for the keys' owners."""
        packing = flat(self.spec.sums.numel(length), self.call.acc_dtype)
        return self.exchange.state.memory.views(rank, self.spec.keys.message.size, packing)[0]


def _places(gather: GatherProgram, rank: int, length: int) -> Rows:
    """Return the token of the gathered buffer to which each own token goes, or -1 for none."""
    places = [-1] * length
    for fetch in gather.fetches:
        if fetch.rank == rank:
            places[fetch.source] = range(fetch.target.start, fetch.target.stop)
    return [(place,) for place in places]


def _columns_of_halves(keys: KVPayload) -> list[slice]:
    """Return the columns of K and of V of the first half of the heads, then of the second."""
    k, v = keys.heads // 2 * keys.dim, keys.heads // 2 * keys.v_dim
    return [
        slice(start, start + size)
        for n in range(2)
        for start, size in ((n * k, k), (2 * k + n * v, v))
    ]


def _blocks_of_half(keys: KVPayload) -> Blocks:
    """Return the shape of the blocks in which half of the heads of some tokens is fetched."""
    most = keys.heads // 2 * max(keys.dim, keys.v_dim) * keys.dtype.itemsize // 8
    words = 1 << (most - 1).bit_length()
    return Blocks(max(1, CHUNK // (8 * words)), words, keys.width * keys.dtype.itemsize // 8)


def _interleaved(rows: Sequence[Rows]) -> Rows:
    """Return the rows of several lists in one, evenly interleaved.

    Programs take rows in turns: those that run at the same time then read from all ranks.
    """
    keyed = [
        ((n + 0.5) / len(list_rows), list_number, row)
        for list_number, list_rows in enumerate(rows)
        for n, row in enumerate(list_rows)
    ]
    return [row for *_, row in sorted(keyed)]


def _sent_spans(plan: Plan, rank: int, gather: GatherProgram) -> list[slice]:
    """Return the spans of a rank's keys that peers fetch, cut at all edges of fetches.

    So each fetch covers a span wholly or not at all.
    """
    sources = [fetch.source for _, fetch in requests_to(plan, rank, like=gather)]
    edges = sorted({edge for x in sources for edge in (x.start, x.stop)})
    return [
        slice(a, b)
        for a, b in pairwise(edges)
        if any(x.start <= a and b <= x.stop for x in sources)
    ]


@dataclass(frozen=True)
class HeadTrade(HeadCarrier):
    """A carrier whose kernel writes messages into this rank's memory and reads those of peers.

    It waits until peers have read what the exchange before left there, writes, waits until all
    ranks have written, and reads. The host waits for nothing.
    """

    exchange: ExchangePass

    def __call__(
        self,
        layout: HeadBuffer,
        sources: Sequence[Tensor],
        results: Sequence[Tensor],
        orders: Orders,
        *,
        splits_heads: bool,
    ) -> None:
        """Run the exchange in one kernel."""
        state, setup, launches, digest = self.exchange
        key = layout, splits_heads, tensors_key(*sources, *results, *orders)
        if (launch := launches.get(key)) is not None:
            changing = (SOURCES, sources), (RESULTS, results), (ORDERS, orders)
            launch(
                {DIGEST: digest}
                | {
                    first + n: x.data_ptr()
                    for first, tensors in changing
                    for n, x in enumerate(tensors)
                    if x is not None
                }
            )
            return
        state.keep_in_graph(orders)
        state.launches[key] = exchange_kernel.trade_heads(
            setup,
            state.memory.header,
            digest,
            layout,
            sources,
            results,
            orders,
            splits_heads=splits_heads,
        )
        # As in a session's `fetch`: where bytes are counted, a pass comes here.
        message, rank = flat(layout.message.size, torch.uint8), setup.rank
        peers = (peer for peer in range(layout.ranks) if peer != rank)
        note_reads(
            state.memory.views(peer, rank * layout.message.size, message)[0] for peer in peers
        )
