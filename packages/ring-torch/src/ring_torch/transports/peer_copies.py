"""Sessions of ``symm_mem`` for long passes: copy engines read K/V and dK/dV from peers' memory.

They take no multiprocessor from the kernels that run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from ring_core import Plan, longest_gather
from ring_core.programs.intervals import Interval, union
from ring_torch.accumulate import write_keys
from ring_torch.buffers import KeyGradBuffer, KVPayload, flat
from ring_torch.call import (
    Call,
    IndexMap,
    PendingGrads,
    PendingKV,
    SessionSpec,
    nothing,
)
from ring_torch.optional import has_triton
from ring_torch.records import Inputs, head_group
from ring_torch.transports.api import (
    add_staged,
    note_reads,
    program_of,
    requests_to,
    staging_for,
)
from ring_torch.transports.symm_buffer import (
    MOST_RANKS,
    SymmBuffer,
    copy,
    on_stream,
)

#: The stream of a copy, and an event recorded behind it.
Done = tuple[torch.cuda.Stream, torch.cuda.Event]

_MOST_BYTES = 64 << 20  # bytes of gathered keys up to which one kernel beats copy engines


@dataclass(frozen=True)
class PeerCopies:
    """A :class:`ring_torch.call.GatherSession` of copies out of peers' symmetric buffers.

    A rank's ``buffer`` holds its K/V, one group of heads after the other, and behind them,
    group by group, its dK/dV of the keys that it fetched.
    """

    call: Call
    spec: SessionSpec
    buffer: SymmBuffer
    grad_bytes: int  # bytes of a group's dK/dV, on the rank that fetches most
    digest: int  # identifies this pass of this call

    def fetch(
        self, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Write this rank's K/V into its buffer, and copy from all ranks' buffers, fetch by fetch.

        Only tokens that somebody fetches are written. This rank's own fetches read the call's
        tensors with a kernel; with several groups they go through the buffer instead, as copies
        by an engine do not delay kernels of other groups.
        """
        buffer, (gather, keys, groups, *_) = self.buffer, self.spec
        message, rank = keys.message, self.call.ranks.rank
        group_numbers, through_buffer = range(groups), groups > 1
        requests = [fetch for _, fetch in requests_to(self.call.plan, rank, like=gather)]
        own_fetches = [x for x in gather.fetches if through_buffer and x.rank == rank]
        sources = [x.source for x in (*requests, *own_fetches)]
        spans = [slice(*x) for x in union(Interval(y.start, y.stop) for y in sources)]
        # Where peers read: the same offsets in every rank's memory, so no address is sent.
        own = [buffer.memory.views(rank, n * message.size, message) for n in group_numbers]
        # New tensors each pass: autograd may keep those of the pass before.
        tensors = [
            [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own[n]]
            for n in group_numbers
        ]
        main = torch.cuda.current_stream(buffer.device)
        # K/V are computed, and the memory of `tensors` is free, when the caller's stream is here.
        ready = main.record_event()
        # They are queued ahead of copies that do not wait for them.
        meanwhile()
        with on_stream(main):
            torch.cuda.set_stream(buffer.stream)
            buffer.stream.wait_event(ready)
            # Peers have read what the pass before put into the buffer: now it may be overwritten.
            buffer.wait_reusable()
            for n, span in product(group_numbers, spans):
                _write_keys(keys, [x[:, span] for x in own[n]], head_group(inputs, n, groups), span)
            # After `written` all ranks' K/V lie in their buffers and may be copied; after
            # `compared` they are known to be of this call and may be used.
            written = buffer.barrier_with_signature(self.digest)
            compared = buffer.stream.record_event()
        pending: list[PendingKV] = []
        all_copies: list[Done] = []
        for n in group_numbers:
            # Queue the copies of a group behind the barrier. They run beside kernels of the groups
            # before, into tensors of their own, while peers copy from this rank's buffer.
            copies: list[Done] = []
            with on_stream(main):
                for fetch in gather.fetches:
                    destinations = [x[:, fetch.target] for x in tensors[n]]
                    # Own K/V need not wait for peers; they are packed on the stream for own memory.
                    if fetch.rank == rank and not through_buffer:
                        stream = buffer.stream_for(rank, after=ready)
                        _write_keys(keys, destinations, inputs, fetch.source)
                    else:
                        # One copy after the other, in the order in which kernels need them.
                        stream = buffer.stream_for(fetch.rank, after=written)
                        note_reads(destinations if fetch.rank != rank else ())
                        views = buffer.memory.views(fetch.rank, n * message.size, message)
                        for destination, source in zip(destinations, views, strict=True):
                            copy(destination, source[:, fetch.source])
                    copies.append((stream, stream.record_event()))
                all_copies += copies
                # After the last copy this rank needs nobody's buffer any more; when all ranks have
                # said so, the next pass may write.
                if n + 1 == groups:
                    buffer.release(_last(all_copies))
            pending.append(PendingKV(tensors[n], partial(_wait, main, compared, copies)))
            # Hand a group out when the next one's copies are queued: transfers stay one group ahead
            # of kernels, and the first kernel does not wait until the host has queued all copies.
            if n > 0:
                yield pending[n - 1]
        yield pending[-1]
        buffer.join(main)

    def accumulators(self, *, zero: bool) -> list[Tensor]:
        """Return the places of dK/dV in the buffer, where the owners of the keys will read them.

        They are filled with zeros if ``zero``, and uninitialised otherwise.
        """
        # Peers may still be reading what the pass before put there.
        self.buffer.wait_reusable()
        length, call = self.spec.gather.length, self.call
        buffers = [
            self._grads_of(call.ranks.rank, n, length)
            if length > 0
            else torch.empty(0, dtype=call.acc_dtype, device=call.device)  # it gathers no keys
            for n in range(self.spec.groups)
        ]
        return [x.zero_() for x in buffers] if zero else buffers

    def return_grads(
        self, grads: Tensor, group: int, *, overlapped: bool, before_last_item: bool | None = None
    ) -> PendingGrads:
        """Let the owners read a group's dK/dV, and start reading this rank's from its peers.

        Beside kernels copy engines bring them into staging tensors. Otherwise nothing would be
        hidden by that: a kernel adds them straight out of the peers' memory, in
        :data:`ring_torch.transports.api.PendingGrads`. Without Triton, which that kernel needs,
        they are always copied.
        """
        buffer, plan, (gather, _, groups, sums, _) = self.buffer, self.call.plan, self.spec
        requests = requests_to(
            plan, self.call.ranks.rank, like=gather, before_last_item=before_last_item
        )
        peer_sums = [
            sums.strided_views(self._grads_of(peer, group, length), length, fetch.target)
            for peer, fetch in requests
            for length in [program_of(plan, peer, like=gather).length]
        ]
        note_reads(x for peer_parts in peer_sums for x in peer_parts)
        is_staged = overlapped or not has_triton()
        staged = (
            [staging_for(sums, grads, fetch) for _, fetch in requests] if is_staged else peer_sums
        )
        # This rank's sums are final when the caller's stream is here.
        main = torch.cuda.current_stream(buffer.device)
        ready = main.record_event()
        # Each group has one barrier, or two where its first part leaves before the last launch.
        is_first = group == 0 and before_last_item is not False
        is_last = group + 1 == groups and not before_last_item
        with on_stream(main):
            torch.cuda.set_stream(buffer.stream)
            buffer.stream.wait_event(ready)
            # After `written` all ranks' sums of this group (or of its first part) are final. The
            # first barrier of the pass compares calls, and `copies` begins with its end.
            written = buffer.barrier_with_signature(self.digest) if is_first else buffer.barrier()
            copies = [(buffer.stream, buffer.stream.record_event())]
            if is_staged:
                # In flight beside the next kernels: copies into staging tensors, which nobody else
                # uses, while peers copy this rank's sums of their keys.
                for (peer, _), destinations, peer_parts in zip(
                    requests, staged, peer_sums, strict=True
                ):
                    stream = buffer.stream_for(peer, after=written)
                    for destination, source in zip(destinations, peer_parts, strict=True):
                        copy(destination, source)
                    copies.append((stream, stream.record_event()))
            # After the last copies of the pass nobody's buffer is needed any more.
            if is_last and is_staged:
                buffer.release(_last(copies))
        buffer.join(main)

        def add_to(total: Tensor, length: int, index_map: IndexMap) -> None:
            """Wait for the peers' sums and add them to ``total``."""
            # The kernels of the caller's stream go on when the copies are there and calls compared.
            for event in _last(copies):
                main.wait_event(event)
            # Parts of several peers for the same keys are added by one kernel, in the peers' order.
            by_span: dict[tuple[int, int], list[list[Tensor]]] = {}
            for (_, fetch), peer_parts in zip(requests, staged, strict=True):
                by_span.setdefault((fetch.source.start, fetch.source.stop), []).append(peer_parts)
            for span, all_parts in by_span.items():
                add_staged(sums.strided_views(total, length, index_map(slice(*span))), all_parts)
            # If that kernel read peers' memory itself, peers may write again only behind it.
            if is_last and not is_staged:
                with on_stream(main):
                    buffer.release([main.record_event()])
                buffer.join(main)

        return add_to

    def _grads_of(self, rank: int, group: int, length: int) -> Tensor:
        """Return where a rank's dK/dV of a group's ``length`` fetched keys lie for their owners."""
        _, keys, groups, sums, _ = self.spec
        packing = flat(sums.numel(length), self.call.acc_dtype)
        start = groups * keys.message.size + group * self.grad_bytes
        return self.buffer.memory.views(rank, start, packing)[0]


