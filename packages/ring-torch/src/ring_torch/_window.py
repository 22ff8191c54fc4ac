"""Copies out of the peers' memory: for GPUs of one host that reach each other (NVLink, PCIe).

Every rank keeps a buffer that its peers can read (PyTorch's symmetric memory). A rank puts its keys
there, all meet at a barrier on a stream of their own, and then each copies what it needs. Copy
engines do that: no multiprocessor is taken from the kernels that run meanwhile. A second barrier
says that all are done, so that the next call may write.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Gather
from ring_torch._call import Call
from ring_torch._comm import Facts, Packing, Ring, agree, has_agreed
from ring_torch._gather import Arriving, Returning, asked_of

_HEADER = 64  # bytes at the start of a window: the digest of the call its keys belong to
_CHANNEL = 0

# The window of each group: a fact about the group, which is not ours to extend.
_windows: WeakKeyDictionary[dist.ProcessGroup, Window] = WeakKeyDictionary()


def reaches(ring: Ring) -> bool:
    """Whether all ranks are on one host and can read each other's memory; asked once a group."""
    assert ring.group is not None
    if ring.group not in _windows:
        _windows[ring.group] = Window(ring)
    return _windows[ring.group].works


@dataclass
class Window:
    """A buffer of this rank's that its peers read."""

    ring: Ring
    works: bool = field(init=False)
    _handle: Any = None
    _memory: Tensor | None = None
    _patience: int = 0  # milliseconds
    _stream: torch.cuda.Stream | None = None
    _free: torch.cuda.Event | None = None  # peers have read all that was put here
    _views: dict[tuple[int, int, Packing], list[Tensor]] = field(default_factory=dict)
    _headers: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        device, here = torch.cuda.current_device(), socket.gethostname()
        places: list[Any] = [None] * self.ring.size
        dist.all_gather_object(places, (here, device), group=self.ring.group)
        peers = [other for _, other in places if other != device]
        assert self.ring.group is not None
        self._patience = _timeout(self.ring.group) // timedelta(milliseconds=1)
        self.works = (
            len(set(places)) == self.ring.size
            and {host for host, _ in places} == {here}
            and all(torch.cuda.can_device_access_peer(device, other) for other in peers)
        )

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where copies run; ahead of kernels in line for a free multiprocessor."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        return self._stream

    def reserve(self, size: int) -> None:
        """Make room for so many bytes after the header, on all ranks alike."""
        import torch.distributed._symmetric_memory as symm_mem

        if self._memory is not None and self._memory.numel() >= _HEADER + size:
            return
        torch.cuda.synchronize()  # peers may still be reading the old one
        dist.barrier(group=self.ring.group)
        self._views.clear()
        self._headers.clear()
        self._memory = self._handle = None
        self._memory = symm_mem.empty(
            _HEADER + size,
            dtype=torch.uint8,
            device=torch.device("cuda", torch.cuda.current_device()),
        )
        assert self.ring.group is not None
        self._handle = symm_mem.rendezvous(self._memory, self.ring.group)
        self._headers = [
            self._handle.get_buffer(rank, (1,), torch.int64, 0) for rank in range(self.ring.size)
        ]

    def views(self, rank: int, start: int, packing: Packing) -> list[Tensor]:
        """The tensors of a message in a rank's window."""
        key = (rank, start, packing)
        if key not in self._views:
            at = _HEADER + start
            part = self._handle.get_buffer(rank, (packing.size,), torch.uint8, at)
            self._views[key] = packing.views(part)
        return self._views[key]

    def meet_as(self, digest: int) -> None:
        """A barrier of all ranks on the current stream, and proof that they mean the same.

        A peer that does not come in time, or comes with another call, ends the process's kernels
        in an error; the host does not wait for either.
        """
        self._headers[self.ring.rank].fill_(digest)
        self._barrier()
        same = (torch.cat(self._headers) == digest).all()
        torch._assert_async(same, "ranks of a ring make different calls")  # noqa: SLF001

    def leave(self) -> None:
        """All have read: whoever writes next may."""
        self._barrier()
        self._free = torch.cuda.current_stream().record_event()

    def _barrier(self) -> None:
        self._handle.barrier(channel=_CHANNEL, timeout_ms=self._patience)

    def wait_free(self) -> None:
        """Let the current stream wait until all have read."""
        if self._free is not None:
            torch.cuda.current_stream().wait_event(self._free)


