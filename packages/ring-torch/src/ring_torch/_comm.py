"""Messages between the ranks of a process group. Nothing here knows of attention."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ring_core import RankMismatchError
from ring_torch._held import is_capturing
from ring_torch._verdict import Verdict, timeout_of

_HEADER_BYTES = 2048
_DIGEST_BYTES = 8
_ALIGNMENT = 16
_MOST_AGREED = 4096


@dataclass
class _Past:
    """What has happened on a group."""

    ring: Ring
    calls: int = 0
    agreed: dict[bytes, None] = field(default_factory=dict)  # digests compared, oldest first
    verdict: tuple[Verdict, bytes] | None = None  # the last, which all ranks have read


# Facts about groups, which are not ours to extend.
_pasts: WeakKeyDictionary[dist.ProcessGroup, _Past] = WeakKeyDictionary()


@dataclass(frozen=True)
class Ring:
    """This rank's place among those that hold one sequence; without a group it is alone.

    A ring does not keep its group: calls are cached, and a group that is kept after it is destroyed
    keeps its threads, which may end with the interpreter in an abort.
    """

    weak: ref[dist.ProcessGroup] | None
    rank: int
    size: int

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group.

        Raises:
            RuntimeError: It was destroyed.
        """
        if self.weak is None:
            return None
        if (group := self.weak()) is None:
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
        """
        if self.group is None:
            return 0
        past = _past_of(self)
        past.calls += 1
        return past.calls

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


def _past_of(ring: Ring) -> _Past:
    """What has happened on a ring's group."""
    assert ring.group is not None
    if (past := _pasts.get(ring.group)) is None:
        past = _pasts[ring.group] = _Past(ring)
    return past


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
    if isinstance(group, dist.ProcessGroup) and (past := _pasts.get(group)) is not None:
        return past.ring
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
    return Ring(ref(group), rank, dist.get_world_size(group))


@dataclass(frozen=True)
class Facts:
    """What must be equal on all ranks for a pass of a call."""

    words: dict[str, Any]  # anything that ``json`` writes
    digest: bytes

    @classmethod
    def of(cls, words: dict[str, Any], name: str) -> Facts:
        """Facts of the pass of this name."""
        words = {"pass": name, **words}
        text = json.dumps(words, sort_keys=True).encode()
        return cls(words, hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest())

    def numbered(self, number: int) -> bytes:
        """What tells this call from any other: the digest, mixed with the call's number."""
        mixed = (int.from_bytes(self.digest, "little") + number) % (1 << 8 * _DIGEST_BYTES)
        return mixed.to_bytes(_DIGEST_BYTES, "little")

    def signed(self, number: int) -> int:
        """The same as a number, int64."""
        return int.from_bytes(self.numbered(number), "little", signed=True)

    def header(self, number: int) -> bytes:
        """The digest and as much as fits of the facts in words, padded with zeros."""
        text = json.dumps({"call": number, **self.words}, sort_keys=True).encode()
        return (self.numbered(number) + text)[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0")


def agree(ring: Ring, number: int, facts: Facts, device: torch.device) -> None:
    """Check that the rank behind makes the same call, before any of its data is used.

    Everybody sends a header of fixed size ahead: a digest of what it is about to do, and the facts
    in words, so that a difference can be named. Messages of unequal size would crash gloo, and of
    equal size but other shapes would pass unnoticed. On a GPU the host reads the header of the
    first such call; from then on the stream compares digests, and a difference ends it in an error.
    The first such call also waits for all ranks to find the same.

    Args:
        ring: The ranks.
        number: The call's number.
        facts: What must be equal on all ranks.
        device: Where headers have to lie for this group.

    Raises:
        RankMismatchError: The rank behind is making another call, or another rank has found that
            one does.
        RuntimeError: A rank did not come within the group's timeout.
        ValueError: The first such call is being captured into a CUDA graph.
    """
    if ring.size == 1:
        return
    if device.type != "cpu" and has_agreed(ring, facts):
        mine = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=device)
        mine.view(torch.int64).fill_(facts.signed(number))
        theirs = _from_behind(ring, mine, number, facts)
        same = mine.view(torch.int64)[0] == theirs.view(torch.int64)[0]
        torch._assert_async(same, "ranks of a ring make different calls")  # noqa: SLF001
        return
    if is_capturing():
        raise ValueError(
            "a call is captured into a CUDA graph before the ranks have compared it: make it once "
            "outside of a graph, forward and backward, then capture it"
        )
    header = facts.header(number)
    mine = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    received = bytes(_from_behind(ring, mine, number, facts).cpu().numpy())
    assert ring.group is not None
    verdict = Verdict.of(ring.group, number, facts.words["pass"])
    if received[:_DIGEST_BYTES] != header[:_DIGEST_BYTES]:
        difference = _difference(
            header[_DIGEST_BYTES:].rstrip(b"\0"), received[_DIGEST_BYTES:].rstrip(b"\0")
        )
        text = (
            f"ranks {ring.behind(1)} and {ring.rank} of the group make different calls: {difference}. All ranks must make "
            f"the same calls in the same order with equal local shapes, dtypes and options"
        )
        verdict.differ(text)
        raise RankMismatchError(text)
    if not has_agreed(ring, facts):
        if (
            note := verdict.wait(facts.digest, ring.size, timeout_of(ring.group, device))
        ) is not None:
            raise RankMismatchError(note)
        _remember(ring, facts, verdict)


def _from_behind(ring: Ring, mine: Tensor, number: int, facts: Facts) -> Tensor:
    """Send a header ahead; returns that of the rank behind."""
    theirs = torch.empty_like(mine)
    try:
        ring.start([(mine, ring.ahead(1))], [(theirs, ring.behind(1))]).wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {ring.rank} of the group waited in vain for its neighbours, ranks "
            f"{ring.behind(1)} and {ring.ahead(1)}, to make call {number} ({facts.words['pass']}): "
            f"{error}"
        ) from error
    return theirs


def _remember(ring: Ring, facts: Facts, verdict: Verdict) -> None:
    """Note that all ranks make such calls; what they said before this one, all have read."""
    past = _past_of(ring)
    if past.verdict is not None and ring.rank == 0:
        last, digest = past.verdict
        last.forget(digest)
    past.verdict = verdict, facts.digest
    past.agreed[facts.digest] = None
    while len(past.agreed) > _MOST_AGREED:
        past.agreed.pop(next(iter(past.agreed)))


@contextmanager
def explained(ring: Ring, number: int, facts: Facts) -> Iterator[None]:
    """Say of a failure inside what another rank has found out about it.

    Raises:
        RankMismatchError: Ranks make different calls.
    """
    try:
        yield
    except RankMismatchError:
        raise
    except RuntimeError as error:
        if ring.group is None or ring.size == 1:
            raise
        if (text := Verdict.of(ring.group, number, facts.words["pass"]).note()) is not None:
            raise RankMismatchError(text) from error
        raise


def has_agreed(ring: Ring, facts: Facts) -> bool:
    """Whether this group has compared such calls in words before."""
    return facts.digest in _past_of(ring).agreed


def _difference(mine_text: bytes, received: bytes) -> str:
    try:
        mine: dict[str, Any] = json.loads(mine_text)
        theirs: dict[str, Any] = json.loads(received)
    except ValueError:
        return f"the other call is {received[:200]!r}, mine is {mine_text[:200]!r}"
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


@lru_cache(maxsize=256)
def flat(numel: int, dtype: torch.dtype) -> Packing:
    """The packing of so many numbers."""
    return Packing.of(((numel,), dtype))
