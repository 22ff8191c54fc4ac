"""Which blocks of scores the Triton kernels compute, where bands alone do not say.

A block is empty, partial (needs its mask) or full. For bands and documents a kernel works out from
the item which blocks to visit; where segment ids, a predicate or a mask that is a tensor decide,
the blocks that are not empty are indexed, for each block of the outer side: partial first, then
full ones.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_core import EMPTY, FULL, PARTIAL, TILE, BlockGeometry, WorkItem
from ring_core.base.arguments import not_none
from ring_core.triton.tile_configs import Flags, parts_of_tiles
from ring_torch.capture import capture_safe_cache

Kinds = npt.NDArray[np.int8]
FAR = 1 << 29  # beyond any local index; sums of a few do not overflow int32


class Grid(NamedTuple):
    """Blocks of an item's rectangle: queries and keys a block, and on which device lists lie."""

    block_q: int
    block_k: int
    all_partial: bool  # every block needs its mask
    k_major: bool  # the outer side is the keys
    device: torch.device
    geometry: BlockGeometry | None  # of a predicate


class BlockIndex(NamedTuple):
    """Which inner blocks each outer block visits, int32.

    Attributes:
        blocks: Their numbers, ``[1 or B, outer, inner]``.
        counts: How many of them are partial and how many full, ``[1 or B, outer, 2]``.
    """

    blocks: Tensor
    counts: Tensor


def block_index(
    item: WorkItem, grid: Grid, segments: tuple[Tensor, Tensor] | None, shown: Tensor | None = None
) -> BlockIndex:
    """The blocks of an item.

    Segment ids are ``[B, n]`` of its rows and ``[B, m]`` of its columns; ``shown``, bool ``[B or 1,
    n, m]``, is false where a mask hides from all heads.
    """
    if segments is None and shown is None:
        return _without_segments(item, grid)
    kinds = kinds_on(item, grid)
    if segments is not None:
        kinds = _in_segments(kinds, segments, grid)
    if shown is not None:
        kinds = torch.where(in_blocks(shown, grid.block_q, grid.block_k), kinds, EMPTY)
    return _indexed(kinds, grid)


def in_blocks(shown: Tensor, block_q: int, block_k: int) -> Tensor:
    """Whether a block of ``[B, n, m]`` shows anything, ``[B, I, J]``."""
    edges = (0, -shown.shape[2] % block_k, 0, -shown.shape[1] % block_q)
    blocks = torch.nn.functional.pad(shown, edges).unflatten(2, (-1, block_k))
    live: Tensor = blocks.unflatten(1, (-1, block_q)).any(dim=4).any(dim=2)
    return live


def _in_segments(kinds: Tensor, segments: tuple[Tensor, Tensor], grid: Grid) -> Tensor:
    q_min, q_max = (x[:, :, None] for x in _block_min_max(segments[0], grid.block_q))
    k_min, k_max = (x[:, None, :] for x in _block_min_max(segments[1], grid.block_k))
    meets = (q_min <= k_max) & (k_min <= q_max) & (q_max >= 0) & (k_max >= 0)
    alike = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
    return torch.where(meets, torch.where(alike, kinds, kinds.clamp(max=PARTIAL)), EMPTY)


@capture_safe_cache(maxsize=32)  # of a long sequence each takes megabytes
def _without_segments(item: WorkItem, grid: Grid) -> BlockIndex:
    return _indexed(kinds_on(item, grid), grid)


@capture_safe_cache(maxsize=32)
def kinds_on(item: WorkItem, grid: Grid) -> Tensor:
    """The kinds of an item's blocks but for segment ids, int8 ``[1, I, J]``."""
    kinds = _in_band(item, grid.block_q, grid.block_k)
    if item.cu_q is not None and item.cu_k is not None:
        kinds = np.minimum(kinds, _in_documents(item.cu_q, item.cu_k, grid))
    if item.tiles is not None:
        kinds = np.minimum(kinds, _in_tiles(item, kinds.shape, grid))
    return torch.as_tensor(kinds[None], device=grid.device)


def _indexed(kinds: Tensor, grid: Grid) -> BlockIndex:
    if grid.all_partial:
        kinds = kinds.clamp(max=PARTIAL)
    if grid.k_major:
        kinds = kinds.transpose(1, 2).contiguous()
    order = torch.where(kinds == EMPTY, FULL + 1, kinds)
    blocks = torch.argsort(order, dim=2, stable=True).to(torch.int32)
    counts = torch.stack([(kinds == kind).sum(dim=2) for kind in (PARTIAL, FULL)], dim=2)
    return BlockIndex(blocks, counts.to(torch.int32))


