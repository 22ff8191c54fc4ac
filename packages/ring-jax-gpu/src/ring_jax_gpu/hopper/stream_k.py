"""Stream-K schedules of the kernels for Hopper: how the last tiles are split over thread blocks.

If queries see all keys of a rectangle, all tiles take equally long, and the kernel takes as many
rounds as the busiest thread block has tiles. In a last round that is not full, thread blocks
without a tile do a part of the others' tiles. The schedule is made when a call is traced; a kernel
reads it as a row of integers. Thread blocks are called programs here, as in Triton.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # kernels import this module, and must not import JAX
    from ring_jax.records import Item


QUERIES, KEYS = 128, 128  # queries of a forward tile, keys of a backward tile
KEYS_A_BLOCK, QUERIES_A_BLOCK = 128, 64  # size of the blocks that a tile's loop visits
_MAX_PARTS = 16  # of a tile in the forward
_MAX_PARTS_BACKWARD = 4  # of a tile in the backward
_BLOCKS_PER_PART = 4  # overhead of a part, in the time of a block: begin it, hand its result over


class StreamK(NamedTuple):
    """The Stream-K schedule of the forward kernel: which tiles are split into how many parts.

    Attributes:
        first, busy: The first block of queries that sees something, and the number of these.
        split: Number of tiles, the last ones of these queries, that are split.
        own: Blocks of keys in the first part of a split tile; the other parts are equal.
        each: Number of parts of a split tile.
    """

    first: int
    busy: int
    split: int
    own: int
    each: int


class StreamKBackward(NamedTuple):
    """The Stream-K schedule of the backward kernel: which tiles are split, and who does the rest.

    Attributes:
        first, busy: The first block of keys that is seen, and the number of these.
        split: Number of tiles, the last ones of these keys, of which a program does the first part.
        own: Blocks of queries in a first part.
        helpers: Number of further programs. The rests of all split tiles, one after another, are
            divided evenly among them.
        q_first, q_many: The first block of queries that sees something, and the number of these.
    """

    first: int
    busy: int
    split: int
    own: int
    helpers: int
    q_first: int
    q_many: int


def forward_schedule(seen: Item[int], heads: int, programs: int) -> StreamK:
    """Make the forward's schedule for a rectangle of queries that see all its keys.

    ``heads`` is the number of query heads times the batch, ``programs`` that of thread blocks.
    """
    first, busy = _blocks(seen.q_start, seen.q_stop, QUERIES)
    _, length = _blocks(seen.k_start, seen.k_stop, KEYS_A_BLOCK)
    return StreamK(first, busy, *split_tiles(busy * heads, length, programs))


def backward_schedule(seen: Item[int], heads: int, group: int, programs: int) -> StreamKBackward:
    """Make the backward's schedule for a rectangle of queries that see all its keys.

    ``heads`` is the number of K/V heads times the batch, ``group`` that of query heads per K/V
    head, ``programs`` that of thread blocks.
    """
    first, busy = _blocks(seen.k_start, seen.k_stop, KEYS)
    q_first, q_many = _blocks(seen.q_start, seen.q_stop, QUERIES_A_BLOCK)
    return StreamKBackward(
        first, busy, *split_tiles_backward(busy * heads, group * q_many, programs), q_first, q_many
    )


def split_tiles(tiles: int, length: int, programs: int) -> tuple[int, int, int]:
    """Choose ``(split, own, each)`` of :class:`StreamK` for tiles of ``length`` blocks each.

    ``(0, 0, 1)`` if splitting would not be faster.
    """
    split = tiles % programs
    best, best_time = (0, 0, 1), length  # times are in units of a block
    for each in range(2, min(_MAX_PARTS, length) + 1 if split else 2):
        # Programs without a tile take the other parts, in so many rounds.
        rounds = -(-split * (each - 1) // (programs - split))
        share = rounds / (each - 1)
        own = math.ceil((share * length + (rounds - 1) * _BLOCKS_PER_PART) / (1 + share))
        other = -(-(length - own) // (each - 1))
        time = max(own + _BLOCKS_PER_PART, rounds * (other + _BLOCKS_PER_PART)) + each
        if time < best_time and own < length:
            best, best_time = (split, own, each), time
    return best


def split_tiles_backward(tiles: int, length: int, programs: int) -> tuple[int, int, int]:
    """Choose ``(split, own, helpers)`` of :class:`StreamKBackward`, for tiles of ``length`` blocks.

    ``(0, 0, 0)`` if nothing is split.
    """
    split = tiles % programs
    helpers = min(programs - split, split * (_MAX_PARTS_BACKWARD - 1))
    own = -(-split * (length + _BLOCKS_PER_PART) // max(split + helpers, 1))
    fits = split * length * helpers < 2**31  # the kernel counts in 32 bits
    return (split, own, helpers) if split > 0 and own < length and fits else (0, 0, 0)


def _blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the first block of tokens ``[start, stop)``, and the number of blocks."""
    first = start // size
    return first, -(-stop // size) - first