def _write_keys(keys: KVPayload, message: Sequence[Tensor], inputs: Inputs, span: slice) -> None:
    """Copy this rank's K/V, and segment ids if any, of a span of tokens into a message's tensors.

    ``message`` are tensors shaped as :attr:`KVPayload.message`, for as many tokens as ``span`` has.
    """
    write_keys(keys, inputs.k[:, span], inputs.v[:, span], message[0])
    if inputs.k_ids is not None:
        message[1].copy_(inputs.k_ids[:, span])


@lru_cache(maxsize=256)
def grad_bytes_of(plan: Plan, keys: KVPayload, dtype: torch.dtype, splits: bool, tile: int) -> int:
    """Return the bytes of a group's dK/dV sums on the rank that fetches most keys."""
    longest = longest_gather(plan, splits=splits, tile=tile).length
    return flat(KeyGradBuffer(keys, head_major=False).numel(longest), dtype).size


@lru_cache(maxsize=256)
def fits_one_kernel(plan: Plan, keys: KVPayload, groups: int, splits: bool, tile: int = 1) -> bool:
    """Return True if passes over gathered keys exchange in one kernel each way, on all ranks alike.

    The gathered K/V have to be few, not float64, of a single group of heads, without segment ids
    and in rows of 16-byte words, and no work may be over own keys in place. There are at most
    ``MOST_RANKS`` ranks, with Triton and NVIDIA GPUs.
    """
    longest = longest_gather(plan, splits=splits, tile=tile)
    fits = 0 < keys.size(longest.length) <= _MOST_BYTES and plan.cp_size <= MOST_RANKS
    plain = keys.dtype != torch.float64 and not keys.segments and groups == 1
    aligned = keys.width * keys.dtype.itemsize % 16 == 0
    runs = has_triton() and torch.version.hip is None  # the kernels read an NVIDIA timer
    return fits and plain and aligned and not longest.in_place and runs


def _wait(
    stream: torch.cuda.Stream,
    compared: torch.cuda.Event,
    copies: Sequence[Done],
    fetches: int | None,
) -> None:
    """Let a stream wait for the first ``fetches`` copies (``None``: all).

    It also waits for ``compared``, the end of the comparison of calls: copies of another call's K/V
    must not be used.
    """
    for event in (compared, *_last(copies[:fetches])):
        stream.wait_event(event)


def _last(copies: Sequence[Done]) -> list[torch.cuda.Event]:
    """Return the last event of each stream: it follows those before."""
    return list(dict(copies).values())
