"""Keys and their gradients, copied out of the peers' windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from types import ModuleType

import torch

from ring_core import GatherProgram, Plan, gather_program, longest_gather
from ring_torch.buffers import flat
from ring_torch.optional import has_triton
from ring_torch.payload import KeyGradBuffer, KVPayload
from ring_torch.records import Inputs, head_group
from ring_torch.transports.api import (
    PendingGrads,
    PendingKV,
    SessionSpec,
    Where,
    add_staged,
    note_reads,
    requests_to,
    room_for,
    spans_of,
    write_keys,
)
from ring_torch.transports.symm_buffer import SymmBuffer, on_stream

Event = torch.cuda.Event
Stream = torch.cuda.Stream
Done = tuple[Stream, Event]  # a copy, by the stream it was made on

MOST_RANKS = 32  # that exchange in one kernel
_MOST_BYTES = 64 << 20  # bytes of gathered keys up to which one kernel beats copy engines


@dataclass(frozen=True)
class PeerCopies:
    """A :class:`ring_torch.transports.api.GatherSession` that copies out of the peers' windows.

    A window holds a rank's keys, a group of heads after the other, and behind them the gradients of
    what it fetched.
    """

    spec: SessionSpec
    window: SymmBuffer
    room: int  # bytes for the sums of a group's gradients
    digest: int  # what tells this pass of this call from any other

    def fetch(self, gather: GatherProgram, inputs: Inputs) -> Iterator[PendingKV]:
        """Put the own keys into the window, and copy those of all ranks, fetch by fetch.

        Only those go into the window that are fetched from it. The own ones are not, unless there
        are kernels of other groups, which a copy does not hold up.
        """
        window, keys, groups = self.window, self.spec.keys, self.spec.groups
        message, rank = keys.message, self.spec.ranks.rank
        every, in_window = range(groups), groups > 1
        requests = [
            one for _, one in requests_to(self.spec.plan, self.spec.ranks.rank, own=gather.own)
        ]
        spans = spans_of([*requests, *(x for x in gather.fetches if in_window and x.rank == rank)])
        own = [window.memory.views(rank, n * message.size, message) for n in every]
        tensors = [
            [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own[n]] for n in every
        ]
        main = torch.cuda.current_stream(window.device)
        ready = main.record_event()
        with on_stream(main):
            torch.cuda.set_stream(window.stream)
            window.stream.wait_event(ready)
            window.wait_reusable()
            for n, span in product(every, spans):
                write_keys(keys, [x[:, span] for x in own[n]], head_group(inputs, n, groups), span)
            met = window.barrier_with_signature(self.digest)
            same = window.stream.record_event()
        pending: list[PendingKV] = []
        copied: list[Done] = []
        for n in every:
            with on_stream(main):
                here = None if in_window else (inputs, ready)
                done = self._fetch_group(gather, n, tensors[n], met, here)
                copied += done
                if n + 1 == groups:
                    window.release(_last(copied))
            pending.append(PendingKV(tensors[n], partial(_wait, main, same, done)))
            if n > 0:  # one group ahead: no kernel is to wait until the host has asked for all
                yield pending[n - 1]
        yield pending[-1]
        window.join(main)

    def _fetch_group(
        self, gather: GatherProgram, group: int, tensors: list[torch.Tensor], met: Event,
        here: tuple[Inputs, Event] | None,
    ) -> list[Done]:  # fmt: skip
        """Copy a group's keys, fetch by fetch; the own ones from ``here`` if they are there."""
        window, keys = self.window, self.spec.keys
        done = []
        for one in gather.fetches:
            places = [x[:, one.target] for x in tensors]
            if here is not None and one.rank == self.spec.ranks.rank:
                inputs, ready = here
                stream = window.stream_for(one.rank, after=ready)
                write_keys(keys, places, inputs, one.source)
            else:
                stream = window.stream_for(one.rank, after=met)
                theirs = window.memory.views(one.rank, group * keys.message.size, keys.message)
                note_reads(places if one.rank != self.spec.ranks.rank else ())
                for place, source in zip(places, theirs, strict=True):
                    copy(place, source[:, one.source])
            done.append((stream, stream.record_event()))
        return done

    def accumulators(
        self, gather: GatherProgram, sums: KeyGradBuffer, *, zero: bool
    ) -> list[torch.Tensor]:
        """Room in the window, where their owners will fetch them."""
        self.window.wait_reusable()
        spec, every = self.spec, range(self.spec.groups)
        if gather.length == 0:  # nobody fetches any
            return [torch.empty(0, dtype=spec.acc_dtype, device=spec.device) for _ in every]
        room = [self._grads_of(spec.ranks.rank, n, sums, gather.length) for n in every]
        return [x.zero_() for x in room] if zero else room

    def return_grads(
        self, gather: GatherProgram, sums: KeyGradBuffer, grads: torch.Tensor, group: int, *, overlapped: bool,
        early: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """Let the owners fetch, and fetch what is this rank's.

        Beside kernels copy engines do; else it is added out of the peers' memory, in one pass.
        """
        window, plan = self.window, self.spec.plan
        requests = requests_to(self.spec.plan, self.spec.ranks.rank, own=gather.own, early=early)
        theirs = []
        for peer, one in requests:
            length = gather_program(plan, peer, own=gather.own).length
            theirs.append(sums.parts(self._grads_of(peer, group, sums, length), length, one.target))
        note_reads(x for parts in theirs for x in parts)
        copied = overlapped or not has_triton()
        staged = [room_for(sums, grads, one) for _, one in requests] if copied else theirs
        main = torch.cuda.current_stream(window.device)
        ready = main.record_event()
        first, last = group == 0 and early is not False, group + 1 == self.spec.groups and not early
        with on_stream(main):
            torch.cuda.set_stream(window.stream)
            window.stream.wait_event(ready)
            met = window.barrier_with_signature(self.digest) if first else window.barrier()
            home = [(window.stream, window.stream.record_event())]
            if copied:
                for (peer, _), places, parts in zip(requests, staged, theirs, strict=True):
                    stream = window.stream_for(peer, after=met)
                    for place, part in zip(places, parts, strict=True):
                        copy(place, part)
                    home.append((stream, stream.record_event()))
            if last and copied:
                window.release(_last(home))
        window.join(main)

        def add_to(total: torch.Tensor, length: int, where: Where) -> None:
            for event in _last(home):
                main.wait_event(event)
            came: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
            for (_, one), parts in zip(requests, staged, strict=True):
                came.setdefault((one.source.start, one.source.stop), []).append(parts)
            for span, all_parts in came.items():
                add_staged(sums.parts(total, length, where(slice(*span))), all_parts)
            if last and not copied:
                with on_stream(main):
                    window.release([main.record_event()])
                window.join(main)

        return add_to

    def _grads_of(self, rank: int, group: int, sums: KeyGradBuffer, length: int) -> torch.Tensor:
        packing = flat(sums.numel(length), self.spec.acc_dtype)
        start = self.spec.groups * self.spec.keys.message.size + group * self.room
        return self.window.memory.views(rank, start, packing)[0]


@lru_cache(maxsize=256)
def room_of(plan: Plan, keys: KVPayload, dtype: torch.dtype) -> int:
    """Bytes that the sums of a group's gradients take on the rank that fetches most."""
    longest = longest_gather(plan).length
    return flat(KeyGradBuffer(keys, head_major=False).numel(longest), dtype).size


@lru_cache(maxsize=256)
def fits_one_kernel(plan: Plan, keys: KVPayload, groups: int) -> bool:
    """Whether passes over gathered keys take one kernel each way, on all ranks alike.

    Keys of one group of heads, in words of 16 bytes, without ids and all in one buffer.
    """
    longest = longest_gather(plan)
    fits = 0 < keys.size(longest.length) <= _MOST_BYTES and plan.cp_size <= MOST_RANKS
    plain = keys.dtype != torch.float64 and not keys.segments and groups == 1
    aligned = keys.width * keys.dtype.itemsize % 16 == 0
    runs = has_triton() and torch.version.hip is None  # the kernels read NVIDIA's clock
    return fits and plain and aligned and not longest.in_place and runs


def _wait(stream: Stream, same: Event, done: Sequence[Done], fetches: int | None) -> None:
    """Let a stream wait for so many copies (``None``: all), and for the proof of their meaning."""
    for event in (same, *_last(done[:fetches])):
        stream.wait_event(event)


def _last(done: Sequence[Done]) -> list[Event]:
    """The last of each stream's events, which follow those before."""
    return list(dict(done).values())


_MOST_STRIDE = (1 << 31) - 1  # bytes from row to row that an engine steps over


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, on the current stream, ``[rows, ...]`` whose rows are contiguous and may lie apart.

    In one go, if torch brings NVIDIA's ``cuda.bindings`` as it does on Linux, else row by row.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source)
        return
    strides = [x.stride(0) * x.itemsize for x in (target, source)]
    module = _cuda()
    if module is None or max(strides) > _MOST_STRIDE:
        for to, x in zip(target.unbind(), source.unbind(), strict=True):
            to.copy_(x)
        return
    width = target[0].numel() * target.itemsize
    (error,) = module.cudaMemcpy2DAsync(
        target.data_ptr(), strides[0], source.data_ptr(), strides[1], width, target.shape[0],
        module.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
        torch.cuda.current_stream(target.device).cuda_stream,
    )  # fmt: skip
    if error != module.cudaError_t.cudaSuccess:
        raise RuntimeError(f"a copy out of a peer's memory failed: {error}")


@cache
def _cuda() -> ModuleType | None:
    """NVIDIA's bindings of the CUDA runtime, if there are any."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return None
    return import_module("cuda.bindings.runtime")
