"""The table of how large blocks are: data, ``tile_configs.json``, which an autotuner writes.

``RING_TRITON_BLOCKS`` names another file in its place. Nothing here needs Triton.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

Pass = Literal["fwd", "bwd_dq", "bwd_dkv", "bwd_fused", "bwd_dbias"]

PASSES: tuple[Pass, ...] = get_args(Pass)
VARIABLE = "RING_TRITON_BLOCKS"
LEAST, LARGEST = 16, 256  # of a block; the first is what matrix units multiply
_OURS = Path(__file__).with_name("tile_configs.json")
_WARPS, _MOST_STAGES = (1, 2, 4, 8, 16), 8


@dataclass(frozen=True)
class Blocks:
    """Queries and keys per block, warps per block, stages of the pipeline that fetches blocks."""

    q: int
    k: int
    warps: int = 8
    stages: int = 2


@dataclass(frozen=True)
class Row:
    """The blocks of a pass, for numbers of ``itemsize`` bytes and head dims up to ``head_dim``.

    Attributes:
        per_score_inputs: Only where each score has an input of its own (a bias, tiles of a
            predicate, random words for dropout).
    """

    kernel: Pass
    itemsize: int
    head_dim: int
    per_score_inputs: bool
    q: int
    k: int
    warps: int
    stages: int

    @property
    def blocks(self) -> Blocks:
        """What the row says."""
        return Blocks(self.q, self.k, self.warps, self.stages)

    def fits(self, kernel: Pass, itemsize: int, head_dim: int, *, per_score_inputs: bool) -> bool:
        """Whether the row is for such a call."""
        return (
            (self.kernel, self.itemsize) == (kernel, itemsize)
            and head_dim <= self.head_dim
            and (per_score_inputs or not self.per_score_inputs)
        )


Table = tuple[Row, ...]  # the first row that fits counts


def find(
    table: Table, kernel: Pass, itemsize: int, head_dim: int, *, per_score_inputs: bool
) -> Row:
    """The row for a call; wider numbers or head dims than any row has take the widest."""
    itemsize = max(2, min(itemsize, 4))
    head_dim = min(head_dim, max(row.head_dim for row in table))
    return next(
        row
        for row in table
        if row.fits(kernel, itemsize, head_dim, per_score_inputs=per_score_inputs)
    )


def default() -> Table:
    """The table of the file that ``RING_TRITON_BLOCKS`` names, or of this package.

    Raises:
        ValueError: The file cannot be read, or is no such table.
    """
    return _read_once(os.environ.get(VARIABLE) or str(_OURS))


def read(path: str) -> Table:
    """A table from a file.

    Raises:
        ValueError: It cannot be read, or is no such table.
    """
    try:
        rows = tuple(_row(x) for x in json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no table of blocks: {error}. Write one with 'python -m ring_jax_gpu tune "
            f"FILE', or unset {VARIABLE} for the package's own"
        ) from None
    needed = [
        f"{kernel} of {itemsize} bytes"
        for kernel in PASSES
        for itemsize in (2, 4)
        if not any(row.fits(kernel, itemsize, LARGEST, per_score_inputs=False) for row in rows)
    ]
    if needed:
        raise ValueError(
            f"{path} has no row for {', '.join(needed)} with head dims up to {LARGEST} that is "
            "not only for per-score inputs. Add these rows"
        )
    return rows


_read_once = lru_cache(maxsize=8)(read)


def written(table: Iterable[Row]) -> str:
    """What a file holds, a row a line."""
    return "[\n" + ",\n".join(f" {json.dumps(asdict(row))}" for row in table) + "\n]\n"


def _row(given: Any) -> Row:
    names = [field.name for field in fields(Row)]
    if not isinstance(given, dict) or sorted(given) != sorted(names):
        raise ValueError(f"a row has {', '.join(names)}, got {given!r}")
    row = Row(**given)
    sizes = [row.q, row.k]
    right = (
        row.kernel in PASSES and row.itemsize in (2, 4) and isinstance(row.per_score_inputs, bool)
        and all(type(x) is int for x in (row.itemsize, row.head_dim, row.warps, row.stages, *sizes))
        and row.head_dim >= 1
        and all(LEAST <= x <= LARGEST and x & (x - 1) == 0 for x in sizes)
        and row.warps in _WARPS and 1 <= row.stages <= _MOST_STAGES
    )  # fmt: skip
    if not right:
        raise ValueError(
            f"kernels are {', '.join(PASSES)}, itemsize 2 or 4, head_dim >= 1, q and k powers of "
            f"two from {LEAST} to {LARGEST}, warps {_WARPS}, stages 1 to {_MOST_STAGES}, got {given!r}"
        )
    return row
