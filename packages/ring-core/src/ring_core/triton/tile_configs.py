"""Choose block sizes of the Triton kernels, with their numbers of warps and pipeline stages.

They come from a table, ``tile_configs.json``, which an autotuner writes, or the file that
``RING_TRITON_BLOCKS`` names; :class:`ring_core.KernelConfig` overrides it. Nothing here needs
Triton.
"""

from __future__ import annotations

import json
import math
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

KernelPass = Literal["fwd", "bwd_dq", "bwd_dkv", "bwd_fused", "bwd_dbias"]

KERNEL_PASSES: tuple[KernelPass, ...] = get_args(KernelPass)
BLOCKS_VARIABLE = "RING_TRITON_BLOCKS"
LEAST, LARGEST = 16, 256  # tokens of a block; matrix units multiply at least 16 x 16
_OWN_TABLE = Path(__file__).with_name("tile_configs.json")
_WARPS, _MOST_STAGES = (1, 2, 4, 8, 16), 8
Flags = Bools

# Flags that one thread block of the forward looks at, where a launch computes only flagged blocks.
FLAGS_TOGETHER = 16
NAN_SAFE_BLOCK = 32  # queries and keys per block where numbers are not finite

# Heads share a swizzle as long as the data they read stay in the L2: K/V of the forward and of dQ,
# Q and dO of dK/dV. Bytes; measured on an H200.
_SWIZZLE_KEY_BYTES = 16 * 2**20
_SWIZZLE_QUERY_BYTES = 64 * 2**20

HOPPER = 90  # the first compute capability with a copy engine for tiles

# Bytes of shared memory that a thread block may use, by compute capability.
_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_SHARED_DEFAULT = 99 << 10
_BARRIER_BYTES = 1024  # shared memory that barriers take, rounded up to the alignment of blocks


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel.

    Attributes:
        q, k: Queries and keys per block.
        warps: Warps per thread block.
        stages: Stages of the pipeline that fetches blocks into shared memory.
    """

    q: int
    k: int
    warps: int = 8
    stages: int = 2


@dataclass(frozen=True)
class Row:
    """A row of the table: the block sizes of one kernel for some calls.

    Attributes:
        kernel: The kernel, one of ``KERNEL_PASSES``.
        itemsize: Bytes per number of the inputs, 2 or 4.
        head_dim: The largest head dim the row is for.
        per_score_inputs: The row is only for calls where each score has an input of its own (a
            bias, tiles of a predicate, random words for dropout).
        q, k, warps, stages: As in ``Blocks``.
    """

    kernel: KernelPass
    itemsize: int
    head_dim: int
    per_score_inputs: bool
    q: int
    k: int
    warps: int
    stages: int

    @property
    def blocks(self) -> Blocks:
        """Block sizes of the row."""
        return Blocks(self.q, self.k, self.warps, self.stages)

    def fits(
        self, kernel: KernelPass, itemsize: int, head_dim: int, *, per_score_inputs: bool
    ) -> bool:
        """Return True if the row is for calls of this kernel with these properties."""
        return (
            (self.kernel, self.itemsize) == (kernel, itemsize)
            and head_dim <= self.head_dim
            and (per_score_inputs or not self.per_score_inputs)
        )


Table = tuple[Row, ...]  # the first row that fits counts


def find_row(
    table: Table, kernel: KernelPass, itemsize: int, head_dim: int, *, per_score_inputs: bool
) -> Row:
    """Return the first row that fits a call.

    Wider head dims than the table's take its widest, narrower and wider numbers those of 2 and of
    4 bytes.
    """
    itemsize = max(2, min(itemsize, 4))
    head_dim = min(head_dim, max(row.head_dim for row in table))
    return next(
        row
        for row in table
        if row.fits(kernel, itemsize, head_dim, per_score_inputs=per_score_inputs)
    )


def default_table() -> Table:
    """Return the table in the file that ``RING_TRITON_BLOCKS`` names, or else this package's own.

    Raises:
        ValueError: The file cannot be read, or is no such table.
    """
    return _read_table_once(os.environ.get(BLOCKS_VARIABLE) or str(_OWN_TABLE))


def read_table(path: str) -> Table:
    """Read a table from a file, as ``python -m ring_jax_gpu tune FILE`` writes it.

    Raises:
        ValueError: It cannot be read, or is no such table.
    """
    try:
        rows = tuple(_row(x) for x in json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no table of blocks: {error}. Write one with 'python -m ring_jax_gpu tune "
            f"FILE', or unset {BLOCKS_VARIABLE} for the package's own"
        ) from None
    needed = [
        f"{kernel} of {itemsize} bytes"
        for kernel in KERNEL_PASSES
        for itemsize in (2, 4)
        if not any(row.fits(kernel, itemsize, LARGEST, per_score_inputs=False) for row in rows)
    ]
    if needed:
        raise ValueError(
            f"{path} has no row for {', '.join(needed)} with head dims up to {LARGEST} that is "
            "not only for per-score inputs. Add these rows"
        )
    return rows


_read_table_once = lru_cache(maxsize=8)(read_table)


def to_text(table: Iterable[Row]) -> str:
    """Return the text of a table's file, JSON with a row in each line."""
    return "[\n" + ",\n".join(f" {json.dumps(asdict(row))}" for row in table) + "\n]\n"


def _row(entry: Any) -> Row:
    """Make a row of an entry of the file.

    Raises:
        ValueError: The entry is malformed.
    """
    names = [field.name for field in fields(Row)]
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise ValueError(f"a row has {', '.join(names)}, got {entry!r}")
    row = Row(**entry)
    sizes = [row.q, row.k]
    well_formed = (
        row.kernel in KERNEL_PASSES and row.itemsize in (2, 4) and isinstance(row.per_score_inputs, bool)
        and all(type(x) is int for x in (row.itemsize, row.head_dim, row.warps, row.stages, *sizes))
        and row.head_dim >= 1
        and all(LEAST <= x <= LARGEST and x & (x - 1) == 0 for x in sizes)
        and row.warps in _WARPS and 1 <= row.stages <= _MOST_STAGES
    )  # fmt: skip
    if not well_formed:
        raise ValueError(
            f"kernels are {', '.join(KERNEL_PASSES)}, itemsize 2 or 4, head_dim >= 1, q and k powers of "
            f"two from {LEAST} to {LARGEST}, warps {_WARPS}, stages 1 to {_MOST_STAGES}, got {entry!r}"
        )
    return row


def choose_blocks(
    config: KernelConfig, name: KernelPass, head_dim: int, itemsize: int, *, per_score_inputs: bool,
    table: Table | None = None,
) -> Blocks:  # fmt: skip
    """Return the block sizes of a call: those it asked for, else the table's.

    Args:
        config: The call's kernel settings.
        name: The kernel, one of ``KERNEL_PASSES``.
        head_dim: The larger of the two head dims.
        itemsize: Bytes per number of the inputs.
        per_score_inputs: As in :class:`Row`.
        table: The table; by default that of :func:`default_table`.

    Raises:
        UnsupportedError: A size is no power of two from 16 to 256.
        ValueError: ``RING_TRITON_BLOCKS`` names no table.
    """
    blocks = find_row(
        default_table() if table is None else table, name, itemsize, head_dim,
        per_score_inputs=per_score_inputs,
    ).blocks  # fmt: skip
    return replace(
        blocks,
        q=_block_size("block_q", config.block_q, blocks.q),
        k=_block_size("block_k", config.block_k, blocks.k),
    )


def _block_size(name: str, requested: int | None, default: int) -> int:
    """Return the requested block size, checked, or the default if none is requested."""
    if requested is None:
        return default
    if requested & (requested - 1) or not LEAST <= requested <= LARGEST:
        raise UnsupportedError(
            f"kernel 'triton': {name} must be a power of two from {LEAST} to {LARGEST}, got "
            f"{requested}. Instead: leave it out, or choose {name}=64 or 128"
        )
    return requested


def padded_head_dim(dim: int) -> int:
    """Round a head dim up to a power of two, at least 16, as matrix units take it."""
    return max(LEAST, 1 << (dim - 1).bit_length())


def score_unit(itemsize: int) -> float:
    """Return the factor of logits and ``lse`` inside the kernels: ``log2(e)``, or 1 in float32.

    With ``log2(e)`` an exponential is a single instruction. But ``lse`` lies in memory in natural
    units, and rounding it once more shows where scores are large; in half precision that is lost
    in the rounding of the weights. ``itemsize`` is of q, in bytes.
    """
    return math.log2(math.e) if itemsize == 2 else 1.0


