"""Interface of transports, and of their sessions, which carry K/V to ranks and dK/dV back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from ring_core import GatherProgram, Plan, gather_program
from ring_core.programs.gather import Fetch, moved_keys
from ring_torch.buffers import HeadCarrier, KeyGradBuffer, KVPayload
from ring_torch.comm.ranks import Ranks
from ring_torch.comm.store import CallSignature
from ring_torch.optional import has_triton
from ring_torch.records import Inputs

IndexMap = Callable[[slice], slice]  # maps local indices of a rank's keys to columns of a buffer


def as_in_shard(span: slice) -> slice:
    """Return the same indices, for a buffer in which keys lie as in the rank's shard."""
    return span


class SessionSpec(NamedTuple):
    """Everything a transport needs to know about one pass over gathered keys.

    Attributes:
        ranks: The ranks that exchange.
        plan: The plan, from which every rank derives what each rank fetches (:func:`program_of`).
        gather: This rank's program.
        keys: The shape of the K/V of a rank for one group of heads.
        groups: Number of groups into which heads are cut.
        device: The device of all tensors.
        acc_dtype: The dtype of gradients that travel.
        needs_grad: True if the call has a backward, in which gradients travel.
        signature: Fields that all ranks must agree on, beside ``number`` and ``seed``.
        number: The call's number on its group.
        seed: The call's dropout seed, or 0.
        by_parts: True if the caller can launch kernels for parts of the heads, as they arrive.
    """

    ranks: Ranks
    plan: Plan
    gather: GatherProgram
    keys: KVPayload
    groups: int
    device: torch.device
    acc_dtype: torch.dtype
    needs_grad: bool
    signature: CallSignature
    number: int
    seed: int
    by_parts: bool = False


def nothing() -> None:
    """Queue no kernels beside fetches."""


class GatherSession(Protocol):
    """The exchange of gathered K/V, and of their gradients, in one pass of a call.

    All ranks call its methods in the same order, groups of heads from the first to the last. A rank
    that calls none in a pass would let its peers wait until the group's timeout.
    """

    @property
    def spec(self) -> SessionSpec:
        """The description of the pass for which it was opened."""

    def fetch(
        self, gather: GatherProgram, inputs: Inputs, meanwhile: Callable[[], object] = nothing
    ) -> Iterator[PendingKV]:
        """Start fetching K/V into new tensors, and yield each group's tensors and their arrival.

        The tensors are shaped as :attr:`KVPayload.message`, for ``gather.length`` tokens. The
        caller takes the groups one by one and runs a group's kernels before it takes the next; it
        takes all of them. ``meanwhile`` queues kernels that need nothing of what is fetched. It is
        called once, as early as the fetches can run beside these kernels, so that the GPU need not
        wait until the host has queued the fetches.
        """

    def accumulators(
        self, gather: GatherProgram, sums: KeyGradBuffer, *, zero: bool
    ) -> list[torch.Tensor]:
        """Return a flat buffer for each group, for dK/dV of the keys that this rank fetches.

        A backward calls it before anything else. The buffers may be memory that peers read; they
        are filled with zeros if ``zero``, and uninitialised otherwise.
        """

    def return_grads(
        self, gather: GatherProgram, sums: KeyGradBuffer, grads: torch.Tensor, group: int, *, overlapped: bool,
        before_last_item: bool | None = None,
    ) -> PendingGrads:  # fmt: skip
        """Start sending a group's dK/dV to the ranks that own the keys, and receiving this rank's.

        Nothing may write ``grads`` any more, but what arrives for own keys. ``before_last_item``
        selects what is sent: ``None`` all; ``True`` the gradients for which
        :meth:`ring_core.GatherProgram.is_before_last_item` is true; ``False``, afterwards, the
        others. ``overlapped`` says that more kernels follow, which the transfer must not slow down.
        """


Refusals = tuple[str, ...]  # reasons, each a clause of a sentence; empty if there is none


