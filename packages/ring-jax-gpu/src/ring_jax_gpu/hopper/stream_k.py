"""How the kernels for Hopper split tiles that do not come out even over a GPU's programs.

Where queries see all keys of a rectangle, tiles take equally long, and together as many rounds as
the program with most of them has. Of a round that is not full, programs that have no tile help the
others. What is here is decided when a call is traced; a kernel reads it as a row of numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # kernels import what is here, and no JAX
    from ring_jax.records import Rectangle


QUERIES, KEYS = 128, 128  # of a tile in the forward, and in the backward
KEYS_A_BLOCK, QUERIES_A_BLOCK = 128, 64  # which a tile walks along
_MOST_PARTS = 16  # of a tile in the forward
_MOST_PARTS_BACKWARD = 4  # of a tile in the backward
_BLOCKS_PER_PART = 4  # they take about as long as to begin a part and to leave it for another


class StreamK(NamedTuple):
    """Of the forward.

    Attributes:
        first, busy: From which block of queries on how many see something.
        split: How many of their last tiles come in parts.
        own: Blocks of keys in a tile's first part; the others are equal.
        each: Parts of a tile.
    """

    first: int
    busy: int
    split: int
    own: int
    each: int


class StreamKBackward(NamedTuple):
    """Of the backward.

    Attributes:
        first, busy: From which block of keys on how many are seen.
        split: Of how many of their last tiles a program does the first part only.
        own: Blocks of queries in a first part.
        helpers: Programs that do the rest of them, one tile behind the other.
        q_first, q_many: From which block of queries on how many there are.
    """

    first: int
    busy: int
    split: int
    own: int
    helpers: int
    q_first: int
    q_many: int


def of_queries(seen: Rectangle, heads: int, programs: int) -> StreamK:
    """What is split in the forward; ``heads`` are those of queries, of all batch rows."""
    first, busy = _blocks(seen.q_start, seen.q_stop, QUERIES)
    _, length = _blocks(seen.k_start, seen.k_stop, KEYS_A_BLOCK)
    return StreamK(first, busy, *split_tiles(busy * heads, length, programs))


def of_keys(seen: Rectangle, heads: int, group: int, programs: int) -> StreamKBackward:
    """What is split in the backward; ``heads`` are those of keys, of all batch rows."""
    first, busy = _blocks(seen.k_start, seen.k_stop, KEYS)
    q_first, q_many = _blocks(seen.q_start, seen.q_stop, QUERIES_A_BLOCK)
    return StreamKBackward(
        first, busy, *split_tiles_backward(busy * heads, group * q_many, programs), q_first, q_many
    )


def split_tiles(tiles: int, length: int, programs: int) -> tuple[int, int, int]:
    """``(split, own, each)`` of :class:`StreamK` for tiles that are ``length`` blocks long."""
    split = tiles % programs
    best, took = (0, 0, 1), length
    for each in range(2, min(_MOST_PARTS, length) + 1 if split else 2):
        # Rounds of the other parts, which those without a tile take.
        rounds = -(-split * (each - 1) // (programs - split))
        share = rounds / (each - 1)
        own = math.ceil((share * length + (rounds - 1) * _BLOCKS_PER_PART) / (1 + share))
        other = -(-(length - own) // (each - 1))
        takes = max(own + _BLOCKS_PER_PART, rounds * (other + _BLOCKS_PER_PART)) + each
        if takes < took and own < length:
            best, took = (split, own, each), takes
    return best


def split_tiles_backward(tiles: int, length: int, programs: int) -> tuple[int, int, int]:
    """``(split, own, helpers)`` of :class:`StreamKBackward`, for tiles of ``length`` blocks."""
    split = tiles % programs
    helpers = min(programs - split, split * (_MOST_PARTS_BACKWARD - 1))
    own = -(-split * (length + _BLOCKS_PER_PART) // max(split + helpers, 1))
    fits = split * length * helpers < 2**31  # the kernel counts in 32 bits
    return (split, own, helpers) if split > 0 and own < length and fits else (0, 0, 0)


def _blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    first = start // size
    return first, -(-stop // size) - first
