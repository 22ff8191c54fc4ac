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
from functools import lru_cache, partial
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ring_core import GatherProgram, Plan
from ring_core.base.arguments import not_none
from ring_core.programs.gather import Fetch
from ring_torch.buffers import HeadBuffer, HeadCarrier, KeyGradBuffer, Orders, are_rows, flat
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import timeout_of
from ring_torch.launches.cache import tensors_key
from ring_torch.launches.direct import PreparedLaunch
from ring_torch.records import Inputs
from ring_torch.transports import exchange_kernel, exchange_tables as tables
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
from ring_torch.transports.exchange_kernel import (
    DIGEST,
    ORDERS,
    RESULTS,
    SOURCES,
    TARGET,
    TOTAL,
    ExchangeSetup,
    K,
    V,
)
from ring_torch.transports.kept_launches import KeptLaunches
from ring_torch.transports.peer_copies import MOST_RANKS, comes_in_parts, copy
from ring_torch.transports.symm_buffer import SymmetricMemory

_HEADER_BYTES = 1024  # enough for MOST_RANKS
_FIRST = 2  # index of the next exchange's number in a header

# The state of each group. Process groups take no attributes of ours, so it is kept here.
_state_of: WeakKeyDictionary[dist.ProcessGroup, ExchangeState] = WeakKeyDictionary()


@dataclass
class ExchangeState:
    """Symmetric memory of a group for exchanges by one kernel, and what is kept for later ones."""

    memory: SymmetricMemory
    _setup: ExchangeSetup | None = None
    _stream: torch.cuda.Stream | None = None  # stream of the last pass outside of CUDA graphs
    _side_streams: list[torch.cuda.Stream] = field(default_factory=list)
    kept: KeptLaunches = field(default_factory=KeptLaunches)

    def begin_pass(self, size: int) -> tuple[ExchangeSetup, Mapping[object, PreparedLaunch]]:
        """Ensure ``size`` bytes of data, and let this pass follow the last one.

        All ranks call it with equal sizes. New memory makes all tables void, which hold addresses.
        Returns the setup of the pass, and the launches that it may repeat.
        """
        if self.memory.reserve(size) or self._setup is None:
            self.kept.clear()
            self._setup = self._new_setup()
        launches = self.kept.begin_pass(self._setup, is_counted=is_counted())
        self._wait_last()
        return self._setup, launches

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

    def _new_setup(self) -> ExchangeSetup:
        """Make the setup of this rank in new memory, whose first exchange has number 1."""
        headers, ranks = self.memory.headers(), self.memory.ranks
        assert ranks.size <= MOST_RANKS
        device = headers[ranks.rank].device
        headers[ranks.rank][_FIRST] = 1
        addresses = [x.data_ptr() for x in headers]
        patience = timeout_of(not_none(ranks.group), device) // timedelta(microseconds=1)
        header_addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        return ExchangeSetup(
            header_addresses,
            addresses[ranks.rank],
            ranks.rank,
            _programs(device),
            _head_programs(device),
            1000 * patience,
        )


def _programs(device: torch.device) -> int:
    """Return how many thread blocks the exchange kernels launch: half of the GPU's multiprocessors.

    They wait for other ranks, so all of them must run at once. If they held all multiprocessors, a
    kernel of NCCL on another stream might wait for one here, while its peer holds those that the
    blocks there need: a deadlock.
    """
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // 2


def _head_programs(device: torch.device) -> int:
    """Return how many thread blocks trade tokens for heads: all multiprocessors but 36.

    Those are left for NCCL, as :func:`_programs` says, which takes up to 32. With fewer blocks the
    kernel is slower than NCCL: it writes and reads all of q, k and v, not K/V alone.
    """
    processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return max(_programs(device), processors - 36)


def exchange_state_of(ranks: Ranks) -> ExchangeState:
    """Return the exchange state of a group, with memory of its own, made the first time."""
    group = not_none(ranks.group)
    if (state := _state_of.get(group)) is None:
        state = _state_of[group] = ExchangeState(SymmetricMemory(ranks, _HEADER_BYTES))
    return state