def _kinds(live: npt.NDArray[np.bool_], full: npt.NDArray[np.bool_]) -> Kinds:
    return np.where(live, np.where(full, FULL, PARTIAL), EMPTY).astype(np.int8)


def _edges(length: int, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first token of each block, and the last."""
    first = np.arange(0, length, block)
    return first, np.minimum(first + block, length) - 1


def _in_band(item: WorkItem, block_q: int, block_k: int) -> Kinds:
    """The kinds of blocks, as the band says, ``[I, J]``; what reaches beyond is not full."""
    q_len, k_len = item.q_stop - item.q_start, item.k_stop - item.k_start
    top, bottom = (x[:, None] for x in _edges(q_len, block_q))
    left, right = _edges(k_len, block_k)
    lo, hi = (-FAR if item.lo is None else item.lo), (FAR if item.hi is None else item.hi)
    live = (bottom - left >= lo) & (top - right <= hi)
    inside = (top + block_q <= q_len) & (left + block_k <= k_len)
    return _kinds(live, inside & (top - right >= lo) & (bottom - left <= hi))


def _in_documents(cu_q: npt.NDArray[np.int64], cu_k: npt.NDArray[np.int64], grid: Grid) -> Kinds:
    """The kinds of blocks, as documents say, ``[I, J]``."""
    top, bottom = (
        np.searchsorted(cu_q, x, side="right")[:, None] for x in _edges(int(cu_q[-1]), grid.block_q)
    )
    left, right = (
        np.searchsorted(cu_k, x, side="right") for x in _edges(int(cu_k[-1]), grid.block_k)
    )
    live = (top <= right) & (left <= bottom)
    return _kinds(live, (top == bottom) & (left == right) & (top == left))


def tile_numbers(item: WorkItem, geometry: BlockGeometry) -> npt.NDArray[np.int32]:
    """Which partial tile lies where in an item; -1 shows all, -2 nothing."""
    tiles, index = not_none(item.tiles), not_none(geometry.tiles)[1][item.q_rank, item.kv_rank]
    q_tile, k_tile = item.q_start // TILE, item.k_start // TILE
    which = index[q_tile : q_tile + tiles.shape[0], k_tile : k_tile + tiles.shape[1]]
    return np.where(tiles == PARTIAL, which, np.where(tiles == FULL, -1, -2)).astype(np.int32)


def _in_tiles(item: WorkItem, shape: tuple[int, ...], grid: Grid) -> Kinds:
    """The kinds of blocks, as a predicate says, ``[I, J]``: finer than its tiles if blocks are."""
    geometry = not_none(grid.geometry)
    sizes = math.gcd(TILE, grid.block_q), math.gcd(TILE, grid.block_k)
    which = tile_numbers(item, geometry)
    some, every = (
        x[which].swapaxes(1, 2).reshape(which.shape[0] * x.shape[1], -1)
        for x in _parts(geometry, *sizes)
    )
    for dim, block in enumerate((grid.block_q, grid.block_k)):
        each = block // sizes[dim]
        some = _in_blocks(some, dim, shape[dim], each, beyond=False).any(axis=dim + 1)
        every = _in_blocks(every, dim, shape[dim], each, beyond=True).all(axis=dim + 1)
    return _kinds(some, every)


def _in_blocks(flags: Flags, dim: int, blocks: int, each: int, *, beyond: bool) -> Flags:
    """Flags of parts as ``blocks`` groups of ``each`` along an axis, a group's along the next."""
    more = max(0, blocks * each - flags.shape[dim])
    edges = [(0, more if n == dim else 0) for n in range(2)]
    flags = np.pad(flags, edges, constant_values=beyond).take(range(blocks * each), axis=dim)
    return flags.reshape(*flags.shape[:dim], blocks, each, *flags.shape[dim + 1 :])


@lru_cache(maxsize=32)
def _parts(geometry: BlockGeometry, rows: int, columns: int) -> tuple[Flags, Flags]:
    return parts_of_tiles(not_none(geometry.tiles)[0], rows, columns)


def _block_min_max(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest id of each block of ``[B, n]``, ``[B, blocks]``."""
    more = -ids.shape[1] % size
    if more:
        ids = torch.cat([ids, ids[:, -1:].expand(-1, more)], dim=1)
    parts = ids.unflatten(1, (-1, size))
    return parts.amin(dim=2), parts.amax(dim=2)
