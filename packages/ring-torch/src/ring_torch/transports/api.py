"""What carries keys to who needs them, and gradients back: transports, their sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from ring_core import Fetch, GatherProgram, Plan, gather_program
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.optional import has_triton
from ring_torch.payload import KeyGradBuffer, KVPayload
from ring_torch.records import Inputs

Where = Callable[[slice], slice]  # from local indices to columns of a buffer


class SessionSpec(NamedTuple):
    """What a transport is told of a pass over gathered keys.

    Attributes:
        ranks: Who takes part.
        plan: What they fetch: ``gather_program(plan, rank, own=own)`` of each.
        own: Whether a rank's own keys lie in its buffer, too: one launch sees all keys of a row.
        keys: The shape of what travels for one group of heads.
        groups: Into how many groups heads are cut.
        device: Where it lies.
        acc_dtype: Of gradients.
        needs_grad: Whether gradients will travel back.
        signature: What ranks have to agree on, beside ``number`` and ``seed``, the call's.
    """

    ranks: Ranks
    plan: Plan
    own: bool
    keys: KVPayload
    groups: int
    device: torch.device
    acc_dtype: torch.dtype
    needs_grad: bool
    signature: CallSignature
    number: int
    seed: int


class GatherSession(Protocol):
    """Moves what ranks fetch in one pass, for each group of heads.

    All ranks call its methods in the same order, groups from the first to the last.
    """

    @property
    def spec(self) -> SessionSpec:
        """What it was opened with."""

    def fetch(self, gather: GatherProgram, inputs: Inputs) -> Iterator[PendingKV]:
        """Start fetching into new tensors like a :attr:`KVPayload.message` of ``gather.length``.

        What comes for each group; all are to be taken, each before the kernels that need it.
        """

    def accumulators(
        self, gather: GatherProgram, sums: KeyGradBuffer, *, zero: bool
    ) -> list[torch.Tensor]:
        """Room for the sums of gradients of what was fetched, flat; in a backward, called first.

        Full of zeros if ``zero``, else of anything.
        """

    def return_grads(
        self, gather: GatherProgram, sums: KeyGradBuffer, grads: torch.Tensor, group: int, *, overlapped: bool,
        early: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """Start sending a group's sums to the ranks the keys belong to.

        All of them, or those that :meth:`ring_core.GatherProgram.is_early`, or then the others.
        ``overlapped`` says that kernels go on meanwhile, and are not to be held up.
        """


Refusals = tuple[str, ...]  # reasons, each a clause; empty if there is none


def _nothing_missing(_device: str, _reaches: Sequence[Sequence[int]]) -> str:
    return ""


@dataclass(frozen=True)
class Transport:
    """A way in which bytes move between ranks, as it describes itself.

    Attributes:
        name: The name that ``transport=`` takes.
        open: Opens a session for a pass over gathered keys. Raises a ``RankMismatchError`` if a
            peer is making another call.
        refusals: Reasons why these ranks cannot use it for tensors on a device, the same on all
            ranks; ``None`` if they would have to ask each other first, and, without ``probe``,
            shall not.
        sends_messages: Bytes move as messages of the process group, which a strategy may also send
            itself, and are counted as sent; otherwise ranks read them from their peers' memory.
        asks: What the ranks ask each other at the first call, after "if", for ``explain``.
        devices: Types of devices that it is for; empty means any.
        missing: Reason why it cannot run between processes of a machine, from the type of its
            devices and, for each GPU, the others whose memory it reaches; empty if it can.
    """

    name: str
    open: Callable[[SessionSpec], GatherSession]
    refusals: Callable[[Ranks, torch.device, bool], Refusals | None]
    sends_messages: bool
    asks: str = ""
    devices: tuple[str, ...] = ()
    missing: Callable[[str, Sequence[Sequence[int]]], str] = _nothing_missing


@dataclass(frozen=True)
class PendingKV:
    """Tensors that fill up, fetch by fetch."""

    tensors: list[torch.Tensor]
    #: Until so many fetches have arrived, or (``None``) all, when the own tensors may change, too.
    wait: Callable[[int | None], None]


#: Gradients on their way: waits, and adds what came to the sums of so many tokens, of which the own
#: ones lie somewhere. Called once, in the order in which they were sent.
PendingGrads = Callable[[torch.Tensor, int, Where], None]


class Traffic(NamedTuple):
    """Bytes that move between a rank and its peers in a pass, beside the header."""

    sent: int
    received: int


def gathered_traffic(
    gather: GatherProgram, plan: Plan, rank: int, keys: KVPayload, acc_dtype: torch.dtype, *,
    forward: bool, fetches: bool,
) -> Traffic:  # fmt: skip
    """Count the bytes of keys that others fetch from a rank, and of gradients that go back.

    ``keys`` are of all heads: groups add up to them. ``fetches`` says that the pass moves keys.
    """
    requests = [one for _, one in requests_to(plan, rank, own=gather.own)]
    fetched = [one for one in gather.fetches if one.rank != rank]
    asked, given = (
        sum(one.source.stop - one.source.start for one in some) for some in (requests, fetched)
    )
    kv = Traffic(keys.size(asked), keys.size(given)) if fetches else Traffic(0, 0)
    if forward:
        return kv
    token = keys.batch * keys.width * acc_dtype.itemsize
    return Traffic(kv.sent + given * token, kv.received + asked * token)


@lru_cache(maxsize=256)
def requests_to(
    plan: Plan, rank: int, *, own: bool, early: bool | None = None
) -> tuple[tuple[int, Fetch], ...]:
    """What other ranks fetch from one, by rank, in their order."""
    return tuple(
        (peer, one)
        for peer in range(plan.cp_size)
        if peer != rank
        for one in some_fetches(gather_program(plan, peer, own=own), early)
        if one.rank == rank
    )


def spans_of(fetches: Iterable[Fetch]) -> list[slice]:
    """What is fetched of a rank's keys: as few spans as there are, ascending."""
    spans: list[slice] = []
    for start, stop in sorted({(one.source.start, one.source.stop) for one in fetches}):
        if spans and start <= spans[-1].stop:
            spans[-1] = slice(spans[-1].start, max(stop, spans[-1].stop))
        else:
            spans.append(slice(start, stop))
    return spans


