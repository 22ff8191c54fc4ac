"""Short passes: all keys come by one kernel, and all gradients go home by one.

Copies that hide behind kernels need streams, events and a proof of equal calls beside them: more of
the host's time than short kernels take. Here each way is one kernel on the caller's stream, which
writes, waits for the other ranks and reads (:mod:`ring_torch.transports.exchange_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ring_core import Fetch, GatherProgram, gather_program
from ring_torch.buffers import flat
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import timeout_of
from ring_torch.payload import KeyGradBuffer, are_rows
from ring_torch.records import Inputs
from ring_torch.transports import exchange_kernel
from ring_torch.transports.api import (
    PendingGrads,
    PendingKV,
    SessionSpec,
    Where,
    is_counted,
    note_reads,
    requests_to,
)
from ring_torch.transports.symm_buffer import SymmetricMemory

_HEADER = 1024  # bytes, enough for MOST_RANKS
_FIRST = 2  # where in a header the number of the exchange stands
_MOST_TABLES = 1024

# The meeting of each group: a fact about the group, which is not ours to extend.
_state_of: WeakKeyDictionary[dist.ProcessGroup, ExchangeState] = WeakKeyDictionary()


@dataclass
class ExchangeState:
    """Where the ranks of a group exchange: memory, and tables of what is to be read of it."""

    memory: SymmetricMemory
    _place: exchange_kernel.Place | None = None
    _stream: torch.cuda.Stream | None = None  # of the last pass outside of graphs
    _tables: dict[object, torch.Tensor] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # what CUDA graphs read

    def reserve(self, size: int) -> exchange_kernel.Place:
        """Make room for so many bytes, and let this pass follow the last one."""
        if self.memory.reserve(size) or self._place is None:
            self._tables.clear()
            self._place = self._new_place()
        if is_capturing():
            self._kept.append(self._place)
        self._wait_last()
        return self._place

    def _wait_last(self) -> None:
        """Let the current stream wait for the last pass, if that was on another."""
        before, device = self._stream, torch.cuda.current_device()
        handle = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 - streams take longer
        if (before is not None and before.cuda_stream == handle) or is_capturing():
            return
        self._stream = torch.cuda.current_stream()
        if before is not None:
            self._stream.wait_stream(before)

    def _new_place(self) -> exchange_kernel.Place:
        headers, ring = self.memory.headers(), self.memory.ring
        assert ring.group is not None
        device = headers[ring.rank].device
        headers[ring.rank][_FIRST] = 1
        addresses = [x.data_ptr() for x in headers]
        patience = timeout_of(ring.group, device) // timedelta(microseconds=1)
        every = torch.tensor(addresses, dtype=torch.int64).to(device)
        return exchange_kernel.Place(
            every, addresses[ring.rank], ring.rank, _programs(device), 1000 * patience
        )

    def table(
        self, key: object, width: int, rows: Callable[[], Sequence[Sequence[int]]]
    ) -> torch.Tensor:
        """Numbers on the device, int64 ``[n, width]``, made once."""
        assert self._place is not None
        if len(self._tables) > _MOST_TABLES:
            self._tables.clear()
        if key not in self._tables:
            found = torch.tensor(rows(), dtype=torch.int64).view(-1, width)
            self._tables[key] = found.to(self._place.headers.device)
        if is_capturing():
            self._kept.append(self._tables[key])
        return self._tables[key]


def _programs(device: torch.device) -> int:
    """As many as run at once, one a processor, on half of them.

    They wait for other ranks. If they held all processors, a kernel of NCCL on another stream might
    wait for one here, its peer keep those that the programs there need, and nobody get on.
    """
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // 2


def meeting_of(ring: Ranks) -> ExchangeState:
    """A group's meeting."""
    assert ring.group is not None
    if ring.group not in _state_of:
        _state_of[ring.group] = ExchangeState(SymmetricMemory(ring, _HEADER))
    return _state_of[ring.group]


