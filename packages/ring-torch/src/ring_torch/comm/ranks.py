"""Messages between the ranks of a process group, and what became of them.

Nothing here knows of attention. With gloo a rank finds the words of one that failed when it has
waited in vain. The host of a GPU waits for nothing: NCCL's watchdog ends its process, in words that
name no call and no cause. So a thread logs these before: the words of a rank that failed, and a
pass that does not end.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring_core.base.arguments import not_none
from ring_torch.buffers import BufferSpec
from ring_torch.comm.store import StoreAgreement, read_failure

Group = dist.ProcessGroup | DeviceMesh | None
_LOG = logging.getLogger("ring_torch")
_LEAST_WAIT, _LONGEST = timedelta(seconds=0.25), timedelta(seconds=15)


class PeerError(RuntimeError):
    """Ranks that this one exchanges with failed, or did not answer within the group's timeout."""

    def __init__(self, peers: Sequence[int], reason: object) -> None:
        ranks = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
        super().__init__(f"waited in vain for {ranks} of the group: {reason}")


class QueuedPass(NamedTuple):
    """A pass that a host has queued on its GPU and does not wait for."""

    name: str  # with the call's number
    start: float  # seconds, of ``time.monotonic``
    ended: Any  # a CUDA event


@dataclass
class GroupState:
    """What has happened on a group."""

    calls: int = 0
    nonce: int | None = None  # drawn by rank 0, and told ahead with the first header
    agreed: dict[bytes, None] = field(default_factory=dict)  # digests compared, oldest first
    last: tuple[StoreAgreement, bytes] | None = None  # the last, which all ranks have read
    failure: str | None = None  # of a pass: what its ranks sent may still be under way
    is_watched: bool = False  # whether a thread looks for failures of other ranks
    queued: QueuedPass | None = None  # the last, while it is watched

    def check(self) -> None:
        """Refuse to send anything after a failure.

        Raises:
            RuntimeError: An earlier call failed.
        """
        if self.failure is not None:
            raise RuntimeError(
                f"an earlier call on this process group failed, and its messages may still be "
                f"under way: {self.failure}. Make a new group (torch.distributed.new_group, or "
                f"destroy_process_group and init_process_group) and go on with that"
            )


@dataclass(frozen=True)
class Ranks:
    """This rank's place among those that hold one sequence; without a group it is alone.

    A ring does not keep its group: calls are cached, and a group that is kept after it is destroyed
    keeps its threads, which may end with the interpreter in an abort.
    """

    group_ref: ref[dist.ProcessGroup] | None
    rank: int
    size: int
    state: GroupState = field(default_factory=GroupState, compare=False, repr=False)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group.

        Raises:
            RuntimeError: It was destroyed.
        """
        if self.group_ref is None:
            return None
        if (group := self.group_ref()) is None:
            raise RuntimeError("the ring's process group was destroyed; give another group")
        return group

    def behind(self, distance: int) -> int:
        """The rank this far behind."""
        return (self.rank - distance) % self.size

    def ahead(self, distance: int) -> int:
        """The rank this far ahead."""
        return (self.rank + distance) % self.size

    def next_call(self) -> int:
        """The number of a new call on this group, counted on every rank, failed calls included.

        A rank whose call fails before anything is sent is one call behind its peers' messages.
        Numbers tell: otherwise its next call would meet the one that its peers still wait in.

        Raises:
            RuntimeError: A pass of an earlier call failed.
        """
        if self.group_ref is None:
            return 0
        if self.size > 1:
            self.state.check()
        self.state.calls += 1
        return self.state.calls

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> Transfer:
        """Start moving contiguous tensors, which may not be touched until that is done.

        Raises:
            PeerError: A peer is gone.
        """
        peers = tuple(sorted({peer for _, peer in (*sends, *receives)}))
        if not peers:
            return DONE
        group = None if self.group_ref is None else self.group_ref()
        if group is None:  # it was destroyed
            group = not_none(self.group)
        device = (*sends, *receives)[0][0].device
        # These are the calls inside of `torch.distributed.batch_isend_irecv`, whose checks of each
        # message take the host as long as NCCL's own work does.
        coalesces = group._get_backend(device).supports_coalescing  # noqa: SLF001
        try:
            if coalesces:
                group._start_coalescing(device)  # noqa: SLF001
            pending = [group.send([tensor], peer, 0) for tensor, peer in sends]
            pending += [group.recv([tensor], peer, 0) for tensor, peer in receives]
            if coalesces:  # all messages are under way together, and one handle stands for them
                pending = [group._end_coalescing(device)]  # noqa: SLF001
        except RuntimeError as error:
            raise PeerError(peers, error) from error
        return Transfer(tuple(pending), tuple([tensor for tensor, _ in sends]), peers)


ALONE = Ranks(None, 0, 1)

# Facts about groups, which are not ours to extend.
_ranks_of: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


@dataclass(frozen=True)
class Transfer:
    """Transfers under way, with the tensors they read kept alive."""

    pending: tuple[dist.Work, ...] = ()
    sent: tuple[torch.Tensor, ...] = ()
    peers: tuple[int, ...] = ()

    def wait(self) -> None:
        """Wait until all have arrived (on CUDA: make the current stream wait).

        Raises:
            PeerError: A peer failed, or did not answer within the group's timeout.
        """
        try:
            for work in self.pending:
                work.wait()
        except RuntimeError as error:
            raise PeerError(self.peers, error) from error


DONE = Transfer()


@contextmanager
def peer_errors(peers: Sequence[int]) -> Iterator[None]:
    """Name the ranks of the group that something inside is exchanged with, if that fails.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(peers, error) from error