def heads_per_swizzle(
    name: KernelPass, *, batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, row: int
) -> int:
    """Return the number of heads whose blocks are swizzled together, so that the L2 serves them.

    Kernels over blocks of queries count query heads, and never separate those that share keys;
    kernels over blocks of keys count key heads.

    Args:
        name: The kernel, one of ``KERNEL_PASSES``.
        batch, heads, kv_heads, q_len, k_len: Sizes of the call.
        row: Bytes of a key and its value, or of a query and the gradient of its output.
    """
    group = heads // kv_heads
    by_keys = name in ("bwd_dkv", "bwd_fused")
    limit, tokens = (
        (_SWIZZLE_QUERY_BYTES, q_len * group) if by_keys else (_SWIZZLE_KEY_BYTES, k_len)
    )
    most = max(1, limit // max(1, tokens * row))
    all_kv_heads = batch * kv_heads
    together = max(n for n in range(1, all_kv_heads + 1) if n <= most and all_kv_heads % n == 0)
    return together if by_keys else together * group


def positions_aligned8(positions: Ints) -> bool:
    """Return True if each group of eight positions is contiguous from a multiple of 8 on.

    Kernels then load eight columns of a bias at once, and draw dropout's words for four keys.
    """
    expected = np.repeat(positions[::8], 8)[: positions.size] + np.arange(positions.size) % 8
    return bool((positions[::8] % 8 == 0).all() and (positions == expected).all())


def parts_of_tiles(bits: npt.NDArray[np.uint8], rows: int, columns: int) -> tuple[Flags, Flags]:
    """Divide a predicate's tiles into parts; return which show anything, and which everything.

    Args:
        bits: The partial tiles of :attr:`ring_core.plan.tile_mask.BlockGeometry.tiles`.
        rows, columns: Sizes of a part, which divide 128.

    Returns:
        Two arrays, bool ``[tiles + 2, 128 / rows, 128 / columns]``; the last two tiles, number -2
        and -1, are an empty one and a full one.
    """
    num_q_parts, num_k_parts = TILE // rows, TILE // columns
    live, full = (np.zeros((len(bits) + 2, num_q_parts, num_k_parts), bool) for _ in range(2))
    for n, tile in enumerate(bits):
        visible = np.unpackbits(tile, axis=1, bitorder="little").reshape(
            num_q_parts, rows, num_k_parts, columns
        )
        live[n], full[n] = visible.any(axis=(1, 3)), visible.all(axis=(1, 3))
    live[-1], full[-1] = True, True
    return live, full


def stages_that_fit(
    name: KernelPass, blocks: Blocks, dims: tuple[int, int], itemsize: int, capability: int
) -> int:
    """Return the number of pipeline stages: those chosen, or as many as shared memory can hold.

    Args:
        name: The kernel, one of ``KERNEL_PASSES``.
        blocks: The block sizes and stages chosen; of the stages 2 at most before Hopper.
        dims: Head dims of queries and keys, and of values.
        itemsize: Bytes per number of the inputs.
        capability: Compute capability of the GPU, 90 for ``sm_90``.

    Raises:
        UnsupportedError: Blocks of this size do not fit into the GPU's shared memory.
    """
    q, k, dim = blocks.q, blocks.k, padded_head_dim(dims[0])
    both = dim + padded_head_dim(dims[1])
    if name in ("bwd_dkv", "bwd_fused"):
        held, fetched = k * both, q * both
        if name == "bwd_fused":  # the block's part of dQ, in float32, before it is added
            held += 4 * q * max(k, dim) // itemsize
    else:
        held, fetched = q * (dim if name == "fwd" else both), k * both
    shared = _SHARED.get(capability, _SHARED_DEFAULT)
    free = (shared - _BARRIER_BYTES) // itemsize - held
    if free < fetched // 2:  # a single stage may fetch its two arrays one after the other
        raise UnsupportedError(
            f"kernel 'triton': {q} queries and {k} keys a block with head dims {dims[0]} and "
            f"{dims[1]} need more than the {shared >> 10} KiB of shared memory of this GPU. "
            "Instead: leave out block_q and block_k, or choose smaller ones"
        )
    # Before Hopper, threads fetch blocks themselves, and each stage takes registers.
    max_stages = blocks.stages if capability >= HOPPER else 2
    return max(1, min(blocks.stages, max_stages, free // fetched))
