"""How large blocks are, how many warps share one and how many are on their way.

A table says, and :class:`ring_core.KernelConfig` overrides it: ``tile_configs.json``, which an
autotuner writes, or the file that ``RING_TRITON_BLOCKS`` names. Nothing here needs Triton.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import TILE, Bools, Ints
from ring_core.base.config import KernelConfig
from ring_core.base.errors import UnsupportedError

Pass = Literal["fwd", "bwd_dq", "bwd_dkv", "bwd_fused", "bwd_dbias"]

PASSES: tuple[Pass, ...] = get_args(Pass)
VARIABLE = "RING_TRITON_BLOCKS"
LEAST, LARGEST = 16, 256  # of a block; the first is what matrix units multiply
_OURS = Path(__file__).with_name("tile_configs.json")
_WARPS, _MOST_STAGES = (1, 2, 4, 8, 16), 8
Flags = Bools

FLAGS_TOGETHER = 16  # flags of ``only`` that one program of the forward looks at
NAN_SAFE_BLOCK = 32  # queries and keys per block where numbers are not finite

# Heads share a swizzle as long as what they read is no more than this: keys and values of blocks of
# queries, queries of blocks of keys. Measured on an H200.
_SWIZZLE_KEY_BYTES = 16 * 2**20
_SWIZZLE_QUERY_BYTES = 64 * 2**20

HOPPER = 90  # the first compute capability with a copy engine for tiles

# Bytes of shared memory that a block may have, by compute capability.
_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_SHARED_DEFAULT = 99 << 10
_BARRIER_BYTES = 1024  # bytes of it that barriers take, as blocks are aligned


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


def choose_blocks(
    config: KernelConfig, name: Pass, head_dim: int, itemsize: int, *, per_score_inputs: bool,
    rows: Table | None = None,
) -> Blocks:  # fmt: skip
    """The sizes a call asked for, else the table's; ``head_dim`` is the larger one.

    Raises:
        UnsupportedError: A size is no power of two from 16 to 256.
        ValueError: ``RING_TRITON_BLOCKS`` names no table.
    """
    found = find(
        default() if rows is None else rows, name, itemsize, head_dim,
        per_score_inputs=per_score_inputs,
    ).blocks  # fmt: skip
    return replace(
        found,
        q=_size("block_q", config.block_q, found.q),
        k=_size("block_k", config.block_k, found.k),
    )


def _size(name: str, wanted: int | None, default: int) -> int:
    if wanted is None:
        return default
    if wanted & (wanted - 1) or not LEAST <= wanted <= LARGEST:
        raise UnsupportedError(
            f"kernel 'triton': {name} must be a power of two from {LEAST} to {LARGEST}, got "
            f"{wanted}. Instead: leave it out, or choose {name}=64 or 128"
        )
    return wanted


def padded(dim: int) -> int:
    """A head dim as matrix units take it."""
    return max(LEAST, 1 << (dim - 1).bit_length())


def heads_per_swizzle(
    name: Pass, *, batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, row: int
) -> int:
    """How many heads have their blocks swizzled; of queries, at least those that share keys.

    ``row`` is how many bytes a key and its value take, or a query and the gradient of its output.
    """
    group = heads // kv_heads
    by_keys = name in ("bwd_dkv", "bwd_fused")
    room, tokens = (_SWIZZLE_QUERY_BYTES, q_len * group) if by_keys else (_SWIZZLE_KEY_BYTES, k_len)
    wanted = max(1, room // max(1, tokens * row))
    many = batch * kv_heads
    found = max(n for n in range(1, many + 1) if n <= wanted and many % n == 0)
    return found if by_keys else found * group


def positions_aligned8(positions: Ints) -> bool:
    """Whether every eighth position is a multiple of 8, and those behind it follow."""
    expected = np.repeat(positions[::8], 8)[: positions.size] + np.arange(positions.size) % 8
    return bool((positions[::8] % 8 == 0).all() and (positions == expected).all())


def parts_of_tiles(bits: npt.NDArray[np.uint8], rows: int, columns: int) -> tuple[Flags, Flags]:
    """Whether parts of a predicate's tiles show something, and all of themselves.

    Args:
        bits: The partial tiles of :attr:`ring_core.BlockGeometry.tiles`.
        rows, columns: Of a part; they divide a tile.

    Returns:
        Twice bool ``[tiles + 2, 128 / rows, 128 / columns]``; the last two, number -2 and -1, are
        the tiles that show nothing and all.
    """
    num_q_parts, num_k_parts = TILE // rows, TILE // columns
    some, every = (np.zeros((len(bits) + 2, num_q_parts, num_k_parts), bool) for _ in range(2))
    for n, tile in enumerate(bits):
        seen = np.unpackbits(tile, axis=1, bitorder="little").reshape(
            num_q_parts, rows, num_k_parts, columns
        )
        some[n], every[n] = seen.any(axis=(1, 3)), seen.all(axis=(1, 3))
    some[-1], every[-1] = True, True
    return some, every


def stages_that_fit(
    name: Pass, blocks: Blocks, dims: tuple[int, int], itemsize: int, capability: int
) -> int:
    """How many blocks may be on their way at once: as many as were chosen, or as there is room for.

    Args:
        name: The pass.
        blocks: What was chosen.
        dims: Head dims of queries and keys, and of values.
        itemsize: Bytes of a number.
        capability: Of the GPU, as in ``sm_90``.

    Raises:
        UnsupportedError: A GPU has no room for one of this size.
    """
    q, k, dim = blocks.q, blocks.k, padded(dims[0])
    both = dim + padded(dims[1])
    if name in ("bwd_dkv", "bwd_fused"):
        held, fetched = k * both, q * both
        if name == "bwd_fused":  # what is added to dQ, in float32
            held += 4 * q * max(k, dim) // itemsize
    else:
        held, fetched = q * (dim if name == "fwd" else both), k * both
    shared = _SHARED.get(capability, _SHARED_DEFAULT)
    left = (shared - _BARRIER_BYTES) // itemsize - held
    if left < fetched // 2:  # one stage may fetch one array after the other
        raise UnsupportedError(
            f"kernel 'triton': {q} queries and {k} keys a block with head dims {dims[0]} and "
            f"{dims[1]} need more than the {shared >> 10} KiB of shared memory of this GPU. "
            "Instead: leave out block_q and block_k, or choose smaller ones"
        )
    most = blocks.stages if capability >= HOPPER else 2  # threads that fetch need registers for it
    return max(1, min(blocks.stages, most, left // fetched))
