"""How large blocks are, how many warps share one and how many are on their way.

``tile_configs`` says, and :class:`ring_core.KernelConfig` overrides it. Nothing here needs Triton.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import TILE, Bools, Ints
from ring_core.base.capabilities import KernelConfig
from ring_core.base.errors import UnsupportedError
from ring_core.triton import tile_configs
from ring_core.triton.tile_configs import LARGEST, LEAST, Blocks, Pass, Table

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


def choose_blocks(
    config: KernelConfig, name: Pass, head_dim: int, itemsize: int, *, per_score_inputs: bool,
    rows: Table | None = None,
) -> Blocks:  # fmt: skip
    """The sizes a call asked for, else the table's; ``head_dim`` is the larger one.

    Raises:
        UnsupportedError: A size is no power of two from 16 to 256.
        ValueError: ``RING_TRITON_BLOCKS`` names no table.
    """
    default = tile_configs.find(
        tile_configs.default() if rows is None else rows, name, itemsize, head_dim,
        per_score_inputs=per_score_inputs,
    ).blocks  # fmt: skip
    return replace(
        default,
        q=_size("block_q", config.block_q, default.q),
        k=_size("block_k", config.block_k, default.k),
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
    if by_keys:
        wanted = _SWIZZLE_QUERY_BYTES // max(1, q_len * group * row)
    else:
        wanted = _SWIZZLE_KEY_BYTES // max(1, k_len * row)
    many = batch * kv_heads
    found = max(n for n in range(1, many + 1) if n <= max(1, wanted) and many % n == 0)
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
