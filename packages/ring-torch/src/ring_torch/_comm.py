"""Messages between the ranks of a process group. Nothing here knows of attention."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import RankMismatchError

_HEADER_BYTES = 2048
_DIGEST_BYTES = 8
_ALIGNMENT = 16

# Calls so far on each group: a fact about the group, which is not ours to extend.
_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Ring:
    """This rank's place among those that hold one sequence; without a group it is alone."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

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
        """
        if self.group is None:
            return 0
        _calls[self.group] = _calls.get(self.group, 0) + 1
        return _calls[self.group]

    def start(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Transfer:
        """Start moving contiguous tensors, which may not be touched until that is done."""
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in pairs
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(tuple(works), tuple(tensor for tensor, _ in sends))


@dataclass(frozen=True)
class Transfer:
    """Transfers under way, with the tensors they read kept alive."""

    works: tuple[dist.Work, ...] = ()
    sent: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        """Wait until all have arrived (on CUDA: make the current stream wait).

        Raises:
            RuntimeError: A peer failed, or did not answer within the group's timeout.
        """
        for work in self.works:
            work.wait()


NOTHING = Transfer()


def ring_of(group: Any) -> Ring:
    """The ring of a process group, a one-dimensional ``DeviceMesh``, or ``None``.

    ``None`` is the default group, or one rank alone where none is initialised.

    Raises:
        ValueError: Not a group, a mesh of several dimensions, or a group this rank is not in.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ring(None, 0, 1)
        group = dist.group.WORLD
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(
                f"group must be a process group or a one-dimensional DeviceMesh, got a mesh of {group.ndim} dimensions; "
                f"slice it: mesh['cp']"
            )
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        is_other = group == dist.GroupMember.NON_GROUP_MEMBER
        problem = (
            "this rank is not in the given group" if is_other else f"got {type(group).__name__}"
        )
        raise ValueError(
            f"group must be a process group that this rank belongs to, a one-dimensional DeviceMesh or None; {problem}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "group must be a process group that this rank belongs to; this rank is not in it"
        )
    return Ring(group, rank, dist.get_world_size(group))


def agree(ring: Ring, facts: dict[str, Any], device: torch.device) -> None:
    """Check that the rank behind makes the same call, before any of its data is used.

    Everybody sends a header of fixed size ahead: a digest of what it is about to do, and the facts
    in words, so that a difference can be named. Messages of unequal size would crash gloo, and of
    equal size but other shapes would pass unnoticed.

    Args:
        ring: The ranks.
        facts: What must be equal on all ranks; anything that ``json`` writes.
        device: Where headers have to lie for this group.

    Raises:
        RankMismatchError: The rank behind is making another call.
    """
    if ring.size == 1:
        return
    text = json.dumps(facts, sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    header = (digest + text)[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    theirs = torch.empty_like(mine)
    ring.start([(mine, ring.ahead(1))], [(theirs, ring.behind(1))]).wait()
    received = bytes(theirs.cpu().tolist()) if device.type != "cpu" else theirs.numpy().tobytes()
    if received[:_DIGEST_BYTES] == digest:
        return
    difference = _difference(facts, received[_DIGEST_BYTES:].rstrip(b"\0"))
    raise RankMismatchError(
        f"ranks {ring.behind(1)} and {ring.rank} of the group make different calls: {difference}. All ranks must make "
        f"the same calls in the same order with equal local shapes, dtypes and options"
    )


def _difference(mine: dict[str, Any], received: bytes) -> str:
    try:
        theirs = json.loads(received)
    except ValueError:
        return f"the other call is {received[:200]!r}, mine is {json.dumps(mine, sort_keys=True)[:200]!r}"
    mine = json.loads(json.dumps(mine))
    names = sorted(
        name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
    )
    return "; ".join(
        f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} here" for name in names
    )


@dataclass(frozen=True)
class Packing:
    """Several tensors as one message: where each lies in a flat buffer of bytes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, *parts: tuple[Sequence[int], torch.dtype]) -> Packing:
        """The packing of tensors of these shapes and dtypes."""
        offsets, at = [], 0
        for shape, dtype in parts:
            offsets.append(at)
            at += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        shapes = tuple(tuple(shape) for shape, _ in parts)
        return cls(shapes, tuple(dtype for _, dtype in parts), tuple(offsets), at)

    def buffer(self, device: torch.device) -> Tensor:
        """An uninitialised message."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors inside a message."""
        views = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            size = math.prod(shape) * dtype.itemsize
            views.append(buffer[offset : offset + size].view(dtype).view(shape))
        return views

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """A new message that holds copies of the tensors."""
        buffer = self.buffer(device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer
