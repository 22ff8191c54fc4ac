"""Who counts what is read out of the peers' memory, by copies and by kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_count: ContextVar[Callable[[int], None] | None] = ContextVar("count", default=None)


@contextmanager
def counting(count: Callable[[int], None]) -> Iterator[None]:
    """Call ``count`` with the bytes of each tensor that is read inside."""
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


def is_counted() -> bool:
    """Whether anybody counts."""
    return _count.get() is not None


def note_reads(tensors: Iterable[Tensor]) -> None:
    """Said where tensors are read from peers, of their sizes."""
    count = _count.get()
    if count is not None:
        for x in tensors:
            count(x.nbytes)
