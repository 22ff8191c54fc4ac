"""Grid of ranks: groups that trade tokens for heads, and between the groups a ring or a gather.

Ranks of a group are consecutive. After the trade each of them has all tokens of its group, for a
part of the heads, and goes on with the ranks of other groups that have the same part::

    8 ranks, groups of 4                 trade heads with    then go on with
    group 0   0 1 2 3    rank 1 of it    0 1 2 3             1 5
    group 1   4 5 6 7    rank 6 of it    4 5 6 7             2 6

In a contiguous or zigzag layout the tokens of a group are those of one rank in the same layout over
the groups; of a :class:`ChunkLayout` the group has the chunks of its ranks. So the second step is a
plan of such a layout, whose work is as even as the layout makes it. A striped layout has no grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np

from ring_core.base.arguments import Ints, check_choice, check_size
from ring_core.base.config import OUTER_NAMES, OuterName
from ring_core.base.errors import UnsupportedError
from ring_core.layouts.layout import ChunkLayout, Layout, LayoutSpec
from ring_core.plan.plan import Plan, make_plan
from ring_core.programs.heads import too_many_ranks


@dataclass(frozen=True)
class RankGrid:
    """Ranks in groups of ``ulysses_size`` consecutive ones; see :func:`rank_grid`.

    Attributes:
        ranks: Number of ranks.
        ulysses_size: Ranks of a group, which trade tokens for heads.
    """

    ranks: int
    ulysses_size: int

    @property
    def outer_size(self) -> int:
        """Number of groups."""
        return self.ranks // self.ulysses_size

    def inner_ranks(self, rank: int) -> range:
        """Return the ranks with which a rank trades tokens for heads: those of its group."""
        first = rank - rank % self.ulysses_size
        return range(first, first + self.ulysses_size)

    def outer_ranks(self, rank: int) -> range:
        """Return the ranks with the same heads as a rank, one of each group, in order."""
        return range(rank % self.ulysses_size, self.ranks, self.ulysses_size)

    def outer_layout(self, layout: LayoutSpec) -> LayoutSpec:
        """Return the layout over groups in which a group has the tokens that its ranks have.

        One group has all tokens, in natural order: ``contiguous``. The layout is not ``striped``,
        which :func:`rank_grid` refuses.
        """
        if self.outer_size == 1:
            return "contiguous"
        if not isinstance(layout, ChunkLayout):
            return layout
        # A group holds what its ranks hold: the inner call sees the group as one rank with these
        # chunks, in ascending order.
        groups = (
            layout.chunks[first : first + self.ulysses_size]
            for first in range(0, self.ranks, self.ulysses_size)
        )
        return ChunkLayout(tuple(tuple(sorted(chain.from_iterable(group))) for group in groups))

    def outer_plan(self, plan: Plan) -> Plan:
        """Return a plan of the ranks over the groups, each of which has its ranks' tokens."""
        return make_plan(
            plan.mask, seq_len=plan.seq_len, cp_size=self.outer_size,
            layout=self.outer_layout(plan.q_layout.name), kv_seq_len=plan.kv_seq_len,
            pad_to=(plan.q_layout.padded_len, plan.k_layout.padded_len),
        )  # fmt: skip

    def scatter_indices(self, layout: Layout, rank: int) -> Ints:
        """Return the index to which each token of a rank's group goes, in the layout over groups.

        They are in the order in which ranks of the group hold the tokens, one rank's behind the
        other's: int64 ``[ulysses_size * layout.local_len]``.
        """
        positions = np.concatenate([layout.positions(peer) for peer in self.inner_ranks(rank)])
        # How many tokens of the group come before each one, which is its local index in the group.
        # The tokens that rank n sends go to the n-th stretch of these indices.
        return np.argsort(np.argsort(positions, kind="stable"), kind="stable")


def rank_grid(
    ranks: int,
    q_heads: int,
    layout: LayoutSpec,
    *,
    outer: OuterName = "ring",
    ulysses_size: int | None = None,
    hosts: Sequence[str] | None = None,
) -> RankGrid:
    """Return the grid of a call's ranks.

    >>> from ring_core.programs.grid import rank_grid
    >>> grid = rank_grid(8, 32, "zigzag", hosts=["a"] * 4 + ["b"] * 4)
    >>> grid, list(grid.inner_ranks(6)), list(grid.outer_ranks(6))
    (RankGrid(ranks=8, ulysses_size=4), [4, 5, 6, 7], [2, 6])

    Args:
        ranks: Number of ranks.
        q_heads: Number of query heads.
        layout: The layout of the tokens over all ranks.
        outer: The strategy between groups.
        ulysses_size: Ranks of a group; ``None`` takes the largest divisor of a host's ranks for
            which there are enough query heads.
        hosts: The host of each rank; ``None`` if all are on one. Unused beside ``ulysses_size``.

    Raises:
        ValueError: Numbers are not positive, or there is no such strategy.
        UnsupportedError: These ranks make no groups of ``ulysses_size``; the message says which
            sizes they can have. Or the layout is ``striped``, whose groups would hold tokens that
            are not evenly spaced; or hosts have unlike numbers of ranks, or ranks that are not
            consecutive.
    """
    check_size("ranks", ranks)
    check_size("q_heads", q_heads)
    check_choice("outer", outer, OUTER_NAMES)
    if layout == "striped":
        raise UnsupportedError(
            f"layout 'striped' gives a group of ranks tokens that outer={outer!r} cannot take: they are "
            f"not evenly spaced. Instead: use layout='zigzag' or 'contiguous', or strategy='ulysses'"
        )
    if ulysses_size is None:
        local = ranks if hosts is None else _ranks_of_a_host(hosts, ranks)
        return RankGrid(ranks, max(ulysses_sizes(local, q_heads)))
    check_size("ulysses_size", ulysses_size)
    legal = ulysses_sizes(ranks, q_heads)
    if ulysses_size not in legal:
        reason = too_many_ranks(q_heads, ulysses_size) or f"it does not divide {ranks} ranks"
        raise UnsupportedError(
            f"ulysses_size={ulysses_size}: {reason}. Instead: use one of {', '.join(map(str, legal))}"
        )
    return RankGrid(ranks, ulysses_size)


def ulysses_sizes(ranks: int, q_heads: int) -> list[int]:
    """Return the sizes that groups of ranks can have: divisors for which query heads suffice."""
    return [n for n in range(1, min(ranks, q_heads) + 1) if ranks % n == 0]


def _ranks_of_a_host(hosts: Sequence[str], ranks: int) -> int:
    """Return how many ranks each host has.

    Raises:
        UnsupportedError: Hosts have unlike numbers of ranks, or a host's are not consecutive.
    """
    assert len(hosts) == ranks, "a host for each rank"
    runs = [(host, len(list(group))) for host, group in groupby(hosts)]
    if len(runs) > len(set(hosts)):
        reason = f"ranks of one host are not consecutive: {', '.join(hosts)}"
    elif len({count for _, count in runs}) > 1:
        counts = ", ".join(f"{host} {count}" for host, count in runs)
        reason = f"hosts have unlike numbers of ranks: {counts}"
    else:
        return runs[0][1]
    raise UnsupportedError(f"{reason}. Instead: say how many ranks split heads, by ulysses_size")