class OneKernel(NamedTuple):
    """A :class:`ring_torch.transports.api.GatherSession` for short passes of one group of heads.

    A rank's memory holds its K/V, and behind them its dK/dV of the keys that it fetched. A pass is
    one exchange for K/V and, in a backward, one for dK/dV. Ranks whose digests differ end in a
    device assert: the host has gone on.
    """

    spec: SessionSpec
    state: ExchangeState
    setup: ExchangeSetup
    launches: Mapping[
        object, PreparedLaunch
    ]  # prepared ones by key; empty if this pass must not repeat any
    digest: int  # identifies this pass of this call

    @classmethod
    def of(cls, spec: SessionSpec, grad_bytes: int, digest: int) -> OneKernel:
        """Open a session whose memory also holds ``grad_bytes`` bytes of dK/dV sums."""
        state = exchange_state_of(spec.ranks)
        return cls(spec, state, *state.begin_pass(spec.keys.message.size + grad_bytes), digest)

    def fetch(
        self, gather: GatherProgram, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Write own K/V where peers read them, and fetch all K/V that this rank's queries see."""
        # On the same stream, and so ahead of the exchange: a late peer is waited for behind it.
        meanwhile()
        spec, keys, (k, v) = self.spec, self.spec.keys, inputs[1:3]
        # `new_empty(*sizes)` takes the host half the time of `torch.empty(shape, dtype=, device=)`.
        target = k.new_empty(keys.batch, gather.length, keys.width)
        # Without parts attention is queued behind the kernel on its stream, and waits for nothing.
        pending = PendingKV([target], lambda _fetches: None)
        # The kernel waits until peers have read what lies in `own` from the pass before, writes,
        # waits until all ranks have written, and reads. The host waits for nothing.
        key, kept = (gather, keys, spec.by_parts, tensors_key(k, v)), self.state.kept
        if (exchange := self.launches.get(key)) is not None:
            tensors = {K: k.data_ptr(), V: v.data_ptr(), TARGET: target.data_ptr()}
            exchange({DIGEST: self.digest, **tensors})
        else:
            from_peers = [fetch for fetch in gather.fetches if fetch.rank != self.setup.rank]
            own_k, own_v = (x if are_rows(x) else x.contiguous() for x in (k, v))
            own = self._keys_of(self.setup.rank)
            own_fetches = [fetch for fetch in gather.fetches if fetch.rank == self.setup.rank]
            places = kept.table(
                (gather, keys, "own"), 1, lambda: tables.own_places(own_fetches, keys.length),
                spec.device,
            )  # fmt: skip
            run = partial(
                exchange_kernel.exchange_keys, self.setup, self.digest, own_k, own_v, own, places,
                target,
            )  # fmt: skip
            if spec.by_parts and comes_in_parts(keys, from_peers):
                exchange, pending = self._fetch_in_halves(gather, run, target)
            else:
                rows = partial(self._pieces, gather)
                exchange = run(kept.table((gather, keys), 3, rows, spec.device))
            if own_k is k and own_v is v:
                kept.keep(key, exchange)
            # A pass whose bytes are counted repeats no launch, so it comes here.
            note_reads(target[:, fetch.target] for fetch in from_peers)
        yield pending

    def _fetch_in_halves(
        self, gather: GatherProgram, run: Callable[..., PreparedLaunch | None], target: torch.Tensor
    ) -> tuple[PreparedLaunch | None, PendingKV]:
        """Fetch K/V; in a CUDA graph half of the heads beside the kernels of the others.

        Copy engines fetch that half, which take no multiprocessor. Each launch has a stream, so
        kernels of the second half fill the multiprocessors that those of the first leave. Returns
        the exchange, if later calls can repeat it, and what is in flight.
        """
        keys = self.spec.keys
        halves, shape = tables.columns_of_halves(keys), tables.shape_of_blocks(keys)
        # Outside of graphs both tables are made and all kernels loaded: inside neither is possible.
        of_half, of_all = (
            self.state.kept.table(
                (gather, keys, n), 4, partial(self._blocks, gather, halves[:n]), self.spec.device
            )
            for n in (1, 2)
        )
        if not is_capturing():
            exchange_kernel.finish_reading(self.setup, ends=False)
            return run(of_all, shape), PendingKV([target], lambda _fetches: None)
        run(of_half, shape, ends=False)
        # Peers have signalled: copies may read. Nobody overwrites what they read before this rank
        # says that it has finished, which is queued behind them.
        main, num_items = torch.cuda.current_stream(), len(gather.items)
        side, *streams = self.state.side_streams(2 * num_items - 1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for fetch, sources in self._sources(gather):
                for n, source in enumerate(sources):
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
        # The kernel waits until peers have read what the exchange before left for them.
        if gather.length == 0:  # nobody will read any
            grad_sums = torch.empty(0, dtype=self.spec.acc_dtype, device=self.spec.device)
            exchange_kernel.wait_reusable(self.setup, grad_sums, zero=zero)
            return [grad_sums]
        grad_sums = self._grads_of(self.spec.ranks.rank, sums, gather.length)
        key = gather, sums, zero
        if (launch := self.launches.get(key)) is not None:
            launch({})
        else:
            self.state.kept.keep(
                key, exchange_kernel.wait_reusable(self.setup, grad_sums, zero=zero)
            )
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
        return partial(self._add, gather, sums)

    def _add(
        self, gather: GatherProgram, sums: KeyGradBuffer, total: torch.Tensor, length: int,
        index_map: IndexMap,
    ) -> None:  # fmt: skip
        """Exchange dK/dV: let peers read this rank's, and add theirs for own keys to ``total``."""
        starts = _starts(self.spec.plan, self.spec.ranks.rank, gather, index_map)
        key, kept = (gather, sums, length, starts, total.data_ptr() % 16), self.state.kept
        if (exchange := self.launches.get(key)) is not None:
            exchange({DIGEST: self.digest, TOTAL: total.data_ptr()})
            return
        spans = sent_spans(self.spec.plan, self.spec.ranks.rank, like=gather)
        num_peers = max(self.spec.ranks.size - 1, 1)
        table = kept.table(
            key, 2 + num_peers,
            lambda: self._sums_of_peers(gather, sums, length, zip(spans, starts, strict=True), num_peers),
            self.spec.device,
        )  # fmt: skip
        kept.keep(key, exchange_kernel.reduce_from_peers(self.setup, self.digest, table, total))
        # As in `fetch`: where bytes are counted, a pass comes here.
        note_reads(
            x
            for _, fetch in requests_to(self.spec.plan, self.spec.ranks.rank, like=gather)
            for x in sums.strided_views(total, length, index_map(fetch.source))
        )

    def _pieces(self, gather: GatherProgram) -> tables.Rows:
        return tables.pieces(self.spec.keys, gather.length, self._sources(gather))

    def _blocks(self, gather: GatherProgram, halves: Sequence[tables.HeadColumns]) -> tables.Rows:
        return tables.blocks(self.spec.keys, gather.length, self._sources(gather), halves)

    def _sums_of_peers(
        self, gather: GatherProgram, sums: KeyGradBuffer, length: int,
        spans: Iterable[tuple[slice, int]], width: int,
    ) -> tables.Rows:  # fmt: skip
        requests = requests_to(self.spec.plan, self.spec.ranks.rank, like=gather)
        lengths = [program_of(self.spec.plan, peer, like=gather).length for peer, _ in requests]
        parts = [
            tables.PeerSums(fetch, self._grads_of(peer, sums, peer_length), peer_length)
            for (peer, fetch), peer_length in zip(requests, lengths, strict=True)
        ]
        return tables.sums_of_peers(sums, self.spec.acc_dtype, length, spans, parts, width)

    def _sources(self, gather: GatherProgram) -> list[tuple[Fetch, torch.Tensor]]:
        """Return the fetches of peers' K/V, each with the K/V in the peer's memory."""
        return [
            (fetch, self._keys_of(fetch.rank)[:, fetch.source])
            for fetch in gather.fetches
            if fetch.rank != self.setup.rank
        ]

    def _keys_of(self, rank: int) -> torch.Tensor:
        """Return where a rank's own K/V lie for its peers."""
        return self.state.memory.views(rank, 0, self.spec.keys.message)[0]

    def _grads_of(self, rank: int, sums: KeyGradBuffer, length: int) -> torch.Tensor:
        """Return where a rank's dK/dV of ``length`` fetched keys lie for the keys' owners."""
        packing = flat(sums.numel(length), self.spec.acc_dtype)
        return self.state.memory.views(rank, self.spec.keys.message.size, packing)[0]


@lru_cache(maxsize=256)
def _starts(plan: Plan, rank: int, gather: GatherProgram, index_map: IndexMap) -> tuple[int, ...]:
    """Return the columns at which spans of own keys begin that peers fetch.

    It is asked once for each index map: repeated calls bring the same one.
    """
    return tuple([index_map(span).start for span in sent_spans(plan, rank, like=gather)])


@dataclass(frozen=True)
class HeadTrade(HeadCarrier):
    """A carrier whose kernel writes messages into this rank's memory and reads those of peers.

    It waits until peers have read what the exchange before left there, writes, waits until all
    ranks have written, and reads. The host waits for nothing.
    """

    state: ExchangeState
    setup: ExchangeSetup
    launches: Mapping[
        object, PreparedLaunch
    ]  # prepared ones by key; empty if this pass must not repeat any
    digest: int  # identifies this pass of this call

    @classmethod
    def of(cls, ranks: Ranks, digest: int, size: int) -> Self:
        """Make the carrier of a pass, for exchanges of at most ``size`` bytes a rank."""
        state = exchange_state_of(ranks)
        return cls(state, *state.begin_pass(size), digest)

    def __call__(
        self, layout: HeadBuffer, sources: Sequence[torch.Tensor], results: Sequence[torch.Tensor],
        orders: Orders, *, splits_heads: bool,
    ) -> None:  # fmt: skip
        """Run the exchange in one kernel."""
        key = layout, splits_heads, tensors_key(*sources, *results, *orders)
        if (trade := self.launches.get(key)) is not None:
            tensors = (SOURCES, sources), (RESULTS, results), (ORDERS, orders)
            trade(
                {
                    first + n: x.data_ptr()
                    for first, group in tensors
                    for n, x in enumerate(group)
                    if x is not None
                }
                | {DIGEST: self.digest}
            )
            return
        self.state.kept.keep_in_graph(orders)
        trade = exchange_kernel.trade_heads(
            self.setup, self.state.memory.header, self.digest, layout, sources, results, orders,
            splits_heads=splits_heads,
        )  # fmt: skip
        self.state.kept.keep(key, trade)
        # As in a session's `fetch`: where bytes are counted, a pass comes here.
        message, rank = flat(layout.message.size, torch.uint8), self.setup.rank
        peers = (peer for peer in range(layout.ranks) if peer != rank)
        note_reads(
            self.state.memory.views(peer, rank * layout.message.size, message)[0] for peer in peers
        )
