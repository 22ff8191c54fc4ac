"""Plan of heads: which heads each rank attends with when ranks trade tokens for heads.

Every rank has equally many places for query heads and for K/V heads, and each of its K/V places
serves equally many consecutive query places, so that kernels see plain grouped-query attention.
Places that are left over are padded; a rank may hold fewer heads than another, or none::

    H=12, K=3, 4 ranks: each K/V head is copied to all ranks, its query heads are dealt out

    rank 0   query heads 0 4  8    K/V heads 0 1 2
    rank 1   query heads 1 5  9    K/V heads 0 1 2
    rank 2   query heads 2 6 10    K/V heads 0 1 2
    rank 3   query heads 3 7 11    K/V heads 0 1 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import check_size, numbers_as_python

Heads = npt.NDArray[np.int32]
PADDING = -1  # stands for a head in slots that hold none


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """The heads of each rank of a group that trades tokens for heads; see :func:`head_plan`.

    Slots are places for heads, counted over the ranks: slot ``n`` of query heads is place ``n %
    q.shape[1]`` of rank ``n // q.shape[1]``.

    Attributes:
        q: Global query heads of each rank, int32 ``[ranks, H_local]``, ``PADDING`` where none.
        kv: Global K/V heads of each rank, int32 ``[ranks, K_local]``, ``PADDING`` where none.
    """

    q: Heads
    kv: Heads

    @cached_property
    def q_filled(self) -> Heads:
        """``q`` with another head of the same K/V head in place of each ``PADDING``."""
        return _filled(self.q)

    @cached_property
    def kv_filled(self) -> Heads:
        """``kv`` with the head before in place of each ``PADDING``."""
        return _filled(self.kv)

    @cached_property
    def q_slots(self) -> Heads:
        """Slot of each query head, int32 ``[H]``."""
        return _slots(self.q)[:, 0]

    @cached_property
    def kv_slots(self) -> Heads:
        """Slots of the copies of each K/V head, int32 ``[K, copies]``, ascending."""
        return _slots(self.kv)

    @property
    def copies(self) -> int:
        """Number of ranks that attend with each K/V head."""
        return int(self.kv_slots.shape[1])

    @property
    def padding_share(self) -> float:
        """Share of the slots of query heads that hold none: work whose results are dropped."""
        return float((self.q == PADDING).mean())

    def describe(self) -> str:
        """Say how heads are padded and copied; empty if each has one place and none is left.

        >>> from ring_core import head_plan
        >>> head_plan(40, 8, 16).describe()
        '40 query heads in 48 places (17% padding), 8 K/V heads in 16'
        """
        (q_heads, kv_heads), (q_places, kv_places) = (
            (len(self.q_slots), len(self.kv_slots)), (self.q.size, self.kv.size)
        )  # fmt: skip
        if (q_heads, kv_heads) == (q_places, kv_places):
            return ""
        padding = f" ({self.padding_share:.0%} padding)" if q_places > q_heads else ""
        return (
            f"{q_heads} query heads in {q_places} places{padding}, {kv_heads} K/V heads in "
            f"{kv_places}"
        )


@numbers_as_python
def head_plan(q_heads: int, kv_heads: int, ranks: int) -> HeadPlan:
    """Return which heads each rank attends with when ranks trade tokens for heads.

    Each K/V head is copied to so many ranks, its query heads dealt out to the copies, that a rank
    has the fewest query heads, padding included; of those, the fewest K/V heads.

    >>> from ring_core import head_plan
    >>> head_plan(12, 3, 4).q[1], head_plan(7, 7, 4).q[3]
    (array([1, 5, 9], dtype=int32), array([ 6, -1], dtype=int32))

    Args:
        q_heads: Number of query heads ``H``.
        kv_heads: Number of K/V heads ``K``, a divisor of ``H``.
        ranks: Number of ranks, at most ``H``.

    Raises:
        ValueError: A number is no positive integer, there are more ranks than query heads, or
            ``K`` does not divide ``H``.
    """
    for name, number in (("q_heads", q_heads), ("kv_heads", kv_heads), ("ranks", ranks)):
        check_size(name, number)
    if q_heads % kv_heads:
        raise ValueError(f"kv_heads must divide q_heads, got {kv_heads} and {q_heads}")
    if reason := too_many_ranks(q_heads, ranks):
        raise ValueError(reason)
    return _head_plan(q_heads, kv_heads, ranks)


@lru_cache(maxsize=256)
def _head_plan(q_heads: int, kv_heads: int, ranks: int) -> HeadPlan:
    """Return the plan of valid numbers, made once."""
    group = q_heads // kv_heads

    def places(copies: int) -> tuple[int, int]:
        """Return how many places a rank has for query heads, and how many for K/V heads."""
        kv_places = -(-kv_heads * copies // ranks)
        return kv_places * -(-group // copies), kv_places

    # A rank's time is that of the fullest rank, so places count, not heads. Among equals fewer K/V
    # places mean fewer bytes in the exchange.
    copies = min(range(1, min(group, ranks) + 1), key=places)
    # The copies of a K/V head are dealt out, so that no rank has two. Heads without copies stay
    # side by side: a rank then has a range of them.
    count = kv_heads * copies
    if copies == 1:
        dealt = np.array_split(np.arange(count), ranks)
    else:
        dealt = [np.arange(rank, count, ranks) for rank in range(ranks)]
    q_places, kv_places = places(copies)
    q = np.full((ranks, kv_places, q_places // kv_places), PADDING, np.int32)
    kv = np.full((ranks, kv_places), PADDING, np.int32)
    for rank, numbers in enumerate(dealt):
        for index, number in enumerate(numbers.tolist()):
            head = number // copies
            kv[rank, index] = head
            # Query heads of one K/V head are shared out over its copies; each has a place on one
            # rank only, so outputs are never summed. dK/dV of the copies are.
            served = np.array_split(np.arange(head * group, (head + 1) * group), copies)
            heads = served[number % copies]
            q[rank, index, : len(heads)] = heads
    return HeadPlan(_constant(q.reshape(ranks, q_places)), _constant(kv))


def too_many_ranks(q_heads: int, ranks: int) -> str:
    """Return why so many ranks cannot trade tokens for heads, or an empty string."""
    if ranks <= q_heads:
        return ""
    return f"q has {q_heads} heads, so at most {q_heads} ranks can split them, not {ranks}"


def _filled(heads: Heads) -> Heads:
    """Return heads with the one before, in the order of slots, in place of each ``PADDING``."""
    # A place without a head computes with the head before it: its results are not read, and zeros
    # are sent for its gradients.
    flat = heads.ravel()
    last = np.maximum.accumulate(np.where(flat == PADDING, 0, np.arange(flat.size)))
    return _constant(flat[last].reshape(heads.shape))


def _slots(heads: Heads) -> Heads:
    """Return the slots of each head, int32 ``[heads, copies]``, ascending."""
    flat = heads.ravel()
    # PADDING is -1 and sorts first: those slots are skipped.
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat == PADDING) :]
    return _constant(order.reshape(int(flat.max()) + 1, -1).astype(np.int32))


def _constant(heads: Heads) -> Heads:
    """Return an array that nobody can change, as all equal calls share it."""
    heads.setflags(write=False)
    return heads
