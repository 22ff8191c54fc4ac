"""Functions that transports share: requests that a plan implies, sums, counted reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch

from ring_core import GatherProgram, Plan, gather_program
from ring_core.programs.gather import Fetch
from ring_torch.buffers import KeyGradBuffer
from ring_torch.optional import has_triton


def as_in_shard(span: slice) -> slice:
    """Return the same indices, for a buffer in which keys lie as in the rank's shard."""
    return span


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