@dataclass(frozen=True)
class Pulls:
    """A :class:`ring_torch._gather.Carrier` that copies out of the peers' windows.

    A window holds a rank's keys, and behind them the gradients of what it fetched.
    """

    call: Call
    window: Window
    keys: Packing
    digest: int  # what tells this pass of this call from any other

    def fetch(self, gather: Gather, own: Sequence[Tensor]) -> Arriving:
        """Put the own keys into the window, and copy those of others, fetch by fetch."""
        window, rank = self.window, self.call.ring.rank
        tensors = [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own]
        main = torch.cuda.current_stream()
        ready = main.record_event()
        with torch.cuda.stream(window.stream):
            window.stream.wait_event(ready)
            for view, x in zip(self._keys_of(rank), own, strict=True):
                view.copy_(x)
            window.meet_as(self.digest)
            arrived = [window.stream.record_event()]
            for one in gather.fetches:
                theirs = own if one.rank == rank else self._keys_of(one.rank)
                for x, source in zip(tensors, theirs, strict=True):
                    _copy(x[:, one.target], source[:, one.source])
                arrived.append(window.stream.record_event())
            window.leave()

        return Arriving(
            tensors,
            lambda fetches: main.wait_event(arrived[fetches]) if fetches else None,
            lambda: main.wait_event(arrived[-1]),
        )

    def accumulators(self, gather: Gather) -> list[Tensor]:
        """Room in the window, where their owners will fetch them."""
        self.window.wait_free()
        return self._grads_of(self.call.ring.rank, own=gather.own)

    def send_home(
        self, gather: Gather, grads: Sequence[Tensor], *, early: bool | None = None
    ) -> Returning:
        """Let the owners copy, and copy what is this rank's."""
        window, asked = self.window, asked_of(self.call, own=gather.own, early=early)
        landed = [
            [x.new_empty(x.shape[0], _size(one.source), *x.shape[2:]) for x in grads]
            for _, one in asked
        ]
        main = torch.cuda.current_stream()
        ready = main.record_event()
        with torch.cuda.stream(window.stream):
            window.stream.wait_event(ready)
            window.meet_as(self.digest)
            for (peer, one), places in zip(asked, landed, strict=True):
                theirs = self._grads_of(peer, own=gather.own)
                for place, source in zip(places, theirs, strict=True):
                    _copy(place, source[:, one.target])
            home = window.stream.record_event()
            window.leave()

        def add_to(totals: Sequence[Tensor]) -> None:
            main.wait_event(home)
            for (_, one), parts in zip(asked, landed, strict=True):
                for total, part in zip(totals, parts, strict=True):
                    total[:, one.source].add_(part)

        return Returning(add_to)

    def _keys_of(self, rank: int) -> list[Tensor]:
        return self.window.views(rank, 0, self.keys)

    def _grads_of(self, rank: int, *, own: bool) -> list[Tensor]:
        packing = _grads_packing(self.call, self.keys, rank, own=own)
        return self.window.views(rank, self.keys.size, packing)


def pulls(call: Call, keys: Packing, facts: Facts) -> Pulls:
    """What moves keys in a pass, with room for it in all windows.

    The first time that a group makes such a call, its facts are compared in words and the host
    waits for it; from then on each call's digest travels with its keys.

    Raises:
        RankMismatchError: A peer is making another call.
    """
    assert call.ring.group is not None
    window = _windows[call.ring.group]
    if not has_agreed(call.ring, facts):
        agree(call.ring, call.number, facts, call.device)
    sizes = (_grads_packing(call, keys, rank, own=True).size for rank in range(call.ring.size))
    window.reserve(keys.size + (max(sizes) if call.needs_grad else 0))
    digest = int.from_bytes(facts.numbered(call.number), "little", signed=True)
    return Pulls(call, window, keys, digest)


def _grads_packing(call: Call, keys: Packing, rank: int, *, own: bool) -> Packing:
    """The gradients of what a rank fetches."""
    length = call.plan.gather(rank, own=own).length
    shapes = ((x[0], length, *x[2:]) for x in keys.shapes[:2])
    return Packing.of(*((shape, call.wide) for shape in shapes))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy slices of sequences one by one: each is contiguous, as copy engines need it."""
    for to, x in zip(target.unbind(), source.unbind(), strict=True):
        to.copy_(x)


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's members wait for each other."""
    timeout: timedelta = group._get_backend(torch.device("cuda")).options._timeout  # noqa: SLF001
    return timeout
