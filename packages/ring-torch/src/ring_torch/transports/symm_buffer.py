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
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ring_torch.buffers import BufferSpec
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import timeout_of

_HEADER = 64  # bytes at the start of a window: the digest of the call its keys belong to
_MOST_VIEWS = 1024
_CHANNEL, _CAPTURE_CHANNEL = 0, 1  # of barriers, which must not be taken for each other

# The window of each group: a fact about the group, which is not ours to extend.
_window_of: WeakKeyDictionary[dist.ProcessGroup, SymmBuffer] = WeakKeyDictionary()


@dataclass
class SymmetricMemory:
    """A buffer of every rank's, equally long, that grows: a header, and room after it."""

    ring: Ranks
    header: int  # bytes, zero at first
    handle: Any = None  # of all ranks' buffers
    _memory: torch.Tensor | None = None
    _in_graphs: bool = False  # whether CUDA graphs hold addresses of this memory
    _kept: list[object] = field(default_factory=list)  # what they hold that no call needs any more
    _views: dict[tuple[int, int, BufferSpec], list[torch.Tensor]] = field(default_factory=dict)

    def reserve(self, size: int) -> bool:
        """Make room for so many bytes after the header, on all ranks alike; whether it is new.

        What a CUDA graph holds, as it is captured, stays.
        """
        if self._memory is not None and self._memory.numel() >= self.header + size:
            self._in_graphs = self._in_graphs or is_capturing()
            return False
        with torch.inference_mode(mode=False):  # passes that train will write there
            self._reserve_new(size)
        return True

    def _reserve_new(self, size: int) -> None:
        """Take new memory, once nobody uses the old."""
        import torch.distributed._symmetric_memory as symm_mem

        assert self.ring.group is not None
        torch.cuda.synchronize()  # peers may still be reading the old one
        dist.barrier(group=self.ring.group)
        if self._in_graphs:
            self._kept.append((self._memory, self.handle))
        self._views.clear()
        self._memory, self.handle, self._in_graphs = None, None, False
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = symm_mem.empty(self.header + size, dtype=torch.uint8, device=device)
        self._memory[: self.header].zero_()
        torch.cuda.synchronize()  # it is zero before any peer writes there
        self.handle = symm_mem.rendezvous(self._memory, self.ring.group)

    def headers(self) -> list[torch.Tensor]:
        """Each rank's header, int64."""
        words = self.header // torch.int64.itemsize
        with torch.inference_mode(mode=False):
            return [
                self.handle.get_buffer(rank, (words,), torch.int64, 0)
                for rank in range(self.ring.size)
            ]

    def views(self, rank: int, start: int, packing: BufferSpec) -> list[torch.Tensor]:
        """The tensors of a message in a rank's buffer, behind the header."""
        key = (rank, start, packing)
        if len(self._views) > _MOST_VIEWS:
            self._views.clear()
        if key not in self._views:
            with torch.inference_mode(mode=False):
                part = self.handle.get_buffer(
                    rank, (packing.size,), torch.uint8, self.header + start
                )
                self._views[key] = packing.views(part)
        return self._views[key]


def symm_buffer_of(ring: Ranks) -> SymmBuffer:
    """A group's window; all ranks are asked when it is first wanted."""
    assert ring.group is not None
    if ring.group not in _window_of:
        _window_of[ring.group] = SymmBuffer(ring)
    return _window_of[ring.group]


def known_buffer(ring: Ranks) -> SymmBuffer | None:
    """A group's window, if its ranks have been asked."""
    return None if ring.group is None else _window_of.get(ring.group)