@contextmanager
def collective(ring: Ranks, what: str) -> Iterator[None]:
    """Around a collective: name it if it fails; it is not entered after a failed pass.

    Raises:
        RuntimeError: A pass of an earlier call failed, or a peer did.
    """
    ring.state.check()
    try:
        with peer_errors(others(ring)):
            yield
    except PeerError as error:
        raise RuntimeError(f"{what}: rank {ring.rank} {error}") from error


def exchange(
    ring: Ranks, parts: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> list[list[torch.Tensor]]:
    """Send part ``n`` of each tensor to rank ``n``; all parts of a tensor have one shape.

    Returns:
        What came, by tensor and rank; this rank's own part is the one given.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    spec = BufferSpec.of(*((some[0].shape, some[0].dtype) for some in parts))
    peers = others(ring)
    sends = [(spec.pack([some[peer] for some in parts], device), peer) for peer in peers]
    receives = [(spec.buffer(device), peer) for peer in peers]
    ring.start(sends, receives).wait()
    came = {peer: spec.views(buffer) for buffer, peer in receives}
    came[ring.rank] = [some[ring.rank] for some in parts]
    return [[came[rank][n] for rank in range(ring.size)] for n in range(len(parts))]


def header_device(ring: Ranks, device: torch.device) -> torch.device:
    """Where headers lie: gloo sends from the host, others from the device of a call's tensors."""
    return torch.device("cpu") if dist.get_backend(ring.group) == "gloo" else device


def others(ring: Ranks) -> list[int]:
    """The ranks beside this one."""
    return [rank for rank in range(ring.size) if rank != ring.rank]


def ranks_of(group: Any) -> Ranks:
    """The ring of a process group, a one-dimensional ``DeviceMesh``, or ``None``.

    ``None`` is the default group, or one rank alone where none is initialised.

    Raises:
        ValueError: Not a group, a mesh of several dimensions, a group this rank is not in, or one
            that was destroyed.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        if group not in dist.distributed_c10d._world.pg_map:  # noqa: SLF001 - no public way
            raise ValueError("the process group was destroyed; give another group")
        if (ranks := _ranks_of.get(group)) is not None:
            return ranks
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(
                f"group must be a process group or a one-dimensional DeviceMesh, got a mesh of {group.ndim} dimensions; "
                f"slice it: mesh['cp']"
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        reason = f"got {type(group).__name__}"
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            reason = "this rank is not in the given group"
        raise ValueError(
            f"group must be a process group that this rank belongs to, a one-dimensional DeviceMesh or None; {reason}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "group must be a process group that this rank belongs to; this rank is not in it"
        )
    return _ranks_of.setdefault(group, Ranks(ref(group), rank, dist.get_world_size(group)))


def check_device(ring: Ranks, device: torch.device) -> None:
    """Check that a group of several ranks can send tensors of this device.

    Raises:
        ValueError: It cannot.
    """
    assert ring.group is not None
    try:
        ring.group._get_backend(device)  # noqa: SLF001 - no public way
    except RuntimeError as error:
        raise ValueError(
            f"the process group ({dist.get_backend(ring.group)}) sends no tensors of device "
            f"{str(device)!r}: move them, or give a group that does"
        ) from error


def warn_if_alone() -> None:
    """Warn where this process is one of several that no process group joins.

    Under Python's default filters a process shows it once, as it always comes from this line.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if dist.is_available() and dist.is_initialized():
        return
    if size.isdecimal() and int(size) > 1:
        warnings.warn(
            f"WORLD_SIZE is {size}, but torch.distributed is not initialized: each process holds "
            f"whole sequences and attends alone. Call torch.distributed.init_process_group() before "
            f"the first use, or unset WORLD_SIZE if that is meant",
            stacklevel=1,
        )


def watch(ring: Ranks, timeout: timedelta) -> Thread:
    """Start to look, several times within a group's timeout, until the group is gone.

    What is found is logged; a failure closes the group for later calls.
    """
    stop = Event()
    thread = Thread(
        target=_watch_group, args=(ring, timeout, stop), daemon=True, name="ring_torch watch"
    )

    def end() -> None:
        """A process whose interpreter ends while a thread is inside the store's code is aborted."""
        stop.set()
        thread.join(timeout=5)

    atexit.register(end)
    thread.start()
    return thread


def _watch_group(ring: Ranks, timeout: timedelta, stop: Event) -> None:
    patience = max(_LEAST_WAIT, min(timeout / 8, _LONGEST))
    while not stop.wait(patience.total_seconds()):
        try:
            ranks_of(ring.group)
        except (RuntimeError, ValueError):  # it was destroyed
            return
        assert ring.group is not None
        text, state = read_failure(ring.group), ring.state
        if state.failure is not None:
            return
        if text is not None:
            state.failure = text
            _LOG.error("%s", text)
            return
        queued = state.queued
        if queued is None or time.monotonic() - queued.start < 0.75 * timeout.total_seconds():
            continue
        if not _has_ended(queued):  # the watchdog is about to end the process
            _LOG.error(
                "%s, or one before it, has not ended on rank %d: it waits for ranks %s of the "
                "group, or for what was queued before",
                queued.name, ring.rank, ", ".join(map(str, others(ring))),
            )  # fmt: skip
        if state.queued is queued:
            state.queued = None  # each is looked at once


def _has_ended(queued: QueuedPass) -> bool:
    try:
        return bool(queued.ended.query())
    except RuntimeError:  # the GPU is in an error, which says more
        return True