def some_fetches(gather: GatherProgram, early: bool | None) -> list[Fetch]:
    """All fetches, or those whose gradients are done early in the backward, or the others."""
    return [one for one in gather.fetches if early is None or gather.is_early(one) == early]


def room_for(sums: KeyGradBuffer, like: torch.Tensor, one: Fetch) -> list[torch.Tensor]:
    """Room for the sums that come home of what a peer fetched."""
    length = one.source.stop - one.source.start
    return sums.parts(like.new_empty(sums.numel(length)), length, slice(0, length))


def add_staged(places: Sequence[torch.Tensor], came: Sequence[Sequence[torch.Tensor]]) -> None:
    """Add what came home from several ranks to the sums it belongs to."""
    for place, parts in zip(places, zip(*came, strict=True), strict=True):
        if place.is_cuda and place.dtype == torch.float32 and has_triton():
            from ring_torch.memory_ops import add_on_gpu

            add_on_gpu(place, parts)
        else:
            for part in parts:
                place.add_(part)


# Who counts what is read out of the peers' memory, by copies and by kernels.
_count: ContextVar[Callable[[int], None] | None] = ContextVar("count", default=None)


@contextmanager
def counted_by(count: Callable[[int], None]) -> Iterator[None]:
    """Call ``count`` with the bytes of each tensor that is read inside."""
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


def is_counted() -> bool:
    """Whether anybody counts."""
    return _count.get() is not None


def note_reads(tensors: Iterable[torch.Tensor]) -> None:
    """Said where tensors are read from peers, of their sizes."""
    count = _count.get()
    if count is not None:
        for x in tensors:
            count(x.nbytes)
