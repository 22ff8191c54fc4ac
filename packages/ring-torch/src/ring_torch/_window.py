"""Copies out of the peers' memory: for GPUs of one host that reach each other (NVLink, PCIe).

Every rank keeps a buffer that its peers can read (PyTorch's symmetric memory). A rank puts its keys
there, all meet at a barrier on a stream of their own, and then each copies what it needs. Copy
engines do that: no multiprocessor is taken from the kernels that run meanwhile. A second barrier
says that all are done, so that the next call may write.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import Gather
from ring_torch._call import Call, Inputs
from ring_torch._comm import Facts, Packing, Ring, agree, has_agreed
from ring_torch._gather import Arriving, Returning, Where, add_landed, asked_of, landing
from ring_torch._keys import Keys, Sums

_HEADER = 64  # bytes at the start of a window: the digest of the call its keys belong to
_CHANNEL = 0
_SMALL = 16 << 20  # bytes up to which one strided copy by a kernel beats many by a copy engine
_MOST_VIEWS = 1024
_COPYING = 3  # copies under way at a time: a single one does not fill the links

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
    device: int = field(init=False)
    _handle: Any = None
    _memory: Tensor | None = None
    _patience: int = 0  # milliseconds
    _streams: list[torch.cuda.Stream] = field(default_factory=list)
    _free: torch.cuda.Event | None = None  # peers have read all that was put here
    _views: dict[tuple[int, int, Packing], list[Tensor]] = field(default_factory=dict)
    _headers: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = device = torch.cuda.current_device()
        here = _host()
        place = torch.tensor([here, device], device=torch.device("cuda", device))
        every = [torch.empty_like(place) for _ in range(self.ring.size)]
        dist.all_gather(every, place, group=self.ring.group)
        places = [(host, other) for host, other in torch.stack(every).tolist()]
        peers = [other for _, other in places if other != device]
        assert self.ring.group is not None
        # One to meet on, others to copy on: ahead of kernels in line for a free multiprocessor.
        self._streams = [torch.cuda.Stream(priority=-1) for _ in range(1 + _COPYING)]
        self._patience = _timeout(self.ring.group) // timedelta(milliseconds=1)
        self.works = (
            len(set(places)) == self.ring.size
            and {host for host, _ in places} == {here}
            and all(torch.cuda.can_device_access_peer(device, other) for other in peers)
        )

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where ranks meet."""
        return self._streams[0]

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
            device=torch.device("cuda", self.device),
        )
        assert self.ring.group is not None
        self._handle = symm_mem.rendezvous(self._memory, self.ring.group)
        self._headers = [
            self._handle.get_buffer(rank, (1,), torch.int64, 0) for rank in range(self.ring.size)
        ]

    def views(self, rank: int, start: int, packing: Packing) -> list[Tensor]:
        """The tensors of a message in a rank's window."""
        key = (rank, start, packing)
        if len(self._views) > _MOST_VIEWS:
            self._views.clear()
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

    def copying(self, rank: int, *, after: torch.cuda.Event) -> torch.cuda.Stream:
        """Go on on the stream for copies from a rank, once something has happened on another."""
        stream = self._streams[1 + rank % (len(self._streams) - 1)]
        stream.wait_event(after)
        torch.cuda.set_stream(stream)
        return stream

    def leave(self, after: Sequence[torch.cuda.Event]) -> None:
        """All have read once these have happened: whoever writes next may."""
        torch.cuda.set_stream(self.stream)
        for event in after:
            self.stream.wait_event(event)
        self._barrier()
        self._free = self.stream.record_event()

    def _barrier(self) -> None:
        self._handle.barrier(channel=_CHANNEL, timeout_ms=self._patience)

    def join(self, stream: torch.cuda.Stream) -> None:
        """While a CUDA graph is captured, a stream has to wait for all that it set off."""
        if self._free is not None and torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._free)

    def wait_free(self) -> None:
        """Let the current stream wait until all have read."""
        if self._free is not None:
            torch.cuda.current_stream(self.device).wait_event(self._free)


