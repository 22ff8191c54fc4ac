"""Masks, which say which query sees which key: one rule over global positions.

A query at position ``i`` sees a key at position ``j`` when every part of the rule that was given
says so::

    causal        j <= i
    window        i - left <= j <= i + right
    chunk_size    i // c == j // c
    cu_seqlens    both lie in the same document
    predicate     predicate(i, j)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import (
    SIZE_LIMIT,
    Bools,
    Ints,
    as_positions,
    is_integer,
    not_none,
    numbers_as_python,
)
from ring_core.base.errors import UnsupportedError
from ring_core.masks.contents import OpaqueError, contents_of
from ring_core.masks.expression import TracedRule, traced

Window = tuple[int | None, int | None]
_FAR = 1 << 30


@numbers_as_python
@dataclass(frozen=True, eq=False)
class Mask:
    """A rule over global positions that says which query sees which key; frozen and hashable.

    The parts that are given are combined with *and*. Masks are equal where their parts are; a
    predicate is known by its code and by what that reads, as it is when it is compared.

    >>> from ring_core import Mask
    >>> Mask(causal=True, window=(1, 0)).dense(range(4), range(4)).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])

    Args:
        causal: A query sees keys at its own position and before.
        window: ``(left, right)``, how many keys besides itself a query sees on each side; ``None``
            leaves a side unbounded.
        chunk_size: A query sees keys of its own chunk of this many positions only.
        cu_seqlens: ``(0, ..., T)``, offsets of packed documents; documents see themselves only.
        predicate: ``predicate(q_pos, k_pos)``, any further rule: a pure, hashable function of two
            arrays of integers that returns booleans of the broadcast shape. With operators on
            integers, inside of 32 bits, every kernel computes it.

    Raises:
        ValueError: A part is malformed.
        UnsupportedError: The predicate reads something that can change without being seen.
    """

    causal: bool = False
    window: Window | None = None
    chunk_size: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    predicate: Callable[[Any, Any], Any] | None = None
    _hash: int = field(init=False, repr=False, default=0)  # of all parts but the predicate
    _contents: Hashable = field(init=False, repr=False, default=None)  # see `snapshot`

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool | np.bool_):
            raise ValueError(f"causal must be a bool, got {self.causal!r}")
        if self.predicate is not None and not callable(self.predicate):
            raise ValueError(
                f"predicate must be callable as (q_pos, k_pos), got {self.predicate!r}"
            )
        store = object.__setattr__  # the dataclass is frozen
        store(self, "causal", bool(self.causal))
        for name, checked in (
            ("window", _checked_window), ("chunk_size", _checked_chunk_size),
            ("cu_seqlens", _checked_cu_seqlens),
        ):  # fmt: skip
            value = getattr(self, name)
            store(self, name, None if value is None else checked(value))
        store(self, "_hash", hash(self._parts))
        try:
            hash(self.predicate)
        except TypeError as error:
            raise ValueError(
                f"predicate must be hashable, for plans are kept by their masks: {error}"
            ) from error
        self._key()  # refuses what no key can hold

    @property
    def _parts(self) -> tuple[Hashable, ...]:
        """Parts by which masks are compared, but for the predicate."""
        return self.causal, self.window, self.chunk_size, self.cu_seqlens

    def _key(self) -> Hashable:
        """Return what the predicate reads: now, or when the snapshot was taken."""
        if self.predicate is None or self._contents is not None:
            return self._contents
        return _contents_of(self.predicate)

    def __hash__(self) -> int:
        return self._hash if self.predicate is None else hash((self._hash, self._key()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and self._parts == other._parts
            and self._key() == other._key()
        )

    @property
    def band(self) -> Window:
        """``causal`` and ``window`` as ``(left, right)`` of ``-right <= q_pos - k_pos <= left``.

        ``None`` is unbounded.
        """
        left, right = self.window or (None, None)
        return (left, 0) if self.causal else (left, right)

    @cached_property
    def document_offsets(self) -> Ints | None:
        """``cu_seqlens`` as an array, without empty documents; ``None`` without ``cu_seqlens``."""
        offsets = self.cu_seqlens
        return None if offsets is None else np.unique(np.asarray(offsets, dtype=np.int64))

    def boundaries(self, start: int, stop: int) -> Ints | None:
        """Return the borders of chunks and documents, ascending, or ``None`` if there are neither.

        They cut the positions ``[start, stop)`` into cells. Tokens may see each other only inside a
        cell: chunks and documents both partition the positions into ranges, and cells are the
        common refinement. Borders outside of ``[start, stop)`` are among them: those of all
        documents, and both of each chunk that the range touches.

        >>> Mask(chunk_size=4, cu_seqlens=(0, 6, 8)).boundaries(0, 8)
        array([0, 4, 6, 8])
        """
        cuts = []
        if self.chunk_size is not None:
            size = self.chunk_size
            cuts.append(np.arange(start // size * size, stop + size, size, dtype=np.int64))
        if self.document_offsets is not None:
            cuts.append(self.document_offsets)
        return np.unique(np.concatenate(cuts)) if cuts else None

    def _check_unchanged(self) -> None:
        """Refuse a :func:`snapshot` whose predicate reads something else by now.

        Raises:
            UnsupportedError: It does.
        """
        if self._contents is not None and _contents_of(not_none(self.predicate)) != self._contents:
            raise UnsupportedError(
                "mask: what the predicate reads has changed since the call was planned, and the call, "
                "or its backward, evaluates it again. Instead: give each call a predicate that stays "
                "as it is until its backward has run"
            )

    def rule(self, q_pos: Any, k_pos: Any) -> Any:
        """Evaluate the rule without ``cu_seqlens`` on integer arrays of numpy, torch or jax.

        It uses operators that these share. The arrays must broadcast against each other; the
        result is boolean, or ``True`` when nothing but ``cu_seqlens`` was given.

        Raises:
            UnsupportedError: This is the mask of a plan, and its predicate has changed since.
        """
        left, right = self.band
        parts = []
        if left is not None:
            parts.append(q_pos - k_pos <= left)
        if right is not None:
            parts.append(k_pos - q_pos <= right)
        if self.chunk_size is not None:
            parts.append(q_pos // self.chunk_size == k_pos // self.chunk_size)
        if self.predicate is not None:
            self._check_unchanged()
            parts.append(self.predicate(q_pos, k_pos))
        return reduce(operator.and_, parts) if parts else True

    def dense(self, q_pos: npt.ArrayLike, k_pos: npt.ArrayLike) -> Bools:
        """Return the mask as booleans ``[len(q_pos), len(k_pos)]``, True where a query sees a key.

        Args:
            q_pos, k_pos: Global positions, one row of integers each.

        Raises:
            ValueError: They are no one-dimensional arrays of integers.
        """
        q, k = as_positions("q_pos", q_pos), as_positions("k_pos", k_pos)
        visible = np.ones((q.size, k.size), dtype=bool)
        visible &= np.asarray(self.rule(q[:, None], k[None, :]), dtype=bool)
        if self.document_offsets is not None:
            q_doc, k_doc = (np.searchsorted(self.document_offsets, x, side="right") for x in (q, k))
            visible &= q_doc[:, None] == k_doc[None, :]
        return visible

    def describe(self) -> str:
        """Return a few words for messages and headings.

        >>> Mask(causal=True, window=(4096, 0)).describe()
        'causal, window=(4096, 0)'
        """
        clauses = ["causal"] if self.causal else []
        clauses += [f"window={self.window}"] if self.window is not None else []
        clauses += [f"chunk_size={self.chunk_size}"] if self.chunk_size is not None else []
        clauses += [f"{len(self.cu_seqlens) - 1} documents"] if self.cu_seqlens is not None else []
        if self.predicate is not None:
            clauses.append(f"predicate={getattr(self.predicate, '__name__', 'function')}")
        return ", ".join(clauses) or "full"


def _contents_of(predicate: Callable[[Any, Any], Any]) -> Hashable:
    """Return the key of a predicate, or refuse it by name."""
    try:
        return contents_of(predicate)
    except OpaqueError as error:
        raise UnsupportedError(
            f"mask: the predicate reads {error}, which can change without being seen, so no plan can "
            f"be kept for it. Instead: let it hold numbers, text, None, arrays, and tuples or frozen "
            f"dataclasses of these"
        ) from error


def snapshot(mask: Mask) -> Mask:
    """Return a mask that stays equal to ``mask`` as it is now, whatever becomes of its predicate.

    Plans are kept, and evaluate their mask later, too. A snapshot is evaluated only as long as its
    predicate reads what it did.
    """
    if mask.predicate is None or mask._contents is not None:  # noqa: SLF001 - its other half
        return mask
    taken = replace(mask)
    object.__setattr__(taken, "_contents", _contents_of(mask.predicate))  # the dataclass is frozen
    return taken


@lru_cache(maxsize=64)
def rule_of(mask: Mask, q_span: tuple[int, int], k_span: tuple[int, int]) -> TracedRule:
    """Return a mask's rule, without ``cu_seqlens``, as an expression, or why it has none.

    It is good for positions inside ``[start, stop)``, as of ``ring_core.masks.expression.traced``.
    """
    mask._check_unchanged()  # noqa: SLF001 - its other half
    if max(map(abs, (*q_span, *k_span))) <= _FAR:
        # Distances are below 2^31 there: larger numbers say the same as this.
        (left, right), chunk = mask.window or (None, None), mask.chunk_size
        mask = replace(
            mask, chunk_size=_at_most(chunk, _FAR),
            window=(_at_most(left, 2 * _FAR - 1), _at_most(right, 2 * _FAR - 1)),
        )  # fmt: skip
    return traced(mask.rule, q_span, k_span)


def _at_most(x: int | None, limit: int) -> int | None:
    return None if x is None else min(x, limit)


def check_documents(mask: Mask, q_len: int, k_len: int) -> None:
    """Check that ``cu_seqlens``, if given, end at the sequence length, the same for Q and K.

    Raises:
        ValueError: They end elsewhere, or there are other keys than queries.
    """
    if mask.cu_seqlens is None:
        return
    if q_len != k_len:
        raise ValueError(
            f"cu_seqlens need as many keys as queries, got {q_len} queries and {k_len} keys; use "
            f"segment_ids as a pair (queries', keys')"
        )
    if mask.cu_seqlens[-1] != q_len:
        raise ValueError(
            f"cu_seqlens must end at the sequence length {q_len}, got {mask.cu_seqlens[-1]}"
        )


def _checked_window(window: Any) -> Window:
    """Check ``window``, and return it as a tuple of Python integers and ``None``."""
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(
            f"window must be a pair (left, right), each a number of keys besides the query's own or "
            f"None for unbounded; got {window!r}. For the last W tokens, itself included, pass "
            f"window=(W - 1, 0)"
        )
    for side in window:
        if side is not None and (not is_integer(side) or not 0 <= side < SIZE_LIMIT):
            raise ValueError(
                f"window={window!r}: each side must be an integer >= 0 and < 2**40, or None for "
                f"unbounded (never -1)"
            )
    left, right = (None if side is None else int(side) for side in window)
    return left, right


def _checked_chunk_size(chunk_size: Any) -> int:
    """Check ``chunk_size``, and return it as a Python integer."""
    if not is_integer(chunk_size) or not 1 <= chunk_size < SIZE_LIMIT:
        raise ValueError(
            f"chunk_size must be an integer >= 1 or None, got {chunk_size!r}; the largest is 2**40 - 1"
        )
    return int(chunk_size)


def _checked_cu_seqlens(cu_seqlens: Any) -> tuple[int, ...]:
    """Check ``cu_seqlens``, and return them as a tuple of Python integers."""
    if _has_flags(cu_seqlens):  # numpy would take False for 0
        raise ValueError(
            f"cu_seqlens must be one row of integers (0, ..., T), got a boolean: {cu_seqlens!r}"
        )
    try:
        offsets = np.asarray(cu_seqlens)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            "cu_seqlens must be known on the host: pass a tuple of ints, or use segment_ids for "
            "documents known on the device only"
        ) from error
    except ValueError as error:
        raise ValueError(f"cu_seqlens must be one row of integers (0, ..., T): {error}") from error
    if offsets.ndim != 1 or offsets.size < 2 or offsets.dtype.kind not in "iu":
        raise ValueError(
            f"cu_seqlens must be one row of at least two integers (0, ..., T), got shape "
            f"{offsets.shape} of {offsets.dtype}"
        )
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {int(offsets[0])}")
    descents = np.flatnonzero(np.diff(offsets.astype(np.int64)) < 0)
    if descents.size:
        entry = int(descents[0])
        raise ValueError(
            f"cu_seqlens must be ascending; entry {entry + 1} is {int(offsets[entry + 1])} after "
            f"{int(offsets[entry])}"
        )
    return tuple(offsets.tolist())


def _has_flags(values: Any) -> bool:
    """Return True if a tuple or list holds booleans."""
    return isinstance(values, tuple | list) and not {bool, np.bool_}.isdisjoint(map(type, values))


def mask_of(
    *,
    causal: bool,
    window: Window | None,
    chunk_size: int | None,
    cu_seqlens: Sequence[int] | None,
) -> Mask:
    """Return the :class:`Mask` of a call's options, from a cache as it is called on every call.

    Lists and arrays of ``cu_seqlens`` may be changed in place between calls and are compared by
    their contents. Tuples of integers cannot change and are recognised by their identity: an equal
    tuple that is another object gets another mask, which is equal too.

    Raises:
        ValueError: An option is malformed.
    """
    sides = tuple(window) if isinstance(window, tuple | list) else (window,)
    # Types are part of the key: 1 == True, but 1 is no flag and has to be refused.
    types = (type(causal), type(window), type(chunk_size), *map(type, sides))
    options = (causal, tuple(window) if isinstance(window, list) else window, chunk_size)
    try:
        return _mask_of(options, types, None if cu_seqlens is None else _Offsets.of(cu_seqlens))
    except (TypeError, ValueError, RuntimeError):  # malformed, or of no kind that can be a key
        return Mask(causal=causal, window=window, chunk_size=chunk_size, cu_seqlens=cu_seqlens)  # type: ignore[arg-type]  # Mask checks them


@dataclass(frozen=True)
class _Offsets:
    """``cu_seqlens`` as a cache key: equal where ``key`` is, an identity or the contents."""

    key: Any
    values: Any = field(compare=False)  # kept, so that no other object gets its identity

    @classmethod
    def of(cls, values: Any) -> _Offsets:
        """Make the key of a tuple, a list, or an array of any framework that lies on the host.

        A tuple's contents are not looked at here; :func:`_mask_of` refuses all but integers.

        Raises:
            TypeError: A list or array that is not of integers, or not on the host.
        """
        if type(values) is tuple:
            return cls(id(values), values)
        array = np.asarray(values).copy()  # the caller may change `values` later
        if array.dtype.kind not in "iu" or _has_flags(values):
            raise TypeError(f"not integers: {array.dtype}")
        return cls((array.dtype.str, array.shape, array.tobytes()), array)


@lru_cache(maxsize=256)
def _mask_of(
    options: tuple[Any, Any, Any], _types: tuple[type, ...], offsets: _Offsets | None
) -> Mask:
    """Make the mask of some options; see :func:`mask_of`, which explains the keys of this cache.

    Raises:
        TypeError: A tuple of ``cu_seqlens`` holds something else than Python's integers.
        ValueError: An option is malformed.
    """
    values = None if offsets is None else offsets.values
    if type(values) is tuple and not all(type(offset) is int for offset in values):
        raise TypeError("what is inside may change in place")
    return Mask(*options, values)
