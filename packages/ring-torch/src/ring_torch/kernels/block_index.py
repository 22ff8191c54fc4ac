"""Block index of the Triton kernels: lists of the blocks of scores that a launch computes.

A block is empty, partial (needs its mask) or full. For bands and documents a kernel derives from
the item which blocks to visit. Where segment ids, a predicate or a boolean mask decide, the blocks
that are not empty are listed for each block of the outer side: partial ones first, then full ones.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_core import WorkItem
from ring_core.base.arguments import EMPTY, FULL, PARTIAL, TILE, not_none
from ring_core.plan.tile_mask import BlockGeometry
from ring_core.triton.tile_configs import Flags, parts_of_tiles
from ring_torch.capture import capture_safe_cache

Kinds = npt.NDArray[np.int8]
FAR = 1 << 29  # stands for an open side of a band; sums of a few do not overflow int32


class Grid(NamedTuple):
    """Division of an item's rectangle into blocks, and the form of their lists."""

    block_q: int  # queries of a block
    block_k: int  # keys of a block
    all_partial: bool  # True if every block needs its mask
    k_major: bool  # True if blocks of keys are the outer side
    device: torch.device  # of the lists
    geometry: BlockGeometry | None  # tiles of a predicate


class BlockIndex(NamedTuple):
    """Lists of the inner blocks that each outer block visits, int32.

    Attributes:
        blocks: Numbers of inner blocks, partial ones first and then full ones; ``[1 or B, outer,
            inner]``. What follows them in a list is not visited.
        counts: Numbers of partial and of full blocks, ``[1 or B, outer, 2]``.
    """

    blocks: Tensor
    counts: Tensor


def block_index(
    item: WorkItem, grid: Grid, segments: tuple[Tensor, Tensor] | None, mask: Tensor | None = None
) -> BlockIndex:
    """Return the block index of an item.

    Args:
        item: The work item.
        grid: Its division into blocks.
        segments: Segment ids of its rows, ``[B, n]``, and of its columns, ``[B, m]``.
        mask: Booleans ``[B or 1, n, m]``, false where a mask hides a score from all heads. A block
            that it hides wholly is empty. One that it hides in part stays full if it was, so a
            grid for a mask has ``all_partial``.
    """
    if segments is None and mask is None:
        return _without_segments(item, grid)
    kinds = kinds_on(item, grid)
    if segments is not None:
        kinds = _in_segments(kinds, segments, grid)
    if mask is not None:
        kinds = torch.where(in_blocks(mask, grid.block_q, grid.block_k), kinds, EMPTY)
    return _indexed(kinds, grid)


def in_blocks(mask: Tensor, block_q: int, block_k: int) -> Tensor:
    """Return for each block of booleans ``[B, n, m]`` whether any is true, ``[B, I, J]``."""
    edges = (0, -mask.shape[2] % block_k, 0, -mask.shape[1] % block_q)
    blocks = torch.nn.functional.pad(mask, edges).unflatten(2, (-1, block_k))
    live: Tensor = blocks.unflatten(1, (-1, block_q)).any(dim=4).any(dim=2)
    return live


def _in_segments(kinds: Tensor, segments: tuple[Tensor, Tensor], grid: Grid) -> Tensor:
    """Return kinds ``[B, I, J]`` that also take segment ids into account, by their extremes.

    A block is full only if all its ids are one. It is empty if the ranges of ids are disjoint, or
    if all ids of a side are negative, which is padding.
    """
    q_min, q_max = (x[:, :, None] for x in _block_min_max(segments[0], grid.block_q))
    k_min, k_max = (x[:, None, :] for x in _block_min_max(segments[1], grid.block_k))
    # Ranges that overlap may still have no id in common: such a block is visited, and its mask
    # shows nothing.
    meets = (q_min <= k_max) & (k_min <= q_max) & (q_max >= 0) & (k_max >= 0)
    alike = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min >= 0)
    return torch.where(meets, torch.where(alike, kinds, kinds.clamp(max=PARTIAL)), EMPTY)


@capture_safe_cache(maxsize=32)  # of a long sequence each takes megabytes
def _without_segments(item: WorkItem, grid: Grid) -> BlockIndex:
    return _indexed(kinds_on(item, grid), grid)


@capture_safe_cache(maxsize=32)
def kinds_on(item: WorkItem, grid: Grid) -> Tensor:
    """Return the kinds of an item's blocks, segment ids aside, int8 ``[1, I, J]`` on the device."""
    kinds = _in_band(item, grid.block_q, grid.block_k)
    if item.cu_q is not None and item.cu_k is not None:
        kinds = np.minimum(kinds, _in_documents(item.cu_q, item.cu_k, grid))
    if item.tiles is not None:
        kinds = np.minimum(kinds, _in_tiles(item, kinds.shape, grid))
    return torch.as_tensor(kinds[None], device=grid.device)