@dataclass(frozen=True)
class OneKernel:
    """A :class:`ring_torch.transports.api.GatherSession` for short passes, heads in one group.

    A rank's memory holds its keys, and behind them the gradients of what it fetched.
    """

    spec: SessionSpec
    meeting: ExchangeState
    place: exchange_kernel.Place  # in the meeting
    digest: int  # what tells this pass of this call from any other

    @classmethod
    def of(cls, spec: SessionSpec, room: int, digest: int) -> OneKernel:
        """With so much room for the sums of gradients."""
        meeting = meeting_of(spec.ranks)
        return cls(spec, meeting, meeting.reserve(spec.keys.message.size + room), digest)

    def fetch(self, gather: GatherProgram, inputs: Inputs) -> Iterator[PendingKV]:
        """Put the own keys where peers read them, and fetch all that this rank's queries see."""
        keys = self.spec.keys
        k, v = (x if are_rows(x) else x.contiguous() for x in (inputs.k, inputs.v))
        own = self._keys_of(self.place.rank)
        target = own.new_empty(keys.batch, gather.length, keys.width)
        table = self.meeting.table((gather, keys), 3, lambda: self._pieces(gather))
        exchange_kernel.exchange_keys(self.place, self.digest, k, v, own, table, target)
        if is_counted():
            others = (one for one in gather.fetches if one.rank != self.place.rank)
            note_reads(target[:, one.target] for one in others)
        # The kernel is on the stream of those that read what it fetched: nothing to wait for.
        yield PendingKV([target], lambda _fetches: None)

    def accumulators(
        self, gather: GatherProgram, sums: KeyGradBuffer, *, zero: bool
    ) -> list[torch.Tensor]:
        """Room where the keys' owners will read."""
        if gather.length == 0:  # nobody reads any
            room = torch.empty(0, dtype=self.spec.acc_dtype, device=self.spec.device)
        else:
            room = self._grads_of(self.spec.ranks.rank, sums, gather.length)
        exchange_kernel.clear(self.place, room, zero=zero)
        return [room]

    def return_grads(
        self, gather: GatherProgram, sums: KeyGradBuffer, grads: torch.Tensor, group: int, *, overlapped: bool,
        early: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """All gradients go at the end."""
        del grads, group, overlapped
        if early:
            return lambda _total, _length, _where: None
        return lambda *total: self._add(gather, sums, *total)

    def _add(
        self,
        gather: GatherProgram,
        sums: KeyGradBuffer,
        total: torch.Tensor,
        length: int,
        where: Where,
    ) -> None:
        requests = requests_to(self.spec.plan, self.spec.ranks.rank, own=gather.own)
        spans = _cut_spans([one for _, one in requests])
        starts = [where(span).start for span in spans]
        parts = max(self.spec.ranks.size - 1, 1)
        table = self.meeting.table(
            (gather, sums, length, tuple(starts)), 2 + parts,
            lambda: self._sums_of_peers(requests, sums, length, zip(spans, starts, strict=True), parts),
        )  # fmt: skip
        exchange_kernel.reduce_from_peers(self.place, self.digest, table, total)
        if is_counted():
            for _, one in requests:
                note_reads(sums.parts(total, length, where(one.source)))

    def _pieces(self, gather: GatherProgram) -> Sequence[Sequence[int]]:
        """What :func:`exchange_keys` fetches."""
        token = self.spec.keys.width * self.spec.keys.dtype.itemsize
        rows: dict[int, list[Sequence[int]]] = {}
        for one in gather.fetches:
            for n, part in enumerate(self._keys_of(one.rank)[:, one.source]):
                size, offset = part.shape[0] * token, (n * gather.length + one.target.start) * token
                rows.setdefault(one.rank, []).extend(
                    (part.data_ptr() + at, offset + at, min(exchange_kernel.CHUNK, size - at))
                    for at in range(0, size, exchange_kernel.CHUNK)
                )
        return _mixed(list(rows.values()))

    def _sums_of_peers(
        self, requests: Sequence[tuple[int, Fetch]], sums: KeyGradBuffer, length: int,
        spans: Iterable[tuple[slice, int]], width: int,
    ) -> Sequence[Sequence[int]]:  # fmt: skip
        """What :func:`reduce_from_peers` adds, with as many addresses a row."""
        like = torch.empty(sums.numel(length), dtype=self.spec.acc_dtype, device="meta")
        rows: list[list[Sequence[int]]] = []
        for span, start in spans:
            tokens = span.stop - span.start
            theirs = []
            for peer, one in requests:
                if one.source.start <= span.start and span.stop <= one.source.stop:
                    theirs_length = gather_program(self.spec.plan, peer).length
                    first = one.target.start + span.start - one.source.start
                    flat = self._grads_of(peer, sums, theirs_length)
                    theirs.append(sums.parts(flat, theirs_length, slice(first, first + tokens)))
            mine = sums.parts(like, length, slice(start, start + tokens))
            rest = [0] * (width - len(theirs))
            rows.append([
                (
                    row.storage_offset() + at, min(exchange_kernel.NUMBERS, row.numel() - at),
                    *(x.data_ptr() + at * x.itemsize for x in peers), *rest,
                )
                for place, *parts in zip(mine, *theirs, strict=True)
                for row, *peers in zip(place, *parts, strict=True)
                for at in range(0, row.numel(), exchange_kernel.NUMBERS)
            ])  # fmt: skip
        return _mixed(rows)

    def _keys_of(self, rank: int) -> torch.Tensor:
        return self.meeting.memory.views(rank, 0, self.spec.keys.message)[0]

    def _grads_of(self, rank: int, sums: KeyGradBuffer, length: int) -> torch.Tensor:
        packing = flat(sums.numel(length), self.spec.acc_dtype)
        return self.meeting.memory.views(rank, self.spec.keys.message.size, packing)[0]


def _mixed(rows: Sequence[Sequence[Sequence[int]]]) -> list[Sequence[int]]:
    """All rows of several kinds, evenly mixed.

    Programs take them in turns: so those that run at once read from all ranks at once.
    """
    at = [
        ((n + 0.5) / len(some), which, row)
        for which, some in enumerate(rows)
        for n, row in enumerate(some)
    ]
    return [row for *_, row in sorted(at)]


def _cut_spans(fetches: Sequence[Fetch]) -> list[slice]:
    """What is fetched of a rank's keys, in slices that no fetch cuts."""
    edges = sorted({at for one in fetches for at in (one.source.start, one.source.stop)})
    return [
        slice(a, b)
        for a, b in pairwise(edges)
        if any(one.source.start <= a and b <= one.source.stop for one in fetches)
    ]
