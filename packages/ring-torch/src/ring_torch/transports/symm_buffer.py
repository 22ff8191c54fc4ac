"""Symmetric memory of a group: a buffer on each rank that its peers read, barriers, and copies.

It is for GPUs of one host that reach each other's memory (NVLink, PCIe), and built on PyTorch's
symmetric memory. In a pass a rank writes its K/V into its buffer, all ranks meet at a barrier on a
stream of its own, then each copies what it needs. Copy engines do that: no multiprocessor is
taken from the kernels that run meanwhile. After its copies each rank comes to a second barrier,
after which the next pass may overwrite the buffers.

A CUDA graph cannot wait for events that were recorded outside of it, and passes run on streams that
it does not follow. So a captured pass begins with a barrier of its own, which a rank reaches when
all that it started before is done, and its end waits for the last barrier.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ring_core.base.arguments import not_none
from ring_core.programs.gather import Fetch
from ring_torch.buffers import BufferSpec, KVPayload, flat
from ring_torch.capture import is_capturing
from ring_torch.comm.ranks import Ranks, peer_errors, run_collective
from ring_torch.comm.store import timeout_of

_HEADER_SIZE = 64  # at the start of a buffer: the digest of the call whose K/V it holds
_MOST_VIEWS = 1024
MOST_RANKS = 32  # most ranks that exchange in one kernel; a power of two
#: Least mean bytes of a copy for which it pays to fetch half of the heads by copies: twelve of them
#: hide behind half of the launches of 8k causal tokens on four H200s.
LEAST_COPY = 1 << 20
_MOST_STRIDE = (1 << 31) - 1  # largest pitch in bytes of a two-dimensional copy
SHARED_GPU = "several ranks share a GPU"  # one of the reasons of `refusals`
_CHANNEL, _CAPTURE_CHANNEL = 0, 1  # barriers of captured passes must not meet those of others

# The buffer of each group. Process groups take no attributes of ours, so it is kept here.
_buffer_of: WeakKeyDictionary[dist.ProcessGroup, SymmBuffer] = WeakKeyDictionary()


@dataclass
class SymmetricMemory:
    """A growing buffer of equal size on every rank, which all ranks can read: header, then data."""

    ranks: Ranks
    header: int  # bytes; filled with zeros when allocated
    handle: Any = None  # PyTorch's handle of all ranks' buffers, with their barriers
    _memory: torch.Tensor | None = None
    _views: dict[tuple[int, int, BufferSpec], list[torch.Tensor]] = field(default_factory=dict)

    def reserve(self, size: int) -> bool:
        """Ensure ``size`` bytes after the header; return True if new memory was allocated for that.

        All ranks call it with equal sizes, as growing is a collective. Memory that captured CUDA
        graphs use is kept beside the new one.
        """
        if self._memory is not None and self._memory.numel() >= self.header + size:
            if is_capturing():
                self.ranks.state.captured[id(self.handle)] = self._memory, self.handle
            return False
        import torch.distributed._symmetric_memory as symm_mem

        # Replace the memory by a larger one. All ranks do so together, and the host waits. Passes
        # that train will write there, so it is no inference tensor.
        with torch.inference_mode(mode=False):
            # This rank's copies out of the peers' old memory have ended. After the barrier the
            # peers' have, too, so nobody reads what is freed here.
            torch.cuda.synchronize()
            run_collective(self.ranks, lambda: dist.barrier(self.ranks.group, async_op=True))
            self._views.clear()
            self._memory, self.handle = None, None
            device = torch.device("cuda", torch.cuda.current_device())
            self._memory = symm_mem.empty(self.header + size, dtype=torch.uint8, device=device)
            self._memory[: self.header].zero_()
            torch.cuda.synchronize()  # it is zero before any peer writes there
            with peer_errors(self.ranks.peers):
                self.handle = symm_mem.rendezvous(self._memory, not_none(self.ranks.group))
        return True

    def headers(self) -> list[torch.Tensor]:
        """Return a view of each rank's header, int64 ``[header / 8]``."""
        layout = flat(self.header // 8, torch.int64)
        return [self.views(rank, -self.header, layout)[0] for rank in range(self.ranks.size)]

    def views(self, rank: int, start: int, packing: BufferSpec) -> list[torch.Tensor]:
        """Return the tensors of a message in a rank's buffer, ``start`` bytes after its header.

        They are views of that rank's memory, and are kept for later calls.
        """
        key = (rank, start, packing)
        if len(self._views) > _MOST_VIEWS:
            self._views.clear()
        if key not in self._views:
            with torch.inference_mode(mode=False):
                block = self.handle.get_buffer(
                    rank, (packing.size,), torch.uint8, self.header + start
                )
                self._views[key] = packing.views(block)
        return self._views[key]


def symm_buffer_of(ranks: Ranks) -> SymmBuffer:
    """Return the symmetric buffer of a group; the first time, ranks find out if they can have one.

    That is a collective, so all ranks have to call it then.
    """
    group = not_none(ranks.group)
    if group not in _buffer_of:
        _buffer_of[group] = SymmBuffer(ranks)
    return _buffer_of[group]


def known_buffer(ranks: Ranks) -> SymmBuffer | None:
    """Return the symmetric buffer of a group, or ``None`` if its ranks have not made one yet."""
    return None if ranks.group is None else _buffer_of.get(ranks.group)


class SymmBuffer:
    """A buffer of this rank that its peers read, with the streams and barriers of its passes.

    Attributes:
        ranks: The ranks of the group.
        device: Index of this rank's CUDA device.
        refusals: Reasons why ranks cannot read each other's memory; empty if they can.
        stream: Stream of barriers, and of what is written into the buffer.
        local_stream: Stream of copies out of this rank's own memory.
        peer_stream: Stream of copies out of peers' memory. There is one for all peers: these copies
            share an engine, which would take those of several streams in an order of its own.
        memory: The memory itself.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.device = ranks, torch.cuda.current_device()
        gather = partial(gather_numbers, ranks, device=torch.device("cuda", self.device))
        locations = [DeviceLocation(*x) for x in gather(device_location(self.device))]
        local = locations[ranks.rank]
        visible = {device_location(n).gpu: n for n in range(torch.cuda.device_count())}
        # False if torch says that this device cannot read another rank's GPU. On another host, on
        # the same GPU, and for GPUs that this process does not see, it is True: the first two are
        # refused for other reasons, and torch's own set-up finds out the last.
        reaches = [
            int(
                other.host != local.host
                or other.gpu == local.gpu
                or other.gpu not in visible
                or torch.cuda.can_device_access_peer(self.device, visible[other.gpu])
            )
            for other in locations
        ]
        self.refusals = refusals(locations, gather(reaches))
        # High priority: barriers and packing go ahead of kernels that wait for a multiprocessor.
        self.stream, self.local_stream, self.peer_stream = (
            torch.cuda.Stream(priority=-1) for _ in range(3)
        )
        self.memory = SymmetricMemory(ranks, _HEADER_SIZE)
        self._patience = timeout_of(not_none(ranks.group), torch.device("cuda"))
        # Recorded when all ranks have read what the last pass needed; then it may be overwritten.
        # Under True that of the pass that is being captured, under False of the last one outside.
        self._reusable_events: dict[bool, torch.cuda.Event] = {}
        self._headers: list[torch.Tensor] = []

    def reserve(self, size: int) -> None:
        """Ensure ``size`` bytes after the header, on all ranks alike."""
        if self.memory.reserve(size):
            self._headers = self.memory.headers()

    def barrier_with_signature(self, digest: int) -> torch.cuda.Event:
        """Queue a barrier of all ranks on the current stream, and behind it a comparison of calls.

        A peer that does not come in time, or comes with another call, ends this process's kernels
        in an error; the host waits for neither. The event that is returned is recorded between the
        two: copies may start after it, but results may be used only after the comparison.
        """
        # Written before the barrier, so all headers are there behind it. No peer reads the former
        # digest any more: `wait_reusable` came before.
        self._headers[self.ranks.rank].fill_(digest)
        arrived = self.barrier()
        is_same = (torch.cat(self._headers) == digest).all()
        torch._assert_async(is_same, "ranks of a ring make different calls")  # noqa: SLF001 - no public way
        return arrived

    def barrier(self) -> torch.cuda.Event:
        """Queue a barrier on the current stream, which has to be ``stream``, and an event after it.

        It compares nothing: it is for ranks that have met in this pass already.
        """
        self._barrier()
        arrived: torch.cuda.Event = self.stream.record_event()
        return arrived

    def stream_for(self, rank: int, *, after: torch.cuda.Event) -> torch.cuda.Stream:
        """Make the stream for copies from a rank the current one, and let it wait for an event."""
        stream = self.local_stream if rank == self.ranks.rank else self.peer_stream
        stream.wait_event(after)
        torch.cuda.set_stream(stream)
        return stream

    def release(self, after: Sequence[torch.cuda.Event]) -> None:
        """Queue the last barrier of a pass behind this rank's reads, which the events follow.

        It makes the barrier's stream the current one.
        """
        # When all ranks have come here, nobody reads peers' memory any more: the next pass may
        # write. Only its writes wait for that, on the GPU; the host goes on.
        torch.cuda.set_stream(self.stream)
        for event in after:
            self.stream.wait_event(event)
        self._reusable_events[is_capturing()] = self.barrier()

    def _barrier(self) -> None:
        """Queue a barrier of all ranks on the current stream."""
        self.memory.handle.barrier(
            channel=_CAPTURE_CHANNEL if is_capturing() else _CHANNEL,
            timeout_ms=self._patience // timedelta(milliseconds=1),
        )

    def join(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for the end of the pass, if it is being captured.

        A CUDA graph may be captured only if all streams that it forked are joined again.
        """
        if True in self._reusable_events and is_capturing():
            stream.wait_event(self._reusable_events[True])

    def wait_reusable(self) -> None:
        """Let the current stream wait until all ranks have read what earlier passes wrote here."""
        # A captured pass cannot wait for an event from outside of its graph: all ranks meet anew.
        if is_capturing():
            self._barrier()
            self._reusable_events.pop(True, None)
        elif False in self._reusable_events:
            torch.cuda.current_stream(self.device).wait_event(self._reusable_events[False])


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream current again at the end of the block, also after an error.

    The block sets streams itself: that is cheaper than a context manager for each.
    """
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


class DeviceLocation(NamedTuple):
    """Location of a rank, as digests of ids that tell hosts and GPUs apart even if names do not."""

    host: int
    gpu: int
    device: int  # index among the GPUs that its process sees


def device_location(device: int) -> DeviceLocation:
    """Return the location of a CUDA device of this process."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    try:  # an id of this host: that of its boot, or its name where there is none
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        host = socket.gethostname()
    digests = (hashlib.blake2b(x.encode(), digest_size=8).digest() for x in (host, gpu))
    host_id, gpu_id = (int.from_bytes(x, "little", signed=True) for x in digests)
    return DeviceLocation(host_id, gpu_id, device)


def gather_numbers(ranks: Ranks, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the numbers of all ranks of a group, by rank. The host waits for them.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    local = torch.tensor(numbers, device=device)
    by_rank = [torch.empty_like(local) for _ in range(ranks.size)]
    run_collective(ranks, lambda: dist.all_gather(by_rank, local, group=ranks.group, async_op=True))
    return [x.tolist() for x in by_rank]


def refusals(
    locations: Sequence[DeviceLocation], reaches: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """Return why ranks cannot read each other's memory, if they cannot.

    It is the same on all ranks if ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES`` is.

    Args:
        locations: Location of each rank.
        reaches: For each rank, whether it can read the memory of each other one.
    """
    overlapped = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    hosts, gpus, devices = (len(set(x)) for x in zip(*locations, strict=True))
    reasons = {
        "the ranks are on several hosts": hosts > 1,
        SHARED_GPU: gpus < len(locations),
        (
            "every rank calls its GPU by the same number, which PyTorch's symmetric memory takes "
            "for one GPU: let each process see all GPUs, or set "
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
        ): devices < len(locations) and not overlapped,
        "the ranks' GPUs do not reach each other's memory": not all(map(all, reaches)),
    }
    # Each may be there because of one before it.
    return tuple([reason for reason, applies in reasons.items() if applies][:1])


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``[rows, ...]`` on the current stream by a copy engine; rows are contiguous each.

    Rows that lie apart are one two-dimensional copy if ``cuda.bindings`` is installed, which torch
    brings on Linux, and less than 2 GiB lie from row to row; and a copy each otherwise. Torch's own
    ``copy_`` of all of them would launch a kernel.

    Raises:
        RuntimeError: The two-dimensional copy could not be queued.
    """
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source)
        return
    strides = [x.stride(0) * x.itemsize for x in (target, source)]
    module = _cuda()
    # All of these are queued on the copy's stream; the host goes on.
    if module is None or max(strides) > _MOST_STRIDE:
        for target_row, source_row in zip(target.unbind(), source.unbind(), strict=True):
            target_row.copy_(source_row)
        return
    width = target[0].numel() * target.itemsize
    (error,) = module.cudaMemcpy2DAsync(
        target.data_ptr(),
        strides[0],
        source.data_ptr(),
        strides[1],
        width,
        target.shape[0],
        module.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
        torch.cuda.current_stream(target.device).cuda_stream,
    )
    if error != module.cudaError_t.cudaSuccess:
        raise RuntimeError(f"a copy out of a peer's memory failed: {error}")


def comes_in_parts(keys: KVPayload, fetches: Sequence[Fetch]) -> bool:
    """Return True if a pass with these fetches from peers makes them in two parts of the heads.

    Of an even number of heads the second half is fetched beside kernels of the first, by a copy of
    K and one of V for each fetch and row of the batch. Only a CUDA graph does so: without one the
    host would take longer to launch the parts than they save.
    """
    half = keys.heads // 2 * keys.dtype.itemsize
    aligned = half * keys.dim % 16 == 0 and half * keys.v_dim % 16 == 0
    size = keys.size(sum(fetch.target.stop - fetch.target.start for fetch in fetches)) // 2
    copies = 2 * keys.batch * len(fetches)
    return (
        keys.heads % 2 == 0
        and aligned
        and copies > 0
        and size >= copies * LEAST_COPY
        and _cuda() is not None
    )


@cache
def _cuda() -> ModuleType | None:
    """Return the module ``cuda.bindings.runtime``, or ``None`` if it is not installed."""
    is_installed = find_spec("cuda") is not None and find_spec("cuda.bindings") is not None
    return import_module("cuda.bindings.runtime") if is_installed else None
