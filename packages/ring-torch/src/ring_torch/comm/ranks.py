"""Ranks of a process group, and the messages between them.

Nothing here knows of attention. A message that a peer does not answer ends in a :class:`PeerError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import cached_property
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch._C._functorch import peek_interpreter_stack  # torch has no public name for it
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from ring_core import UnsupportedError
from ring_core.base.arguments import not_none
from ring_torch.capture import fake_mode, is_jit_tracing, proxy_mode
from ring_torch.comm.all_to_all import all_to_all_options, sizes_of_one_part
from ring_torch.comm.state import GroupState, watch
from ring_torch.comm.store import publish_host, read_failure


class OneRank(Enum):
    """A rank that acts alone, whatever process groups there are, in the place of a group.

    It is ``cp.group`` inside of ``cp.whole()``. An enumeration, as ``torch.compile`` takes its
    members for constants.
    """

    WHOLE = "whole"


Group = dist.ProcessGroup | DeviceMesh | OneRank | None


class PeerError(RuntimeError):
    """Error of an exchange: peers failed, or did not answer within the group's timeout."""

    def __init__(self, peers: Sequence[int], reason: object) -> None:
        ranks = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"
        super().__init__(f"waited in vain for {ranks} of the group: {reason}")


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that hold one sequence, as this rank sees them; without a group it is alone.

    There is one object for a group, by whose identity its calls are known again. The group is
    referenced weakly. Calls are cached, and a group that is kept after it is destroyed keeps its
    threads, which may abort the process when the interpreter ends.

    Attributes:
        group_ref: Reference to the process group; ``None`` for a rank that is alone.
        rank: Number of this rank among these.
        size: Number of ranks.
        members: For some of a group's ranks (:meth:`part`), their numbers in the group.
        state: State of the group.
    """

    group_ref: ref[dist.ProcessGroup] | None
    rank: int
    size: int
    members: tuple[int, ...] | None = None
    state: GroupState = field(default_factory=GroupState, repr=False)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group, or ``None`` for a rank that is alone.

        Raises:
            RuntimeError: The group was destroyed.
        """
        if self.group_ref is None:
            return None
        if (group := self.group_ref()) is None:
            raise RuntimeError("the ring's process group was destroyed; give another group")
        return group

    @property
    def peers(self) -> list[int]:
        """Peers of this rank: the numbers of the others among these ranks, ascending."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @cached_property
    def previous(self) -> int:
        """The rank before this one, round the ring."""
        return (self.rank - 1) % self.size

    @cached_property
    def next(self) -> int:
        """The rank after this one, round the ring."""
        return (self.rank + 1) % self.size

    @cached_property
    def _peer_numbers(self) -> tuple[int, ...]:
        """The numbers of the peers in the group."""
        numbers = self.members or range(self.size)
        return tuple([n for n in numbers if n != numbers[self.rank]])

    @cached_property
    def _rows(self) -> list[int]:
        """Rows of :meth:`trade` by rank of the group, 0 outside of a part; empty: one for each."""
        if self.members is None:
            return []
        return [int(n in self.members) for n in range(not_none(self.group).size())]

    @cached_property
    def is_gloo(self) -> bool:
        """True if messages go by gloo, which sends from the host."""
        return dist.get_backend(self.group) == "gloo"

    def part(self, members: Sequence[int]) -> Ranks:
        """Return some of these ranks, ascending and this one among them, as ranks of their own.

        Their messages are messages of the group: no group is made for them. They compare no calls,
        as those of the whole group do. One rank alone sends nothing, and a part has no parts.
        """
        if len(members) == 1:
            return ALONE
        assert self.members is None
        return replace(
            self, rank=members.index(self.rank), size=len(members), members=tuple(members)
        )

    def check_open(self) -> None:
        """Refuse to send anything on a group of a parent process, or on which a pass has failed.

        Raises:
            ValueError: This process was forked from one that had made the group.
            RuntimeError: An earlier call failed.
        """
        if self.state.is_inherited:
            raise ValueError(
                "call refused, nothing was sent: this process was forked from one that had made the process "
                "group, and has none of the threads that carry its messages. In a DataLoader worker, call it "
                "in the training process instead. Start other processes by 'spawn' "
                "(multiprocessing.get_context), or fork before init_process_group and make the group in each"
            )
        if self.state.failure is not None:
            raise RuntimeError(
                f"an earlier call on this process group failed, and its messages may still be "
                f"under way: {self.state.failure}. Make a new group (torch.distributed.new_group, or "
                f"destroy_process_group and init_process_group) and go on with that"
            )

    def begin_pass(self) -> None:
        """Refuse a closed group, and let what has to precede messages in a backward run."""
        self.check_open()
        for key, reference in [*self.state.before_passes.items()]:
            if (run := reference()) is None:
                del self.state.before_passes[key]
            else:
                run()

    def next_call(self) -> int:
        """Count a new call on this group and return its number, from 1; 0 without a group.

        Every rank counts, failed calls included. If a call fails on one rank before anything is
        sent, its peers still wait in it: numbers keep its next call from being taken for that one.

        Raises:
            UnsupportedError: Tensors have no numbers here, are traced, or are those of a transform
                of ``torch.func`` or of a forward-mode gradient.
            ValueError: This process was forked from one that had made the group.
            RuntimeError: A pass of an earlier call failed.
        """
        if fake_mode() is not None or proxy_mode() is not None:
            raise UnsupportedError(
                "this call has no rule for FakeTensorMode and make_fx, of which only attention without a "
                "predicate, unshard, shift, halo and relayout have one. Instead: make it outside of them"
            )
        if is_jit_tracing():
            raise UnsupportedError(
                "torch.jit.trace has no rule for this call: it would record no messages between ranks. "
                "Instead: use torch.compile or torch.export"
            )
        # An operation over several processes has no rules for transforms.
        if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:  # noqa: SLF001 - no public way
            raise UnsupportedError(
                "this call has no rule for vmap, grad, jvp and the other transforms of torch.func, nor for "
                "forward-mode gradients (forward_ad.dual_level). Instead: call it outside of them, with a "
                "batch dimension where it takes one, and use torch.autograd (backward())"
            )
        if self.group_ref is None:
            return 0
        if self.size > 1:
            self.check_open()
        # Also where the call fails later: the peers have counted it.
        self.state.calls += 1
        return self.state.calls

    def watch(self, timeout: timedelta) -> Thread:
        """Start the thread that logs failed ranks, and passes that do not end."""
        return watch(
            self.state,
            self.rank,
            self.peers,
            lambda: read_failure(not_none(ranks_of(self.group).group)),
            timeout,
        )

    def start(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> Transfer:
        """Start sending and receiving contiguous tensors, as ``(tensor, peer)``, all at once.

        Until the transfer has been waited for, sent tensors may be read but not written, and
        received ones neither. Messages between two ranks are matched by their order.

        Raises:
            PeerError: A peer is gone.
        """
        if self.members is not None:  # messages go by the numbers that the group has for its ranks
            sends = [(tensor, self.members[peer]) for tensor, peer in sends]
            receives = [(tensor, self.members[peer]) for tensor, peer in receives]
        peers = tuple(sorted({peer for _, peer in (*sends, *receives)}))
        if not peers:
            return DONE
        # As `self.group`, which is a call more; it raises if the group was destroyed.
        group = (self.group_ref and self.group_ref()) or not_none(self.group)
        device = (*sends, *receives)[0][0].device
        # These are the calls inside of `torch.distributed.batch_isend_irecv`, whose checks of each
        # message take the host as long as NCCL's own work does.
        coalesces = group._get_backend(device).supports_coalescing  # noqa: SLF001 - as torch's batch_isend_irecv
        try:
            if coalesces:
                group._start_coalescing(device)  # noqa: SLF001 - as torch's batch_isend_irecv
            # All are only started here; the current stream's kernels so far precede them on a GPU.
            pending = [group.send([tensor], peer, 0) for tensor, peer in sends]
            pending += [group.recv([tensor], peer, 0) for tensor, peer in receives]
            if coalesces:  # NCCL: all messages run together, and one handle stands for them
                pending = [group._end_coalescing(device)]  # noqa: SLF001 - as torch's batch_isend_irecv
        except _OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise PeerError(peers, error) from error
        return Transfer(tuple(pending), tuple([tensor for tensor, _ in sends]), peers)

    def rotate(
        self, sent: torch.Tensor, received: torch.Tensor, distance: int, *, beside: bool
    ) -> Transfer:
        """Start sending a tensor ``distance`` ranks ahead, and receiving one from as far behind.

        All ranks do it at once, with flat tensors of equal size. It is :meth:`start` of one message
        each way; on a GPU NCCL gets both as one operation, for half of the host's time. With
        ``beside`` they move beside the kernels that follow; otherwise these wait for them.

        Raises:
            PeerError: A peer is gone.
        """
        # Round the ring everybody sends and receives one message, whatever the distance.
        ahead, behind = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        if sent.is_cpu or not self._runs_messages_together(sent.device):
            return self.start([(sent, ahead)], [(received, behind)])
        # An all-to-all in which all parts but one are empty: NCCL sends nothing for these.
        world, numel = len(self._rows) or self.size, sent.numel()
        if self.members is not None:
            ahead, behind = self.members[ahead], self.members[behind]
        sizes = [sizes_of_one_part(world, rank, numel) for rank in (ahead, behind)]
        return self._all_to_all(sent, received, *sizes, beside=beside)

    def trade(self, sent: torch.Tensor, received: torch.Tensor) -> Transfer:
        """Send row n of ``sent`` to rank n, and receive row n of ``received`` from it.

        All ranks do it at once, with contiguous tensors of equal shapes. On a GPU the kernels that
        follow wait for it.

        Raises:
            PeerError: A peer is gone.
        """
        if self.size == 1:
            received.copy_(sent)
            return DONE
        # The backend counts all ranks of the group: those outside of this part get nothing.
        return self._all_to_all(sent, received, self._rows, self._rows, beside=False)

    def _runs_messages_together(self, device: torch.device) -> bool:
        """Return True if the backend runs all messages that start together as one operation."""
        if (together := self.state.runs_together.get(device.type)) is None:
            together = not_none(self.group)._get_backend(device).supports_coalescing  # noqa: SLF001 - as torch's batch_isend_irecv
            self.state.runs_together[device.type] = together
        return together

    def _all_to_all(
        self,
        sent: torch.Tensor,
        received: torch.Tensor,
        sent_sizes: list[int],
        received_sizes: list[int],
        *,
        beside: bool,
    ) -> Transfer:
        """Start an all-to-all by what is inside of ``torch.distributed.all_to_all_single``.

        Its checks and its log take the host as long as NCCL does. Ranks of size 0 get no message.
        """
        group = (self.group_ref and self.group_ref()) or not_none(self.group)
        options = all_to_all_options(beside=beside)
        try:
            work = group.alltoall_base(received, sent, received_sizes, sent_sizes, options)
        except _OWN_ERRORS:
            raise
        except RuntimeError as error:
            raise PeerError(self._peer_numbers, error) from error
        return Transfer(() if work is None else (work,), (sent,), self._peer_numbers)


ALONE = Ranks(None, 0, 1)
_WHOLE = Ranks(None, 0, 1)  # of OneRank.WHOLE: graphs tell it from ALONE, which a group may replace

# The ranks of each group. Process groups take no attributes of ours, so they are kept here.
_ranks_of: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


class Transfer(NamedTuple):
    """Messages in flight; it keeps the tensors that are sent alive."""

    pending: tuple[dist.Work, ...] = ()
    sent: tuple[torch.Tensor, ...] = ()
    peers: tuple[int, ...] = ()

    def wait(self) -> None:
        """Wait until all messages are complete (on CUDA: let the current stream wait).

        Then received tensors may be read, and sent ones overwritten.

        Raises:
            PeerError: A peer failed, or did not answer within the group's timeout.
        """
        # gloo's host waits here for each message. NCCL's stream waits, and the host goes on.
        try:
            for work in self.pending:
                work.wait()
        except RuntimeError as error:
            raise PeerError(self.peers, error) from error


DONE = Transfer()


#: Errors of this rank itself that are ``RuntimeError`` to Python: no peer has caused them.
_OWN_ERRORS = (torch.OutOfMemoryError, NotImplementedError, RecursionError)


@contextmanager
def peer_errors(peers: Sequence[int]) -> Iterator[None]:
    """Turn a failure of the exchange inside the block into an error that names its peers.

    Only what waits for peers belongs into the block: torch raises the same class for what this rank
    does wrong itself, as for a view that it cannot make. Collectives go by :func:`run_collective`.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    try:
        yield
    except _OWN_ERRORS:
        raise
    except RuntimeError as error:
        raise PeerError(peers, error) from error


