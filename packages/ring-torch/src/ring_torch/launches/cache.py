"""Caches of prepared launches, by the strides and the alignment of their tensors."""

from __future__ import annotations

from torch import Tensor

_MOST = 16  # keys of a cache


def tensors_key(*tensors: Tensor | None) -> object:
    """Return a key of tensors: equal for tensors of equal strides and alignment to 16 bytes.

    Shapes are not part of it: the prepared call or the message layout of the tensors has them.
    """
    return tuple([None if x is None else (x.stride(), x.data_ptr() % 16) for x in tensors])


def keep[T](launches_by_key: dict[object, T], key: object, launches: T | None) -> None:
    """Keep launches under a key, if there are any; a full cache is emptied first."""
    if launches is None:
        return
    # Strides that change with every call would otherwise keep launches without end.
    if len(launches_by_key) >= _MOST:
        launches_by_key.clear()
    launches_by_key[key] = launches
