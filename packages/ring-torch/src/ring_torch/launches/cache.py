"""Caches of prepared launches, by the strides and alignment of their tensors, and of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

from torch import Tensor

_MOST = 256  # keys of a cache


def tensors_key(*tensors: Tensor | None) -> object:
    """Return a key of tensors: equal for tensors of equal strides and alignment to 16 bytes.

    Shapes are not part of it: the launch or the message layout of the tensors has them.
    """
    return tuple([None if x is None else (x.stride(), x.data_ptr() % 16) for x in tensors])


def keep[T](launches_by_key: dict[object, T], key: object, launches: T) -> None:
    """Keep launches under a key; a full cache loses its oldest.

    Where ``None`` is kept, a launch that cannot be repeated is not asked for that again.
    """
    # Strides that change with every call would otherwise keep launches without end. Another thread
    # may do the same meanwhile: the list is a copy, and a key that is gone is no error.
    if len(launches_by_key) >= _MOST:
        oldest, *_ = [*launches_by_key]
        launches_by_key.pop(oldest, None)
    launches_by_key[key] = launches


class KeptViews:
    """Views of a buffer, made once for calls that bring the same one: making them costs the host.

    Views hold the buffer's memory, so they are dropped when the tensor that was brought is gone. A
    caller that brings a new buffer each time gets new views.
    """

    def __init__(self, make: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Take the function that makes the views; it gets a detached tensor of the same memory."""
        self._make = make
        self._kept: tuple[ref[Tensor], Sequence[Tensor]] | None = None

    def __call__(self, buffer: Tensor) -> Sequence[Tensor]:
        """Return the views of a buffer."""
        kept = self._kept  # read once: another thread may replace it
        if kept is None or kept[0]() is not buffer:
            # Views of the buffer itself would keep it alive, and the callback this object.
            kept = ref(buffer, partial(_drop, ref(self))), self._make(buffer.detach())
            self._kept = kept
        return kept[1]


def _drop(owner: ref[KeptViews], dead: ref[Tensor]) -> None:
    """Drop the views of a buffer that is gone, if they are still kept."""
    kept_views = owner()
    if kept_views is not None and (kept := kept_views._kept) is not None and kept[0] is dead:  # noqa: SLF001 - of this module
        kept_views._kept = None  # noqa: SLF001 - likewise
