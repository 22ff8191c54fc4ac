"""Translate a launch's masks and options into what FlashAttention-4 takes.

That is functions on single scores (soft cap, ALiBi, masks), the numbers and tensors that these
read, and lists of the blocks of scores to visit.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_core import WorkItem
from ring_core.base.arguments import FULL, PARTIAL, not_none
from ring_core.masks.expression import Expression
from ring_core.plan.tile_mask import BlockGeometry
from ring_torch.capture import capture_safe_cache
from ring_torch.kernels.block_index import FAR, Grid, kinds_on, tile_numbers
from ring_torch.kernels.fa4.library import (
    BLOCK_Q,
    PLAIN,
    Modded,
    tile_with_lists,
)
from ring_torch.kernels.library import Direction, LaunchOptions

_LARGEST_TILE = 256  # tokens; no tile of the library's is larger
_FEW_KEYS = 64  # keys of the smaller block that a forward over a predicate may use
# Time of a score, relative to one of a full block of 128 keys: measured (benchmarks/NOTES.md).
_FEW_KEYS_COST = 1.15  # in a block of 64 keys
_PARTIAL_COST = 1.3  # in a block that needs its mask


def modded_of(direction: Direction, q: Tensor, v: Tensor, options: LaunchOptions) -> Modded:
    """Return the library's options for a pass over ``q [B, n, H, D]`` and ``v [B, m, K, Dv]``."""
    cap, alibi, masked = options.softcap, _alibi(options), options.masked
    modded = PLAIN if options.sinks is None else Modded(sinks=options.sinks)
    if cap is None and alibi is None and masked is None:
        return modded
    functions = import_module("ring_torch.kernels.fa4.mods")
    if cap is not None or alibi is not None:
        # How many heads share a row in the indices that `score_mod` gets. The forward packs grouped
        # heads into rows, and unpacks the indices. The backward on Hopper gives packed indices,
        # though it has packed nothing. It matters to ALiBi alone, which is for Hopper.
        packed = q.shape[-2] // v.shape[-2] if direction == "backward" else 1
        modded = modded._replace(
            score_mod=functions.score_mod(cap, alibi, packed),
            score_mod_bwd=functions.score_mod_bwd(cap),
        )
    if alibi is None and masked is None:
        return modded
    rule = _rule(masked, options.geometry)
    dims = q.shape[-1], v.shape[-1]
    by_columns = masked is not None and tile_with_lists(direction, *dims)[1]
    tensors, integers = _read(options, rule, q.device, by_columns=by_columns)
    addresses = {name: x.data_ptr() for name, x in tensors.items()}
    numbers = functions.Numbers(**addresses, **integers)
    modded = modded._replace(numbers=numbers, keep_alive=tuple(tensors.values()))
    if masked is None:
        return modded
    mask_mod = functions.mask_mod(
        options.segments is not None,
        "tiles" in tensors,
        by_columns and "tiles" in tensors,
        None if rule is None else rule.expression,
        rule is not None and rule[1:] == (0, 0),
    )
    lists, block_size = _lists(direction, q, v, masked, options)
    return modded._replace(mask_mod=mask_mod, lists=lists, block_size=block_size)


def _alibi(options: LaunchOptions) -> str | None:
    """Return how ALiBi gets distances, a ``mods.Alibi``; ``None`` without ALiBi.

    ``read`` is from positions in tensors; ``causal`` and ``counted`` are by indices.
    """
    if options.slopes is None:
        return None
    if options.q_k_offset is None:
        return "read"
    return "causal" if options.is_causal else "counted"


class Rule(NamedTuple):
    """A mask with a predicate as an expression, and the first positions of an item."""

    expression: Expression
    q_first: int
    k_first: int


@lru_cache(maxsize=256)
def _rule(item: WorkItem | None, geometry: BlockGeometry | None) -> Rule | None:
    """Return the predicate of an item as a formula of its indices.

    It is ``None`` if the predicate is no formula, or positions are not consecutive.
    """
    if item is None or geometry is None:
        return None
    offset, k_layout = geometry.q_offset, geometry.k_layout
    # Documents are no part of the rule's expression.
    expression = None if geometry.mask.cu_seqlens is not None else geometry.rule.short
    rows = geometry.q_layout.positions(item.q_rank)[item.q_slice] + offset
    columns = k_layout.positions(item.kv_rank)[item.k_slice]
    if expression is None or any((np.diff(x) != 1).any() for x in (rows, columns)):
        return None
    return Rule(expression, int(rows[0]), int(columns[0]))