def _indexed(kinds: Tensor, grid: Grid) -> BlockIndex:
    """Return kinds as lists: blocks sorted by partial, full and empty."""
    if grid.all_partial:
        # The loop over full blocks reads no bias: with one, every block goes through the other
        # loop.
        kinds = kinds.clamp(max=PARTIAL)
    if grid.k_major:
        # Kernels that sum dK/dV go over queries for each block of keys.
        kinds = kinds.transpose(1, 2).contiguous()
    order = torch.where(kinds == EMPTY, FULL + 1, kinds)
    # A stable sort keeps blocks of a kind ascending: neighbours are visited one after the other.
    blocks = torch.argsort(order, dim=2, stable=True).to(torch.int32)
    counts = torch.stack([(kinds == kind).sum(dim=2) for kind in (PARTIAL, FULL)], dim=2)
    return BlockIndex(blocks, counts.to(torch.int32))


def _kinds(live: npt.NDArray[np.bool_], full: npt.NDArray[np.bool_]) -> Kinds:
    return np.where(live, np.where(full, FULL, PARTIAL), EMPTY).astype(np.int8)


def _edges(length: int, block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first and the last token of each block."""
    starts = np.arange(0, length, block)
    return starts, np.minimum(starts + block, length) - 1


def _in_band(item: WorkItem, block_q: int, block_k: int) -> Kinds:
    """Return the kinds of blocks by the band, ``[I, J]``; blocks that stick out are not full."""
    q_len, k_len = item.q_stop - item.q_start, item.k_stop - item.k_start
    top, bottom = (x[:, None] for x in _edges(q_len, block_q))
    left, right = _edges(k_len, block_k)
    lo, hi = (-FAR if item.lo is None else item.lo), (FAR if item.hi is None else item.hi)
    # The corners decide: i - j is largest at the bottom left of a block, and smallest at its top
    # right.
    live = (bottom - left >= lo) & (top - right <= hi)
    inside = (top + block_q <= q_len) & (left + block_k <= k_len)
    return _kinds(live, inside & (top - right >= lo) & (bottom - left <= hi))


def _in_documents(cu_q: npt.NDArray[np.int64], cu_k: npt.NDArray[np.int64], grid: Grid) -> Kinds:
    """Return the kinds of blocks by documents, ``[I, J]``: full are those inside one document."""
    top, bottom = (
        np.searchsorted(cu_q, x, side="right")[:, None] for x in _edges(int(cu_q[-1]), grid.block_q)
    )
    left, right = (
        np.searchsorted(cu_k, x, side="right") for x in _edges(int(cu_k[-1]), grid.block_k)
    )
    live = (top <= right) & (left <= bottom)
    return _kinds(live, (top == bottom) & (left == right) & (top == left))


def tile_numbers(item: WorkItem, geometry: BlockGeometry) -> npt.NDArray[np.int32]:
    """Return the number of each tile of an item among the predicate's partial tiles, int32.

    It is -1 for a full tile, and -2 for an empty one.
    """
    tiles, index = not_none(item.tiles), not_none(geometry.tiles)[1][item.q_rank, item.kv_rank]
    q_tile, k_tile = item.q_start // TILE, item.k_start // TILE
    numbers = index[q_tile : q_tile + tiles.shape[0], k_tile : k_tile + tiles.shape[1]]
    return np.where(tiles == PARTIAL, numbers, np.where(tiles == FULL, -1, -2)).astype(np.int32)


def _in_tiles(item: WorkItem, shape: tuple[int, ...], grid: Grid) -> Kinds:
    """Return the kinds of blocks by a predicate, ``[I, J]``.

    Blocks smaller than a tile are classified by the part of the tile that they are.
    """
    geometry = not_none(grid.geometry)
    sizes = math.gcd(TILE, grid.block_q), math.gcd(TILE, grid.block_k)
    numbers = tile_numbers(item, geometry)
    live, full = (
        x[numbers].swapaxes(1, 2).reshape(numbers.shape[0] * x.shape[1], -1)
        for x in _parts(geometry, *sizes)
    )
    # A block is live if one of its parts is, and full if all are that are in tiles: beyond the last
    # tile nothing is visible, and nothing is missing from a full block either.
    for dim, block in enumerate((grid.block_q, grid.block_k)):
        parts = block // sizes[dim]
        starts, inside = np.arange(shape[dim]) * parts, range(live.shape[dim])[: shape[dim] * parts]
        live = np.logical_or.reduceat(live.take(inside, dim), starts, dim)
        full = np.logical_and.reduceat(full.take(inside, dim), starts, dim)
    return _kinds(live, full)


@lru_cache(maxsize=32)
def _parts(geometry: BlockGeometry, rows: int, columns: int) -> tuple[Flags, Flags]:
    return parts_of_tiles(not_none(geometry.tiles)[0], rows, columns)


def _block_min_max(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest id of each block of ``ids [B, n]``, ``[B, blocks]``."""
    padding = -ids.shape[1] % size
    if padding:
        # Copies of the last id change neither extreme of its block.
        ids = torch.cat([ids, ids[:, -1:].expand(-1, padding)], dim=1)
    blocks = ids.unflatten(1, (-1, size))
    return blocks.amin(dim=2), blocks.amax(dim=2)
