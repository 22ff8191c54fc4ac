"""The mask of a call's options, made once for equal options: making one reads every document."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ring_core.masks.mask import Mask, Window


def mask_of(
    *,
    causal: bool,
    window: Window | None,
    chunk_size: int | None,
    cu_seqlens: Sequence[int] | None,
) -> Mask:
    """:class:`Mask` of these options, which may be changed in place between calls.

    Tuples of integers cannot, and are known again by their identity; arrays and lists by what they
    hold.

    Raises:
        ValueError: An option is malformed.
    """
    sides = tuple(window) if isinstance(window, tuple | list) else (window,)
    # Equal options of unlike types are not the same, 1 is no flag: so types are part of the key.
    types = (type(causal), type(window), type(chunk_size), *map(type, sides))
    options = (causal, tuple(window) if isinstance(window, list) else window, chunk_size)
    try:
        if type(cu_seqlens) is tuple:
            return _of_ints(options, types, _Same(cu_seqlens))
        return _of_array(options, types, _Array.of(cu_seqlens))
    except (TypeError, ValueError, RuntimeError):  # malformed, or of no kind that can be a key
        return Mask(causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens)  # type: ignore[arg-type]


class _Same:
    """A key that is equal to that of the same object alone, which it keeps."""

    __slots__ = ("value",)

    def __init__(self, value: tuple[Any, ...]) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class _Array(NamedTuple):
    """What an array holds."""

    dtype: str
    shape: tuple[int, ...]
    values: bytes

    @classmethod
    def of(cls, values: Any) -> _Array | None:
        """Of an array of any framework that lies on the host, or a list; ``None`` of none.

        Raises:
            TypeError: Not integers, or not on the host.
        """
        if values is None:
            return None
        array = np.asarray(values)
        if array.dtype.kind not in "iu":
            raise TypeError(f"not integers: {array.dtype}")
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray[Any, Any]:
        """The array."""
        return np.frombuffer(self.values, self.dtype).reshape(self.shape)


@lru_cache(maxsize=256)
def _of_ints(options: tuple[Any, ...], _types: tuple[type, ...], offsets: _Same) -> Mask:
    if not all(type(offset) is int for offset in offsets.value):
        raise TypeError("what is inside may change in place")
    causal, window, chunk_size = options
    return Mask(causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=offsets.value)


@lru_cache(maxsize=256)
def _of_array(options: tuple[Any, ...], _types: tuple[type, ...], offsets: _Array | None) -> Mask:
    causal, window, chunk_size = options
    documents: Any = None if offsets is None else offsets.array()
    return Mask(causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=documents)