def _read(
    options: LaunchOptions, rule: Rule | None, device: torch.device, *, by_columns: bool
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors and integers that the functions read, by their names in ``Numbers``."""
    tensors: dict[str, Tensor] = {}
    numbers = {} if rule is None else {"q_first": rule.q_first, "k_first": rule.k_first}
    if options.slopes is not None:
        slopes = tensors["slopes"] = options.slopes.float().contiguous()
        numbers["slopes_batch"] = slopes.shape[1] if slopes.shape[0] > 1 else 0
        numbers["q_k_offset"] = options.q_k_offset or 0
    if options.positions is not None and options.q_k_offset is None:
        rows, columns = options.positions
        # Relative to the first row: float32 is exact only for integers up to 2^24.
        tensors |= {
            name: torch.nn.functional.pad((x - rows[:1]).float(), (0, _LARGEST_TILE))
            for name, x in (("q_at", rows), ("k_at", columns))
        }
    if options.segments is not None:
        tensors["q_ids"], tensors["k_ids"] = map(_from_16_bytes, options.segments)
    if (item := options.masked) is not None:
        numbers |= {
            "lo": -FAR if item.lo is None else item.lo, "hi": FAR if item.hi is None else item.hi,
            "q_len": item.q_stop - item.q_start, "k_len": item.k_stop - item.k_start,
        }  # fmt: skip
        if rule is None and options.geometry is not None:
            tensors["bits"] = _bits_and_constants(options.geometry, by_columns, device)
            tiles = tensors["tiles"] = _padded_tile_numbers(item, options.geometry, device)
            numbers["tiles_per_row"] = tiles.shape[1]
    return tensors, numbers


def _from_16_bytes(ids: Tensor) -> Tensor:
    """Return ids contiguous and at a multiple of 16 bytes, as the functions read them."""
    ids = ids.contiguous()
    return ids if ids.data_ptr() % 16 == 0 else ids.clone()


def _lists(
    direction: Direction, q: Tensor, v: Tensor, item: WorkItem, options: LaunchOptions
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """Return block lists, shared by all heads, and the size of a block."""
    from ring_torch.kernels.fa4.block_lists import block_lists

    block_k, _ = tile_with_lists(direction, q.shape[-1], v.shape[-1])
    if direction == "forward" and options.geometry is not None and options.segments is None:
        block_k = _cheaper_block_k(item, options.geometry, block_k)
    size = BLOCK_Q, block_k
    grid = Grid(*size, False, direction == "backward", q.device, options.geometry)
    return tuple(x.unsqueeze(1) for x in block_lists(item, grid, options.segments)), size


@lru_cache(maxsize=256)
def _cheaper_block_k(item: WorkItem, geometry: BlockGeometry, tile: int) -> int:
    """Return the number of keys per block: the library's tile, or 64 if that is estimated cheaper.

    With smaller blocks more of them are empty. The library's forward takes either.
    """

    def cost(block_k: int) -> float:
        kinds = kinds_on(item, Grid(BLOCK_Q, block_k, False, False, torch.device("cpu"), geometry))
        full, partial = (int((kinds == kind).sum()) for kind in (FULL, PARTIAL))
        return (full + _PARTIAL_COST * partial) * block_k

    return _FEW_KEYS if _FEW_KEYS_COST * cost(_FEW_KEYS) < cost(tile) else tile


@capture_safe_cache(maxsize=32)
def _bits_and_constants(geometry: BlockGeometry, by_columns: bool, device: torch.device) -> Tensor:
    """Return a predicate's distinct partial tiles as bits, then an empty tile and a full one.

    The result is int32 ``[tiles + 2, 128, 4]``: a row of 128 bits for each query, or for each key
    if ``by_columns``; a bit is set where the query sees the key.
    """
    tiles = not_none(geometry.tiles)[0]
    if by_columns:
        cells = np.unpackbits(tiles, axis=2, bitorder="little").swapaxes(1, 2)
        tiles = np.packbits(cells, axis=2, bitorder="little")
    two = np.broadcast_to(np.array([0, 255], np.uint8)[:, None, None], (2, *tiles.shape[1:]))
    return torch.tensor(np.concatenate([tiles, two]).view(np.int32), device=device)


@capture_safe_cache(maxsize=256)
def _padded_tile_numbers(item: WorkItem, geometry: BlockGeometry, device: torch.device) -> Tensor:
    """Return the number of each tile of an item among those of :func:`_bits_and_constants`, int32.

    Two more rows and columns of empty tiles follow, as blocks may reach beyond the rectangle.
    """
    tile_index = np.pad(tile_numbers(item, geometry), [(0, 2), (0, 2)], constant_values=-2)
    count = len(not_none(geometry.tiles)[0])
    return torch.as_tensor(
        np.where(tile_index < 0, count + 2 + tile_index, tile_index), device=device
    )
