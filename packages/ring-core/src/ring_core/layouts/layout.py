"""Which rank holds which token: token -> (rank, local index), as runs of evenly spaced tokens."""

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
)

LayoutName = Literal["contiguous", "zigzag", "striped"]


class Run(NamedTuple):
    """Local indices ``local_start + n`` hold positions ``global_start + stride * n``."""

    local_start: int
    length: int
    global_start: int
    stride: int


@dataclass(frozen=True, repr=False)
class ChunkLayout:
    """Equal chunks of the sequence, assigned to ranks.

    :func:`ring_core.balance_chunks` makes one that is even for a mask; any other is as exact.
    Frozen and hashable.

    Args:
        chunks: For each rank the chunks it holds, ascending, as many as every other rank; together
            ``0, 1, ...``, each once.

    Raises:
        ValueError: They are not.
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
        """Ranks."""
        return len(self.chunks)

    @property
    def chunks_per_rank(self) -> int:
        """Chunks that each rank holds."""
        return len(self.chunks[0])

    @cached_property
    def table(self) -> Ints:
        """The chunks as an array ``[cp_size, chunks_per_rank]``."""
        return np.array(self.chunks, dtype=np.int64)


@dataclass(frozen=True)
class Layout:
    """How ``seq_len`` tokens are assigned to ``cp_size`` ranks.

    ``contiguous``: rank ``r`` holds the ``r``-th of ``cp_size`` equal pieces. ``zigzag``: of
    ``2 * cp_size`` chunks it holds chunks ``r`` and ``2 * cp_size - 1 - r`` (head-tail, dual chunk
    swap); one rank alone holds all as it is. ``striped``: it holds every ``cp_size``-th token from
    token ``r`` on. A :class:`ChunkLayout`: it holds the chunks that this says.
    """

    name: LayoutName | ChunkLayout
    seq_len: int
    cp_size: int

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
        if self.seq_len < 1 or self.seq_len % self.divisor:
            padded = max(1, -(-self.seq_len // self.divisor)) * self.divisor
            how = (
                f" with zeros at the end, and pass cu_seqlens=(0, {self.seq_len}, {padded}), by which "
                f"no token sees them; in cross attention instead segment_ids=(queries', keys'), "
                f"negative for padding"
            )
            raise ValueError(
                f"sequence length {self.seq_len} is not a positive multiple of {self.divisor}, as "
                f"the {self.name} layout over {self.cp_size} ranks needs; pad to {padded}"
                f"{how if self.seq_len > 0 else ''}"
            )

    @property
    def divisor(self) -> int:
        """Sequence lengths must be a multiple of this."""
        return self.cp_size * self.num_runs

    @property
    def local_len(self) -> int:
        """Tokens per rank."""
        return self.seq_len // self.cp_size

    @property
    def stride(self) -> int:
        """Distance of neighbouring tokens of a run."""
        return self.cp_size if self.name == "striped" else 1

    @property
    def num_runs(self) -> int:
        """Runs per rank."""
        if isinstance(self.name, ChunkLayout):
            return self.name.chunks_per_rank
        return 2 if self._is_zigzag else 1

    @property
    def _is_zigzag(self) -> bool:
        """Return True if ranks hold two chunks each; one rank alone holds the sequence as it is."""
        return self.name == "zigzag" and self.cp_size > 1

    @property
    def run_starts(self) -> tuple[int, ...]:
        """Local index at which each run starts; the same on every rank."""
        return tuple(range(0, self.local_len, self.run_length))

    @property
    def run_length(self) -> int:
        """Tokens a run; the same for all."""
        return self.local_len // self.num_runs

    def run_positions(self, rank: npt.ArrayLike) -> Ints:
        """Position of the first token of each run: ``[..., runs]`` for ranks ``[...]``."""
        r = np.asarray(rank, dtype=np.int64)
        if isinstance(self.name, ChunkLayout):
            return self.name.table[r] * self.run_length
        if self._is_zigzag:
            return np.stack([r, 2 * self.cp_size - 1 - r], axis=-1) * self.run_length
        return r[..., None] * (1 if self.name == "striped" else self.local_len)

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The runs of one rank, in local order."""
        check_index("rank", rank, self.cp_size)
        return tuple(
            Run(local, self.run_length, start, self.stride)
            for local, start in zip(self.run_starts, self.run_positions(rank).tolist(), strict=True)
        )

    def positions(self, rank: int) -> Ints:
        """Global position of each local index of a rank, ``[local_len]``."""
        check_index("rank", rank, self.cp_size)
        steps = np.arange(self.run_length, dtype=np.int64) * self.stride
        return (self.run_positions(rank)[:, None] + steps).reshape(-1)


LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
LayoutSpec = LayoutName | ChunkLayout


def check_layout(layout: LayoutSpec) -> LayoutSpec:
    """The first argument of a :class:`Layout`.

    Raises:
        ValueError: No such layout.
    """
    if not isinstance(layout, ChunkLayout):
        try:
            check_choice("layout", layout, LAYOUTS)
        except ValueError as error:
            raise ValueError(f"{error}, or what ring_core.balance_chunks returns") from None
    return layout


def divisor_of(layout: LayoutSpec, cp_size: int) -> int:
    """Sequence lengths must be a multiple of this in a layout.

    Raises:
        ValueError: No such layout, or it has chunks for another number of ranks.
    """
    check_layout(layout)
    ranks = check_size("cp_size", cp_size)
    runs = layout.chunks_per_rank if isinstance(layout, ChunkLayout) else 2  # at most
    return Layout(layout, ranks * runs, ranks).divisor
