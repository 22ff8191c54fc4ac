"""Layouts: token -> (rank, local index), as runs of evenly spaced tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import (
    SIZE_LIMIT,
    Ints,
    check_choice,
    check_index,
    check_size,
    describe_value,
    is_integer,
    numbers_as_python,
)

LayoutName = Literal["contiguous", "zigzag", "striped"]


class Run(NamedTuple):
    """Evenly spaced tokens that lie next to each other on a rank.

    Local index ``local_start + n`` holds position ``global_start + stride * n``, for ``0 <= n <
    length``.
    """

    local_start: int
    length: int
    global_start: int
    stride: int


@dataclass(frozen=True, repr=False)
class ChunkLayout:
    """Equal chunks of the sequence, assigned to ranks.

    :func:`ring_core.balanced_layout` makes one that spreads the work of a mask evenly; results are
    exact with any. Frozen and hashable.

    >>> from ring_core import ChunkLayout, Layout
    >>> layout = ChunkLayout(((0, 3), (1, 2)))  # of four chunks, as zigzag assigns them
    >>> Layout(layout, seq_len=8, cp_size=2).positions(0)
    array([0, 1, 6, 7])

    Args:
        chunks: For each rank the numbers of the chunks it holds, ascending. All ranks hold equally
            many, and each number ``0, 1, ...`` is there once.

    Raises:
        ValueError: Numbers are not ascending, missing or repeated, or ranks hold unequally many.
    """

    chunks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, tuple | list) or not all(
            isinstance(chunks, tuple | list) for chunks in self.chunks
        ):
            raise ValueError(f"chunks must be a tuple of chunk numbers a rank, got {self.chunks!r}")
        flat = list(chain.from_iterable(self.chunks))
        if not flat or not all(map(is_integer, flat)):
            raise ValueError(f"chunks must be integers, one a rank at least, got {self.chunks!r}")
        if len(set(map(len, self.chunks))) > 1:
            raise ValueError(
                f"chunks must be as many on every rank, got {list(map(len, self.chunks))}"
            )
        if sorted(flat) != list(range(len(flat))):
            raise ValueError(f"chunks must be 0..{len(flat) - 1}, each once, got {sorted(flat)}")
        if any(a > b for chunks in self.chunks for a, b in pairwise(chunks)):
            raise ValueError(f"chunks must ascend on every rank, got {self.chunks!r}")
        # The dataclass is frozen.
        object.__setattr__(self, "chunks", tuple(tuple(map(int, x)) for x in self.chunks))

    def __repr__(self) -> str:
        return f"chunks({self.cp_size}x{self.chunks_per_rank})"

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self.chunks)

    @property
    def chunks_per_rank(self) -> int:
        """Number of chunks that each rank holds."""
        return len(self.chunks[0])

    @cached_property
    def table(self) -> Ints:
        """Chunk numbers as an int64 array ``[cp_size, chunks_per_rank]``."""
        return np.array(self.chunks, dtype=np.int64)


@numbers_as_python
@dataclass(frozen=True)
class Layout:
    """An assignment of ``seq_len`` tokens, and padding behind them, to ``cp_size`` ranks.

    Each rank holds equally many. Without ``pad_to`` there is no padding.

    ``contiguous``: rank ``r`` holds the ``r``-th of ``cp_size`` equal pieces. ``zigzag``: of
    ``2 * cp_size`` chunks it holds chunks ``r`` and ``2 * cp_size - 1 - r`` (head-tail, dual chunk
    swap); one rank alone holds all as it is. ``striped``: it holds every ``cp_size``-th token from
    token ``r`` on. A :class:`ChunkLayout`: it holds the chunks that this says.

    >>> from ring_core import Layout
    >>> Layout("zigzag", seq_len=8, cp_size=2).positions(0)
    array([0, 1, 6, 7])
    >>> Layout("striped", seq_len=8, cp_size=2).positions(1)
    array([1, 3, 5, 7])

    Padding stands at the end of the sequence, so on each rank behind its tokens, for all layouts
    hold tokens in ascending order.

    >>> layout = Layout.padded("zigzag", seq_len=6, cp_size=2)
    >>> layout.padded_len, layout.positions(0), int(layout.num_tokens(0))
    (8, array([0, 1, 6, 7]), 2)

    Attributes:
        name: Name of the layout, or a :class:`ChunkLayout`.
        seq_len: Number of tokens.
        cp_size: Number of ranks.
        pad_to: Number of tokens and padding; ``None`` without padding, also where ``seq_len`` was
            given.

    Raises:
        ValueError: Unknown name, chunks for another number of ranks, ``pad_to`` below ``seq_len``,
            or a length, with its padding, that is no positive multiple of :attr:`divisor`.
    """

    name: LayoutName | ChunkLayout
    seq_len: int
    cp_size: int
    pad_to: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, ChunkLayout) and (
            not isinstance(self.name, str) or self.name not in get_args(LayoutName)
        ):
            raise ValueError(
                f"unknown layout {self.name!r}; known: {', '.join(get_args(LayoutName))}, or a ChunkLayout"
            )
        check_size("cp_size", self.cp_size)
        if isinstance(self.name, ChunkLayout) and self.name.cp_size != self.cp_size:
            raise ValueError(
                f"layout {self.name} has chunks for {self.name.cp_size} ranks, and there are "
                f"{self.cp_size}; balance chunks for cp_size={self.cp_size}"
            )
        if not is_integer(self.seq_len) or self.seq_len >= SIZE_LIMIT:
            raise ValueError(
                f"sequence length must be an integer < 2**40, got {describe_value(self.seq_len)}; "
                f"it is the number of tokens of the whole sequence, as x.shape[1] before sharding"
            )
        needs = f"a positive multiple of {self.divisor}, as the {self.name} layout over {self.cp_size} ranks needs"
        if self.pad_to is not None and self.seq_len > 0:
            if not is_integer(self.pad_to) or not self.seq_len <= self.pad_to < SIZE_LIMIT:
                raise ValueError(
                    f"pad_to must be an integer >= seq_len={self.seq_len} and < 2**40, got "
                    f"{describe_value(self.pad_to)}"
                )
            if self.pad_to % self.divisor:
                raise ValueError(f"padded length {self.pad_to} is not {needs}")
            if self.pad_to == self.seq_len:
                # Equal layouts must compare equal, as plans and calls are found by them.
                object.__setattr__(self, "pad_to", None)  # the dataclass is frozen
        elif self.seq_len < 1 or self.seq_len % self.divisor:
            padded = max(1, -(-self.seq_len // self.divisor)) * self.divisor
            how = (
                f" with zeros at the end, as shard(x, pad=True) does, and pass seq_len={self.seq_len}, "
                f"in cross attention seq_len=(queries', keys'), by which no token sees them"
            )
            raise ValueError(
                f"sequence length {self.seq_len} is not {needs}; pad to {padded}"
                f"{how if self.seq_len > 0 else ''}"
            )

    @classmethod
    def padded(cls, name: LayoutSpec, seq_len: int, cp_size: int) -> Layout:
        """Return the layout of ``seq_len`` tokens with the least padding that it needs.

        >>> Layout.padded("contiguous", seq_len=5, cp_size=4).padded_len
        8

        Raises:
            ValueError: Unknown name, chunks for another number of ranks, or no token.
        """
        # Equal lengths on all ranks, and equal runs inside: the least multiple of both.
        divisor = divisor_of(name, cp_size)
        if not is_integer(seq_len) or seq_len < 1:
            return cls(name, seq_len, cp_size)  # which refuses it
        return cls(name, seq_len, cp_size, -(-seq_len // divisor) * divisor)

    @property
    def divisor(self) -> int:
        """Number that the sequence length, with its padding, must be a multiple of."""
        return self.cp_size * self.num_runs

    @property
    def padded_len(self) -> int:
        """Number of tokens and padding, over all ranks."""
        return self.seq_len if self.pad_to is None else self.pad_to

    @property
    def local_len(self) -> int:
        """Number of tokens and padding per rank."""
        return self.padded_len // self.cp_size

    @property
    def stride(self) -> int:
        """Distance of neighbouring tokens of a run, in positions."""
        return self.cp_size if self.name == "striped" else 1

    @property
    def num_runs(self) -> int:
        """Number of runs per rank."""
        if isinstance(self.name, ChunkLayout):
            return self.name.chunks_per_rank
        return 2 if self._is_zigzag else 1

    @property
    def _is_zigzag(self) -> bool:
        """True if ranks hold two chunks each; one rank alone holds the sequence as it is."""
        return self.name == "zigzag" and self.cp_size > 1

    @property
    def run_starts(self) -> tuple[int, ...]:
        """Local index at which each run starts, equal on every rank."""
        return tuple(range(0, self.local_len, self.run_length))

    @property
    def run_length(self) -> int:
        """Number of tokens and padding of each run."""
        return self.local_len // self.num_runs

    def run_positions(self, rank: npt.ArrayLike) -> Ints:
        """Return the position of each run's first token, ``[..., runs]`` for ranks ``[...]``."""
        r = np.asarray(rank, dtype=np.int64)
        if isinstance(self.name, ChunkLayout):
            return self.name.table[r] * self.run_length
        if self._is_zigzag:
            # Under a causal mask the r-th chunk from the front and the r-th from the back have as
            # much work together on every rank.
            return np.stack([r, 2 * self.cp_size - 1 - r], axis=-1) * self.run_length
        return r[..., None] * (1 if self.name == "striped" else self.local_len)

    def tokens_from(self, position: Ints) -> Ints:
        """Return how many tokens, without padding, a run has that starts at each position."""
        # Rounded up: a run that begins before the end has at least one token.
        return np.clip(-((position - self.seq_len) // self.stride), 0, self.run_length)

    def num_tokens(self, rank: npt.ArrayLike) -> Ints:
        """Return how many tokens each rank holds, before its padding."""
        tokens: Ints = self.tokens_from(self.run_positions(rank)).sum(axis=-1)
        return tokens

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of one rank with their padding, in local order."""
        check_index("rank", rank, self.cp_size)
        # Without numpy, whose numbers a compiler that traces this would not know.
        chunks: tuple[int, ...] = (rank,)
        if isinstance(self.name, ChunkLayout):
            chunks = self.name.chunks[rank]
        elif self._is_zigzag:
            chunks = rank, 2 * self.cp_size - 1 - rank
        length = self.run_length
        # Runs of a striped layout begin one token apart, all others a run apart.
        unit = 1 if self.stride > 1 else length
        return tuple(
            Run(n * length, length, chunk * unit, self.stride) for n, chunk in enumerate(chunks)
        )

    def positions(self, rank: int) -> Ints:
        """Return the global position of each token that a rank holds, int64 ``[local_len]``.

        Padding has the positions from ``seq_len`` on.
        """
        check_index("rank", rank, self.cp_size)
        steps = np.arange(self.run_length, dtype=np.int64) * self.stride
        return (self.run_positions(rank)[:, None] + steps).reshape(-1)


#: The layout of one rank that holds a sequence as several ranks have padded it: by any length.
WHOLE_LAYOUT = ChunkLayout(((0,),))
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
LayoutSpec = LayoutName | ChunkLayout


def check_layout(layout: LayoutSpec) -> LayoutSpec:
    """Check that an argument is the name of a layout or a :class:`ChunkLayout`, and return it.

    Raises:
        ValueError: It is neither; the message lists the names.
    """
    if not isinstance(layout, ChunkLayout):
        try:
            check_choice("layout", layout, LAYOUTS)
        except ValueError as error:
            raise ValueError(f"{error}, or what ring_core.balanced_layout returns") from None
    return layout


@numbers_as_python
def divisor_of(layout: LayoutSpec, cp_size: int) -> int:
    """Return the number that sequence lengths must be a multiple of, in a layout over ranks.

    >>> from ring_core import divisor_of
    >>> divisor_of("zigzag", cp_size=4)
    8

    Raises:
        ValueError: No such layout, or it has chunks for another number of ranks.
    """
    check_layout(layout)
    ranks = check_size("cp_size", cp_size)
    runs = layout.chunks_per_rank if isinstance(layout, ChunkLayout) else 2  # at most
    return Layout(layout, ranks * runs, ranks).divisor