def run_collective(ranks: Ranks, start: Callable[[], dist.Work | None]) -> None:
    """Run one of torch's collectives over the ranks of a group, and wait for it.

    What its start raises is this rank's own error, for example a dtype that the backend does not
    send, unless it is one of the classes that torch has for errors of communication: NCCL connects
    ranks in the first start. Messages move, and peers fail, while it is waited for.

    Args:
        ranks: The ranks of the group.
        start: Starts the collective with ``async_op=True``.

    Raises:
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    try:
        work = start()
    except dist.DistError as error:
        raise PeerError(ranks.peers, error) from error
    if work is not None:
        with peer_errors(ranks.peers):
            work.wait()


def is_foreign(group: Any) -> bool:
    """Return True for a one-dimensional ``DeviceMesh`` that this rank is not in."""
    return isinstance(group, DeviceMesh) and group.ndim == 1 and group.get_coordinate() is None


def ranks_of(group: Any) -> Ranks:
    """Return the ranks of a process group, of a one-dimensional ``DeviceMesh``, or of ``None``.

    ``None`` is the default group, or this process alone where none is initialised. The first use of
    a group leaves the name of this rank's host in its store, for the other ranks.

    Raises:
        ValueError: It is no group, a mesh of several dimensions, a group that this rank is not in,
            or one that was destroyed.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or group is OneRank.WHOLE:
        return ALONE if group is None else _WHOLE
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
        if is_foreign(group):
            raise ValueError(
                f"this rank is not in the DeviceMesh of the ranks {group.mesh.flatten().tolist()}; a "
                f"ContextParallel over it can only take part in relayout here, to it or from it"
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        reason = f"got {type(group).__name__}"
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            reason = "this rank is not in the given group"
        raise ValueError(
            f"group must be a process group that this rank belongs to, a one-dimensional DeviceMesh or None; {reason}"
        )
    if (ranks := _ranks_of.get(group)) is not None:
        return ranks
    ranks = _new_ranks(group)
    if ranks.size > 1:
        publish_host(group, ranks.rank)
    return ranks


def _new_ranks(group: dist.ProcessGroup) -> Ranks:
    """Return the ranks of a group, kept from now on: calls are counted on one object."""
    ranks = Ranks(ref(group), dist.get_rank(group), dist.get_world_size(group))
    # Cached calls keep the ranks longer than the group, whose memory goes with it.
    finalize(group, ranks.state.forget_memory).atexit = False
    return _ranks_of.setdefault(group, ranks)


def _close_groups_of_parent() -> None:
    """Refuse calls on all groups of this process, which was just forked.

    They would wait in vain. Ranks of groups that were not used yet are made here, as their first
    use would send to the parent's store.
    """
    for group in dist.distributed_c10d._world.pg_map:  # noqa: SLF001 - no public way
        _new_ranks(group).state.is_inherited = True


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_close_groups_of_parent)
