"""Copies out of the peers' memory: for GPUs of one host that reach each other (NVLink, PCIe).

Every rank keeps a buffer that its peers can read (PyTorch's symmetric memory). A rank puts its keys
there, all meet at a barrier on a stream of their own, and then each copies what it needs. Copy
engines do that: no multiprocessor is taken from the kernels that run meanwhile. A second barrier
says that all are done, so that the next call may write.

A CUDA graph cannot wait for events of passes outside of it, and these run on streams that it does
not follow. So a captured pass begins with a barrier of its own kind, which all reach when what was
started before is done, and ends when all are done.
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
from ring_torch._comm import Packing, Ring
from ring_torch._held import is_capturing

_HEADER = 64  # bytes at the start of a window: the digest of the call its keys belong to
_CHANNEL, _CAPTURED = 0, 1  # of barriers, which must not be taken for each other
_MOST_VIEWS = 1024

# The window of each group: a fact about the group, which is not ours to extend.
_windows: WeakKeyDictionary[dist.ProcessGroup, Window] = WeakKeyDictionary()


def window_of(ring: Ring) -> Window:
    """A group's window; all ranks are asked when it is first wanted."""
    assert ring.group is not None
    if ring.group not in _windows:
        _windows[ring.group] = Window(ring)
    return _windows[ring.group]


@dataclass
class Window:
    """A buffer of this rank's that its peers read."""

    ring: Ring
    works: bool = field(init=False)
    device: int = field(init=False)
    stream: torch.cuda.Stream = field(init=False)  # where ranks meet
    near: torch.cuda.Stream = field(init=False)  # for copies out of the own memory
    #: For copies out of peers' memory, one after the other: they share an engine, which takes those
    #: of several streams in an order of its own.
    far: torch.cuda.Stream = field(init=False)
    _handle: Any = None
    _memory: Tensor | None = None
    _patience: int = 0  # milliseconds
    _free: torch.cuda.Event | None = None  # peers have read all that was put here
    _left: torch.cuda.Event | None = None  # the same, in the pass that is being captured
    _in_graphs: bool = False  # whether CUDA graphs hold addresses of this memory
    _kept: list[object] = field(default_factory=list)  # what they hold that no call needs any more
    _views: dict[tuple[int, int, Packing], list[Tensor]] = field(default_factory=dict)
    _tables: dict[tuple[Gather, Packing], tuple[Tensor, int]] = field(default_factory=dict)
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
        # Ahead of kernels in line for a free multiprocessor.
        self.stream, self.near, self.far = (torch.cuda.Stream(priority=-1) for _ in range(3))
        self._patience = _timeout(self.ring.group) // timedelta(milliseconds=1)
        self.works = (
            len(set(places)) == self.ring.size
            and {host for host, _ in places} == {here}
            and all(torch.cuda.can_device_access_peer(device, other) for other in peers)
        )

    def reserve(self, size: int) -> None:
        """Make room for so many bytes after the header, on all ranks alike."""
        import torch.distributed._symmetric_memory as symm_mem

        if self._memory is not None and self._memory.numel() >= _HEADER + size:
            return
        torch.cuda.synchronize()  # peers may still be reading the old one
        dist.barrier(group=self.ring.group)
        if self._in_graphs:
            self._kept.append((self._memory, self._handle))
        self._views.clear()
        self._tables.clear()
        self._headers.clear()
        self._memory, self._handle, self._in_graphs = None, None, False
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

    def table(self, gather: Gather, packing: Packing) -> tuple[Tensor, int]:
        """What a rank fetches of the first tensor of messages, as a kernel takes it.

        int64 ``[fetches * B, 3]``: addresses, offsets and lengths in bytes; and the longest.
        """
        key = (gather, packing)
        if len(self._tables) > _MOST_VIEWS:
            self._tables.clear()
        if key not in self._tables:
            rows = []
            for one in gather.fetches:
                theirs = self.views(one.rank, 0, packing)[0]
                token = theirs.stride(1) * theirs.itemsize
                for n, part in enumerate(theirs[:, one.source]):
                    offset = (n * gather.length + one.target.start) * token
                    rows.append([part.data_ptr(), offset, part.shape[0] * token])
            found = torch.tensor(rows, dtype=torch.int64).to(torch.device("cuda", self.device))
            self._tables[key] = found, max((row[2] for row in rows), default=0)
        if is_capturing():
            self._kept.append(self._tables[key])
        return self._tables[key]

    def meet_as(self, digest: int) -> torch.cuda.Event:
        """A barrier of all ranks on the current stream, and after it proof that they mean the same.

        A peer that does not come in time, or comes with another call, ends the process's kernels
        in an error; the host does not wait for either. Returns when all have come: copies may start
        then, and be used once the stream has got past the proof.
        """
        self._headers[self.ring.rank].fill_(digest)
        self._barrier()
        met: torch.cuda.Event = self.stream.record_event()
        same = (torch.cat(self._headers) == digest).all()
        torch._assert_async(same, "ranks of a ring make different calls")  # noqa: SLF001
        return met

    def meet(self) -> torch.cuda.Event:
        """Another barrier of a pass, whose ranks have met before."""
        self._barrier()
        met: torch.cuda.Event = self.stream.record_event()
        return met

    def copying(self, rank: int, *, after: torch.cuda.Event) -> torch.cuda.Stream:
        """Go on on the stream for copies from a rank, once something has happened on another."""
        stream = self.near if rank == self.ring.rank else self.far
        stream.wait_event(after)
        torch.cuda.set_stream(stream)
        return stream

    def leave(self, after: Sequence[torch.cuda.Event]) -> None:
        """All have read once these have happened: whoever writes next may."""
        torch.cuda.set_stream(self.stream)
        for event in after:
            self.stream.wait_event(event)
        self._barrier()
        if is_capturing():
            self._left = self.stream.record_event()
        else:
            self._free = self.stream.record_event()

    def _barrier(self) -> None:
        channel = _CAPTURED if is_capturing() else _CHANNEL
        self._handle.barrier(channel=channel, timeout_ms=self._patience)

    def join(self, stream: torch.cuda.Stream) -> None:
        """While a CUDA graph is captured, a stream has to wait for all that it set off."""
        if self._left is not None and is_capturing():
            stream.wait_event(self._left)

    def wait_free(self) -> None:
        """Let the current stream wait until all have read what the passes before put here."""
        if is_capturing():
            self._barrier()
            self._left, self._in_graphs = None, True
        elif self._free is not None:
            torch.cuda.current_stream(self.device).wait_event(self._free)


@contextmanager
def restored(stream: torch.cuda.Stream) -> Iterator[None]:
    """Go back to a stream at the end, whatever happens: cheaper than a context for each."""
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


def _host() -> int:
    """A number for the name of this host."""
    name = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()
    return int.from_bytes(name, "little", signed=True)


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's members wait for each other."""
    timeout: timedelta = group._get_backend(torch.device("cuda")).options._timeout  # noqa: SLF001
    return timeout
