"""Arithmetic on rectangles with bands, for many of them at once.

A band is ``lo <= i - j <= hi`` over a rectangle of ``q_len`` rows ``i`` and ``k_len`` columns
``j``. All functions take and return integer arrays that broadcast; a side without a bound holds
``-UNBOUNDED`` or ``UNBOUNDED``, values no difference of positions reaches, so that the arithmetic
needs no cases.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ring_core.base.arguments import SIZE_LIMIT, Bools, Ints

IntLike = Ints | np.int64 | int

UNBOUNDED = SIZE_LIMIT


class Rectangles(NamedTuple):
    """Rectangles of local indices, each with its band: arrays of one shape.

    A rectangle is query rows ``q_start:q_stop`` and key columns ``k_start:k_stop``. The band ``lo
    <= i - j <= hi`` counts ``i`` and ``j`` from the rectangle's own corner. Empty rectangles are
    all zeros.
    """

    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints
    lo: Ints
    hi: Ints

    @property
    def live(self) -> Bools:
        """True for each rectangle that is not empty."""
        return self.q_stop > self.q_start


def local_band(
    q_start: IntLike, k_start: IntLike, stride: int, band: tuple[int | None, int | None]
) -> tuple[Ints, Ints]:
    """Return the mask's rule ``-right <= q - k <= left`` as a band of local indices, ``(lo, hi)``.

    Row ``i`` stands for position ``q_start + stride * i``, column ``j`` for ``k_start + stride *
    j``; with ``d = q_start - k_start`` the rule reads ``ceil((-right - d) / stride) <= i - j <=
    floor((left - d) / stride)``.

    Args:
        q_start, k_start: Positions of the first query and the first key of each pair of runs.
        stride: Distance of neighbouring tokens of a run, in positions.
        band: ``(left, right)``, keys that a query sees before and after itself; ``None`` is
            unbounded.
    """
    left, right = band
    offset = np.asarray(q_start, dtype=np.int64) - np.asarray(k_start, dtype=np.int64)
    lo = np.full_like(offset, -UNBOUNDED) if right is None else -((right + offset) // stride)
    hi = np.full_like(offset, UNBOUNDED) if left is None else (left - offset) // stride
    return lo, hi


def trim(rect: Rectangles) -> Rectangles:
    """Cut fully masked rows and columns off rectangles, and drop band sides that hide nothing.

    The result is canonical: empty rectangles are all zeros, and two rectangles over the same
    indices show the same cells exactly when they are equal.
    """
    q_len, k_len = rect.q_stop - rect.q_start, rect.k_stop - rect.k_start
    # Row i sees columns i - hi .. i - lo, column j is seen by rows j + lo .. j + hi. So rows
    # before lo see no column, rows from k_len + hi on see none either; the same for columns.
    q0, q1 = np.maximum(rect.lo, 0), np.minimum(k_len + rect.hi, q_len)
    k0, k1 = np.maximum(-rect.hi, 0), np.minimum(q_len - rect.lo, k_len)
    live = (q0 < q1) & (k0 < k1) & (rect.lo <= rect.hi)
    sides = rect.q_start + q0, rect.q_start + q1, rect.k_start + k0, rect.k_start + k1
    # The band counts from the new corner. A side that the farthest cell satisfies hides nothing.
    moved_lo, moved_hi = rect.lo - q0 + k0, rect.hi - q0 + k0
    lo: Ints = np.where(moved_lo <= -(k1 - k0 - 1), -UNBOUNDED, moved_lo)
    hi: Ints = np.where(moved_hi >= q1 - q0 - 1, UNBOUNDED, moved_hi)
    return Rectangles(*(np.where(live, part, 0) for part in (*sides, lo, hi)))


def clip(
    rect: Rectangles, q_start: IntLike, q_stop: IntLike, k_start: IntLike, k_stop: IntLike
) -> Rectangles:
    """Intersect rectangles with others; bands count from the new corners, the result is trimmed."""
    q0, k0 = np.maximum(rect.q_start, q_start), np.maximum(rect.k_start, k_start)
    # An intersection that is empty gets no rows, and trims to zeros.
    q1 = np.maximum(np.minimum(rect.q_stop, q_stop), q0)
    k1 = np.maximum(np.minimum(rect.k_stop, k_stop), k0)
    q_shift, k_shift = q0 - rect.q_start, k0 - rect.k_start
    lo: Ints = rect.lo - q_shift + k_shift
    return trim(Rectangles(q0, q1, k0, k1, lo, rect.hi - q_shift + k_shift))


def count(q_len: IntLike, k_len: IntLike, lo: IntLike, hi: IntLike) -> Ints:
    """Count the cells of ``q_len`` x ``k_len`` rectangles that a band shows, in closed form."""
    # What is at or above lo, less what is above hi.
    shown: Ints = _at_least(q_len, k_len, lo) - _at_least(
        q_len, k_len, np.asarray(hi, dtype=np.int64) + 1
    )
    return np.maximum(shown, 0)


def _at_least(q_len: IntLike, k_len: IntLike, lo: IntLike) -> Ints:
    """Count cells with ``i - j >= lo``: a triangle, less what sticks out of the rectangle."""
    # Below -k_len nothing changes, and squares of UNBOUNDED would overflow.
    lo = np.maximum(lo, -k_len)
    return _triangle(q_len - lo) - _triangle(q_len - lo - k_len) - _triangle(-lo)


def _triangle(n: Ints) -> Ints:
    """Return ``1 + 2 + ... + n``, 0 for negative ``n``."""
    n = np.maximum(n, 0)
    return n * (n + 1) // 2