class HeadOpener(Protocol):
    """Function that begins a pass in which ranks trade tokens for heads."""

    def __call__(
        self, ranks: Ranks, number: int, seed: int, signature: CallSignature,
        device: torch.device, size: int,
    ) -> HeadCarrier:  # fmt: skip
        """Compare a pass with the peers', and return what carries its exchanges.

        Args:
            ranks: The ranks that exchange.
            number: The call's number on its group.
            seed: The call's dropout seed, or 0.
            signature: Fields that all ranks must agree on, beside ``number`` and ``seed``.
            device: The device of all tensors.
            size: Bytes of the largest exchange: of the messages from one rank to all.

        Raises:
            RankMismatchError: A peer is making another call.
        """


@dataclass(frozen=True)
class Transport:
    """Self-description of a transport: a way in which bytes move between ranks.

    Attributes:
        name: The name that ``transport=`` takes.
        open: Opens a session for a pass over gathered keys. Raises a ``RankMismatchError`` if a
            peer is making another call.
        refusals: Returns the reasons why these ranks cannot use it for tensors on a device, the
            same on all ranks. Its third argument, ``probe``, allows it to communicate; without
            that it returns ``None`` if only communication can tell.
        sends_messages: True if bytes move as messages of the process group, which a strategy may
            also send itself; they are counted where they are sent. False if ranks read them out of
            their peers' memory; then they are counted where they are read.
        asks: The condition that ranks find out together at the first call, worded to follow "if" in
            the text of ``explain``.
        devices: Types of devices that it supports; empty means any.
        missing: Returns the reason why it cannot run between processes of this machine, or an
            empty string, the default. It gets the type of device and, for each GPU, the GPUs whose
            memory it reaches.
        open_heads: Begins a pass in which tokens are traded for heads, and returns what moves them.
            Raises a ``RankMismatchError`` if a peer is making another call. Its bytes are counted
            as ``sends_messages`` says.
        head_refusals: Returns the reasons why these ranks cannot trade tokens for heads by it,
            though they can use it; the same on all ranks. By default there are none.
        is_short: Returns True if gathering K/V of a shape, in so many groups of heads, is so short
            that no work is done over own keys in place; the same on all ranks. By default no call
            is short.
    """

    name: str
    open: Callable[[SessionSpec], GatherSession]
    refusals: Callable[[Ranks, torch.device, bool], Refusals | None]
    open_heads: HeadOpener
    sends_messages: bool
    head_refusals: Callable[[Ranks], Refusals] = lambda _ranks: ()
    asks: str = ""
    devices: tuple[str, ...] = ()
    missing: Callable[[str, Sequence[Sequence[int]]], str] = lambda _device, _reaches: ""
    is_short: Callable[[Plan, KVPayload, int], bool] = lambda _plan, _keys, _groups: False


class PendingKV(NamedTuple):
    """Gathered K/V of one group of heads, whose fetches are in flight."""

    #: The caller may empty the list: then nobody else holds what has arrived.
    tensors: list[torch.Tensor]
    #: Waits (on CUDA: lets the current stream wait) until that many fetches have arrived, counted
    #: in the program's order. ``None`` waits for all, and until this rank's own K/V, which peers
    #: or copies may still read, can be changed by the caller.
    wait: Callable[[int | None], None]
    #: If heads arrive in equal parts, one after the other: for each part, in their order, contexts
    #: in which to launch its kernels, as many as the program has items. A kernel there waits for
    #: its part alone, not for what the caller has queued since, and the caller waits for all behind
    #: them. Empty if all heads arrive together, and if the session was not opened ``by_parts``.
    parts: Sequence[Sequence[Callable[[], AbstractContextManager[object]]]] = ()


#: dK/dV of own keys, on their way home from peers. Called as ``(total, length, index_map)``, it
#: waits for them and adds them to the flat sums ``total`` of ``length`` tokens, in which
#: ``index_map`` finds the columns of own keys. Each is called once, in the order in which the
#: gradients were sent.
PendingGrads = Callable[[torch.Tensor, int, IndexMap], None]


class Traffic(NamedTuple):
    """Bytes that a rank sends to and receives from its peers in a pass, without headers."""

    sent: int
    received: int