class SymmBuffer:
    """A buffer of this rank's that its peers read.

    Attributes:
        refusals: Why peers' memory cannot be read, if it cannot.
        stream: Where ranks meet.
        near: For copies out of the own memory.
        far: For copies out of peers' memory, one after the other: they share an engine, which takes
            those of several streams in an order of its own.
    """

    def __init__(self, ring: Ranks) -> None:
        assert ring.group is not None
        self.ring, self.device = ring, torch.cuda.current_device()
        places = [Place(*x) for x in self._gathered(here(self.device))]
        reaches = [int(_reaches(self.device, other, places[ring.rank])) for other in places]
        self.refusals = tuple(refusals(places, self._gathered(reaches)))
        # Ahead of kernels in line for a free multiprocessor.
        self.stream, self.near, self.far = (torch.cuda.Stream(priority=-1) for _ in range(3))
        self.memory = SymmetricMemory(ring, _HEADER)
        self._patience = timeout_of(ring.group, torch.device("cuda"))
        self._free: torch.cuda.Event | None = None  # peers have read all that was put here
        self._left: torch.cuda.Event | None = None  # the same, in the pass that is being captured
        self._headers: list[torch.Tensor] = []

    def _gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, device=torch.device("cuda", self.device))
        every = [torch.empty_like(mine) for _ in range(self.ring.size)]
        dist.all_gather(every, mine, group=self.ring.group)
        found: list[list[int]] = torch.stack(every).tolist()
        return found

    def reserve(self, size: int) -> None:
        """Make room for so many bytes after the header, on all ranks alike."""
        if self.memory.reserve(size):
            self._headers = self.memory.headers()

    def barrier_with_signature(self, digest: int) -> torch.cuda.Event:
        """A barrier of all ranks on the current stream, and after it proof that they mean the same.

        A peer that does not come in time, or comes with another call, ends the process's kernels
        in an error; the host does not wait for either. Returns when all have come: copies may start
        then, and be used once the stream has got past the proof.
        """
        self._headers[self.ring.rank].fill_(digest)
        met = self.barrier()
        same = (torch.cat(self._headers) == digest).all()
        torch._assert_async(same, "ranks of a ring make different calls")  # noqa: SLF001
        return met

    def barrier(self) -> torch.cuda.Event:
        """Another barrier of a pass, whose ranks have met before."""
        self._barrier()
        met: torch.cuda.Event = self.stream.record_event()
        return met

    def stream_for(self, rank: int, *, after: torch.cuda.Event) -> torch.cuda.Stream:
        """Go on on the stream for copies from a rank, once something has happened on another."""
        stream = self.near if rank == self.ring.rank else self.far
        stream.wait_event(after)
        torch.cuda.set_stream(stream)
        return stream

    def release(self, after: Sequence[torch.cuda.Event]) -> None:
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
        self.memory.handle.barrier(
            channel=_CAPTURE_CHANNEL if is_capturing() else _CHANNEL,
            timeout_ms=self._patience // timedelta(milliseconds=1),
        )

    def join(self, stream: torch.cuda.Stream) -> None:
        """While a CUDA graph is captured, a stream has to wait for all that it set off."""
        if self._left is not None and is_capturing():
            stream.wait_event(self._left)

    def wait_reusable(self) -> None:
        """Let the current stream wait until all have read what the passes before put here."""
        if is_capturing():
            self._barrier()
            self._left = None
        elif self._free is not None:
            torch.cuda.current_stream(self.device).wait_event(self._free)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Go back to a stream at the end, whatever happens: cheaper than a context for each."""
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


class Place(NamedTuple):
    """Where a rank computes: digests of what tells hosts and GPUs apart, not of their names."""

    host: int
    gpu: int
    device: int  # among the GPUs that its process sees


def here(device: int) -> Place:
    """The place of this process."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return Place(_number(_host()), _number(gpu), device)


def _host() -> str:
    """What tells this host's running system from any other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _number(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _reaches(device: int, other: Place, mine: Place) -> bool:
    """Whether a GPU reads another's memory; of one that this process does not see, torch says."""
    if other.host != mine.host or other.gpu == mine.gpu:
        return True
    seen = {here(n).gpu: n for n in range(torch.cuda.device_count())}
    return other.gpu not in seen or torch.cuda.can_device_access_peer(device, seen[other.gpu])


def refusals(places: Sequence[Place], reaches: Sequence[Sequence[int]]) -> Iterator[str]:
    """Why ranks at these places cannot copy out of each other's memory, the same on all.

    Args:
        places: Each rank's.
        reaches: For each rank, whether it reaches the memory of each.
    """
    overlapped = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    if len({place.host for place in places}) > 1:
        yield "the ranks are on several hosts"
        return
    if len({place.gpu for place in places}) < len(places):
        yield "several ranks share a GPU"
    elif len({place.device for place in places}) < len(places) and not overlapped:
        yield (
            "every rank calls its GPU by the same number, which PyTorch's symmetric memory takes "
            "for one GPU: let each process see all GPUs, or set "
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
        )
    elif not all(map(all, reaches)):
        yield "the ranks' GPUs do not reach each other's memory"