@dataclass(frozen=True)
class Pulls:
    """A :class:`ring_torch._gather.Carrier` that copies out of the peers' windows.

    A window holds a rank's keys, and behind them the gradients of what it fetched.
    """

    call: Call
    window: Window
    keys: Keys
    digest: int  # what tells this pass of this call from any other

    def fetch(self, gather: Gather, inputs: Inputs) -> Arriving:
        """Put the own keys into the window, and copy those of all ranks, fetch by fetch."""
        window, message = self.window, self.keys.message
        own = window.views(self.call.ring.rank, 0, message)
        tensors = [x.new_empty(x.shape[0], gather.length, *x.shape[2:]) for x in own]
        main = torch.cuda.current_stream(window.device)
        ready = main.record_event()
        with _restored(main):
            torch.cuda.set_stream(window.stream)
            window.stream.wait_event(ready)
            self.keys.write(own, inputs)
            window.meet_as(self.digest)
            arrived = [window.stream.record_event()]
            for one in gather.fetches:
                stream = window.copying(one.rank, after=arrived[0])
                theirs = window.views(one.rank, 0, message)
                for x, source in zip(tensors, theirs, strict=True):
                    _copy(x[:, one.target], source[:, one.source])
                arrived.append(stream.record_event())
            window.leave(arrived)
        window.join(main)

        def wait(fetches: int) -> None:
            for event in arrived[1 : fetches + 1]:
                main.wait_event(event)

        def finish() -> None:
            for event in arrived:
                main.wait_event(event)

        return Arriving(tensors, wait, finish)

    def accumulator(self, gather: Gather, sums: Sums) -> Tensor:
        """Room in the window, where their owners will fetch them."""
        self.window.wait_free()
        return self._grads_of(self.call.ring.rank, sums, gather.length)

    def send_home(
        self, gather: Gather, sums: Sums, grads: Tensor, *, early: bool | None = None
    ) -> Returning:
        """Let the owners copy, and copy what is this rank's."""
        window, plan = self.window, self.call.plan
        asked = asked_of(self.call, own=gather.own, early=early)
        landed = [landing(sums, grads, one) for _, one in asked]
        main = torch.cuda.current_stream(window.device)
        ready = main.record_event()
        with _restored(main):
            torch.cuda.set_stream(window.stream)
            window.stream.wait_event(ready)
            window.meet_as(self.digest)
            home = [window.stream.record_event()]
            for (peer, one), places in zip(asked, landed, strict=True):
                stream = window.copying(peer, after=home[0])
                length = plan.gather(peer, own=gather.own).length
                theirs = self._grads_of(peer, sums, length)
                for place, part in zip(places, sums.parts(theirs, length, one.target), strict=True):
                    _copy(place, part)
                home.append(stream.record_event())
            window.leave(home)
        window.join(main)

        def add_to(total: Tensor, length: int, where: Where) -> None:
            for event in home:
                main.wait_event(event)
            for (_, one), came in zip(asked, landed, strict=True):
                add_landed(sums.parts(total, length, where(one.source)), came)

        return Returning(add_to)

    def _grads_of(self, rank: int, sums: Sums, length: int) -> Tensor:
        packing = _flat(sums, length, self.call.wide)
        return self.window.views(rank, self.keys.message.size, packing)[0]


def pulls(call: Call, keys: Keys, facts: Facts) -> Pulls:
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
    lengths = (call.plan.gather(rank).length for rank in range(call.ring.size))
    grads = _flat(Sums(keys, by_head=False), max(lengths), call.wide).size
    window.reserve(keys.message.size + (grads if call.needs_grad else 0))
    digest = int.from_bytes(facts.numbered(call.number), "little", signed=True)
    return Pulls(call, window, keys, digest)


def _flat(sums: Sums, length: int, dtype: torch.dtype) -> Packing:
    """The sums of gradients of so many tokens."""
    return Packing.of(((sums.numel(length),), dtype))


@contextmanager
def _restored(stream: torch.cuda.Stream) -> Iterator[None]:
    """Go back to a stream at the end, whatever happens: cheaper than a context for each."""
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy in contiguous pieces, as copy engines need it, unless they would be small."""
    contiguous = target.is_contiguous() and source.is_contiguous()
    if contiguous or target.numel() * target.element_size() <= _SMALL:
        target.copy_(source)
        return
    for to, x in zip(target.unbind(), source.unbind(), strict=True):
        _copy(to, x)


def _host() -> int:
    """A number for the name of this host."""
    name = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()
    return int.from_bytes(name, "little", signed=True)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's members wait for each other."""
    timeout: timedelta = group._get_backend(torch.device("cuda")).options._timeout  # noqa: SLF001
    return timeout