def gathered_traffic(
    gather: GatherProgram, plan: Plan, rank: int, keys: KVPayload, acc_dtype: torch.dtype, *,
    forward: bool, fetches: bool,
) -> Traffic:  # fmt: skip
    """Count the bytes of a pass over gathered keys: fetched K/V, and in a backward returned dK/dV.

    ``keys`` describes the K/V of all heads, to which groups add up. ``fetches`` is false for a
    backward to which the forward has saved the gathered K/V.
    """
    tokens_sent, tokens_received = moved_keys(plan, rank, like=gather)
    kv = Traffic(keys.size(tokens_sent), keys.size(tokens_received)) if fetches else Traffic(0, 0)
    if forward:
        return kv
    token = keys.batch * keys.width * acc_dtype.itemsize
    return Traffic(kv.sent + tokens_received * token, kv.received + tokens_sent * token)


def program_of(plan: Plan, rank: int, *, like: GatherProgram) -> GatherProgram:
    """Return another rank's program of the pass whose program on this rank is ``like``."""
    return gather_program(plan, rank, own=like.own, splits=like.splits, tile=like.tile)


@lru_cache(maxsize=256)
def requests_to(
    plan: Plan, rank: int, *, like: GatherProgram, before_last_item: bool | None = None
) -> tuple[tuple[int, Fetch], ...]:
    """Return what other ranks fetch from a rank, as ``(peer, fetch)``, in a peer's own order.

    Both sides derive it from the plan, so a request needs no message. ``before_last_item`` selects
    fetches as in :func:`some_fetches`.
    """
    return tuple(
        (peer, fetch)
        for peer in range(plan.cp_size)
        if peer != rank
        for fetch in some_fetches(program_of(plan, peer, like=like), before_last_item)
        if fetch.rank == rank
    )


def some_fetches(gather: GatherProgram, before_last_item: bool | None) -> list[Fetch]:
    """Return the program's fetches, all or a part of them.

    With ``before_last_item`` True they are those whose gradients are final before the last work
    item is launched, with False the others, with ``None`` all.
    """
    return [
        fetch
        for fetch in gather.fetches
        if before_last_item is None or gather.is_before_last_item(fetch) == before_last_item
    ]


def write_keys(
    keys: KVPayload, k: torch.Tensor, v: torch.Tensor, packed: torch.Tensor, *, add: bool = False
) -> None:
    """Do what :meth:`KVPayload.write` does, on GPUs in one kernel."""
    if packed.is_cuda and has_triton():
        from ring_torch.memory_ops import pack_kv_on_gpu

        pack_kv_on_gpu(k, v, packed, add=add)
    else:
        keys.write(k, v, packed, add=add)


def staging_for(sums: KeyGradBuffer, like: torch.Tensor, fetch: Fetch) -> list[torch.Tensor]:
    """Allocate buffers for the dK/dV that come home for what a peer fetched."""
    length = fetch.source.stop - fetch.source.start
    return sums.strided_views(like.new_empty(sums.numel(length)), length, slice(0, length))


def add_staged(totals: Sequence[torch.Tensor], received: Sequence[Sequence[torch.Tensor]]) -> None:
    """Add gradients from several ranks to sums in place, in the order of the ranks.

    ``received`` has for each rank as many tensors as there are ``totals``. They may be in peers'
    memory, which one kernel then reads for several ranks at once.
    """
    # The order of additions is fixed, so results are equal bit by bit in every run.
    for total, summands in zip(totals, zip(*received, strict=True), strict=True):
        if total.is_cuda and total.dtype == torch.float32 and has_triton():
            from ring_torch.memory_ops import add_on_gpu

            add_on_gpu(total, summands)
        else:
            for summand in summands:
                total.add_(summand)


# Called with the bytes of each tensor read out of peers' memory, while somebody counts them.
_count: ContextVar[Callable[[int], None] | None] = ContextVar("count", default=None)


@contextmanager
def counted_by(count: Callable[[int], None]) -> Iterator[None]:
    """Call ``count`` with the bytes of each tensor read out of peers' memory inside the block."""
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


def is_counted() -> bool:
    """Return True if reads out of peers' memory are being counted (:func:`counted_by`)."""
    return _count.get() is not None


def note_reads(tensors: Iterable[torch.Tensor]) -> None:
    """Report tensors that are read out of peers' memory to whoever counts their bytes."""
    count = _count.get()
    if count is not None:
        for x in tensors:
            count(x.nbytes)
