"""Which rank holds which token: token -> (rank, local index), as runs of evenly spaced tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ring_core._arguments import TOO_LARGE, check_index, check_size, is_integer

Ints = npt.NDArray[np.int64]
LayoutName = Literal["contiguous", "zigzag", "striped"]


class Run(NamedTuple):
    """Local indices ``local_start + n`` hold positions ``global_start + stride * n``."""

    local_start: int
    length: int
    global_start: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """How ``seq_len`` tokens are dealt to ``cp_size`` ranks.

    ``contiguous``: rank ``r`` holds the ``r``-th of ``cp_size`` equal pieces. ``zigzag``: of
    ``2 * cp_size`` chunks it holds chunks ``r`` and ``2 * cp_size - 1 - r`` (head-tail, dual chunk
    swap). ``striped``: it holds every ``cp_size``-th token from token ``r`` on.
    """

    name: LayoutName
    seq_len: int
    cp_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in get_args(LayoutName):
            raise ValueError(
                f"unknown layout {self.name!r}; known: {', '.join(get_args(LayoutName))}"
            )
        check_size("cp_size", self.cp_size)
        if not is_integer(self.seq_len) or self.seq_len >= TOO_LARGE:
            raise ValueError(f"sequence length must be an integer < 2**40, got {self.seq_len!r}")
        if self.seq_len < 1 or self.seq_len % self.divisor:
            padded = max(1, -(-self.seq_len // self.divisor)) * self.divisor
            raise ValueError(
                f"sequence length {self.seq_len} is not a positive multiple of {self.divisor}, as "
                f"the {self.name} layout over {self.cp_size} ranks needs; pad to {padded}"
            )

    @property
    def divisor(self) -> int:
        """Sequence lengths must be a multiple of this."""
        return 2 * self.cp_size if self.name == "zigzag" else self.cp_size

    @property
    def local_len(self) -> int:
        """Tokens a rank."""
        return self.seq_len // self.cp_size

    @property
    def stride(self) -> int:
        """Distance of neighbouring tokens of a run."""
        return self.cp_size if self.name == "striped" else 1

    @property
    def run_starts(self) -> tuple[int, ...]:
        """Local index at which each run starts; the same on every rank."""
        return (0, self.local_len // 2) if self.name == "zigzag" else (0,)

    @property
    def run_length(self) -> int:
        """Tokens a run; the same for all."""
        return self.local_len // len(self.run_starts)

    def run_positions(self, rank: npt.ArrayLike) -> Ints:
        """Position of the first token of each run: ``[..., runs]`` for ranks ``[...]``."""
        r = np.asarray(rank, dtype=np.int64)
        if self.name == "striped":
            return r[..., None]
        if self.name == "contiguous":
            return r[..., None] * self.local_len
        return np.stack([r, 2 * self.cp_size - 1 - r], axis=-1) * self.run_length

    def runs(self, rank: int) -> tuple[Run, ...]:
        """The runs of one rank, in local order."""
        check_index("rank", rank, self.cp_size)
        starts = self.run_positions(rank).tolist()
        return tuple(
            Run(local, self.run_length, position, self.stride)
            for local, position in zip(self.run_starts, starts, strict=True)
        )

    def positions(self, rank: int) -> Ints:
        """Global position of each local index of a rank, ``[local_len]``."""
        check_index("rank", rank, self.cp_size)
        steps = np.arange(self.run_length, dtype=np.int64) * self.stride
        return (self.run_positions(rank)[:, None] + steps).reshape(-1)
