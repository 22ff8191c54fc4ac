"""Classify every tile of a predicate mask once, when the plan is made.

A predicate may be any rule, so it is evaluated on all pairs, tile by tile, and each tile kept as
empty, partial or full. Kernels skip the empty ones and mask nothing in the full ones. What the
partial ones show is decided here, too: kernels read the tile from a deduplicated store, or evaluate
the rule's expression, in which 32 bits hold every number, and never the function.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import EMPTY, FULL, PARTIAL, TILE, Bools, Ints, not_none
from ring_core.layouts.layout import Layout
from ring_core.masks.band import UNBOUNDED, Rectangles
from ring_core.masks.expression import TracedRule
from ring_core.masks.mask import rule_of
from ring_core.plan.geometry import BandGeometry, LaidOutMask, RectangleTable

MAX_PAIRS = 1 << 34
MAX_TILE_BYTES = 64 << 20
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class BlockGeometry(LaidOutMask):
    """Tiles, rectangles and counts of a mask with a predicate, evaluated on all pairs of tokens.

    Attributes:
        kinds: ``kinds[q_rank, kv_rank, a, b]`` is ``EMPTY``, ``PARTIAL`` or ``FULL``, for the tile
            that begins at local query row ``TILE * a`` and local key column ``TILE * b``.
        pairs: Visible pairs of each tile, of the same shape.
        digest: 16 bytes by which ranks compare what their predicates show: a hash of all pairs.
        rule: The mask's rule, without documents, as an expression, or why it has none.

    Raises:
        ValueError: More than ``2 ** 34`` pairs, or a predicate that fails or returns no booleans.
    """

    kinds: npt.NDArray[np.uint8] = field(init=False)
    pairs: npt.NDArray[np.int32] = field(init=False)
    digest: bytes = field(init=False)
    rule: TracedRule = field(init=False)

    def __post_init__(self) -> None:
        total = self.q_layout.padded_len * self.k_layout.padded_len
        if total > MAX_PAIRS:
            raise ValueError(
                f"a predicate mask over {self.q_layout.seq_len} x {self.k_layout.seq_len} tokens has "
                f"{total} pairs to classify, more than {MAX_PAIRS}; use causal, window, chunk_size "
                f"or cu_seqlens, which need no classification, or a shorter sequence"
            )
        self._check_predicate()
        rule = rule_of(self.mask, *spans_of(self.q_layout.seq_len, self.k_layout.seq_len))
        for name, value in zip(
            ("rule", "kinds", "pairs", "digest"), (rule, *self._evaluated()), strict=True
        ):
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def rectangles(
        self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, half: int | None = None
    ) -> RectangleTable:
        """Return one rectangle per pair of ranks: the bounding box of the tiles that show anything.

        Arguments are those of :meth:`BandGeometry.rectangles`, but halves are whole rows of tiles.
        """
        pairs = self._visible_pairs(q_rank, kv_rank, half)
        live = pairs.any(axis=(-2, -1))[..., None]
        q_bounds = _token_bounds(pairs.any(axis=-1), self.q_layout.num_tokens(q_rank))
        k_bounds = _token_bounds(pairs.any(axis=-2), self.k_layout.num_tokens(kv_rank))
        zero = np.zeros_like(live, dtype=np.int64)
        # One launch for all tiles of a pair of ranks; the kernel skips empty ones by their kind.
        box = (*q_bounds, *k_bounds, zero - UNBOUNDED, zero + UNBOUNDED)
        return RectangleTable(Rectangles(*(np.where(live, x, 0) for x in box)), zero, zero)

    def count(self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, half: int | None = None) -> Ints:
        """Count the visible (query, key) pairs of each pair of ranks; see :meth:`rectangles`."""
        return self._visible_pairs(q_rank, kv_rank, half).sum(axis=(-2, -1), dtype=np.int64)

    @cached_property
    def tiles(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]] | None:
        """Partial tiles, equal ones stored once: ``(bits, index)``.

        ``bits[n]`` is a tile, uint8 ``[TILE, TILE // 8]``, packed along its columns with the first
        column in the lowest bit. ``index`` has the shape of ``kinds`` and holds ``n`` for partial
        tiles, -1 for others. ``None`` when the tiles take more than ``MAX_TILE_BYTES``.
        """
        numbers: dict[bytes, int] = {}
        index = np.full(self.kinds.shape, -1, dtype=np.int32)
        # Tiles far apart often look alike, as on the diagonal: each pattern is kept, and sent to
        # the device, once.
        for q_rank, kv_rank, a, b in np.argwhere(self.kinds == PARTIAL).tolist():
            q = self._q_positions(q_rank)[a * TILE : (a + 1) * TILE]
            k = self._k_positions(kv_rank)[b * TILE : (b + 1) * TILE]
            tile = np.zeros((TILE, TILE), dtype=bool)
            tile[: q.size, : k.size] = self.mask.dense(q, k)
            bits = np.packbits(tile, axis=1, bitorder="little").tobytes()
            index[q_rank, kv_rank, a, b] = numbers.setdefault(bits, len(numbers))
            if len(numbers) * len(bits) > MAX_TILE_BYTES:
                return None
        store = np.frombuffer(b"".join(numbers), dtype=np.uint8)
        return store.reshape(len(numbers), TILE, TILE // 8), index

    @cached_property
    def lookup(self) -> TileLookup | None:
        """Table of tiles, to look pairs of tokens up; ``None`` where :attr:`tiles` is."""
        if self.tiles is None:
            return None
        store, index = self.tiles
        constant = np.broadcast_to(
            np.array([0, 255], np.uint8)[:, None, None], (2, *store.shape[1:])
        )
        number = np.where(index >= 0, index, len(store) + (self.kinds == FULL))
        q_tiles, k_tiles = number.shape[2:]
        number = number.swapaxes(1, 2).reshape(-1, number.shape[1] * k_tiles)
        return TileLookup(
            np.concatenate([store, constant]), number.astype(np.int32),
            _slots(self.q_layout, q_tiles), _slots(self.k_layout, k_tiles),
            np.left_shift(1, np.arange(8)).astype(np.uint8),
        )  # fmt: skip

    def dense(self, q_pos: Ints, k_pos: Ints) -> Bools:
        """Evaluate the mask at positions; those of padding are moved to the last token."""
        last = self.k_layout.seq_len - 1
        return self.mask.dense(np.minimum(q_pos, last), np.minimum(k_pos, last))

    def _visible_pairs(
        self, q_rank: npt.ArrayLike, kv_rank: npt.ArrayLike, half: int | None
    ) -> npt.NDArray[np.int32]:
        """Count the visible (query, key) pairs of each tile, ``[..., a, b]``.

        With ``half`` 0 or 1, tiles outside that half of the query rows are 0. Halves are whole rows
        of tiles, cut so that the first has at most half of the pairs.
        """
        q_rank, kv_rank = np.broadcast_arrays(q_rank, kv_rank)
        pairs: npt.NDArray[np.int32] = self.pairs[q_rank, kv_rank]
        if half is None:
            return pairs
        # Whole rows of tiles: a kernel cannot begin inside of one.
        total = pairs.sum(axis=-1, dtype=np.int64).cumsum(axis=-1)
        first_half = (2 * total <= total[..., -1:])[..., None]
        return np.where(first_half if half == 0 else ~first_half, pairs, 0)

    def _q_positions(self, rank: int) -> Ints:
        """Return the positions of a rank's queries, without padding, among the keys."""
        tokens = int(self.q_layout.num_tokens(rank))
        return self.q_layout.positions(rank)[:tokens] + self.q_offset

    def _k_positions(self, rank: int) -> Ints:
        """Return the positions of a rank's keys, without padding."""
        return self.k_layout.positions(rank)[: int(self.k_layout.num_tokens(rank))]

    def _check_predicate(self) -> None:
        """Try the predicate at a few positions, before all are evaluated.

        Raises:
            ValueError: It fails, or does not return booleans.
        """
        q_pos = np.arange(min(2, self.q_layout.seq_len))[:, None] + self.q_offset
        k_pos = np.arange(min(3, self.k_layout.seq_len))[None, :]
        try:
            visible = np.asarray(not_none(self.mask.predicate)(q_pos, k_pos))
            np.broadcast_to(visible, (q_pos.size, k_pos.size))
        except Exception as error:
            raise ValueError(
                f"mask: predicate(q_pos, k_pos) must take integer arrays [n, 1] and [1, m] and return "
                f"booleans [n, m]; it failed: {error}"
            ) from error
        if visible.dtype != np.bool_:
            raise ValueError(
                f"mask: predicate(q_pos, k_pos) must return booleans, got {visible.dtype}; compare, as "
                f"in (q_pos - k_pos) % 2 == 0"
            )

    def _evaluated(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], bytes]:
        """Evaluate the mask on all pairs of tokens; return ``kinds``, ``pairs`` and ``digest``."""
        q_len, k_len = self.q_layout.local_len, self.k_layout.local_len
        size = self.q_layout.cp_size
        digest = hashlib.blake2b(digest_size=16)
        pairs = np.zeros((size, size, -(-q_len // TILE), -(-k_len // TILE)), dtype=np.int32)
        # The whole mask may take gigabytes: evaluate some rows of it against the keys of one rank,
        # and keep only the sums of each tile.
        for q_rank in range(size):
            q_positions = self._q_positions(q_rank)
            for start in range(0, q_positions.size, _ROWS_AT_ONCE):
                q = q_positions[start : start + _ROWS_AT_ONCE]
                q_edges = np.arange(0, q.size, TILE)
                for kv_rank in range(size):
                    k = self._k_positions(kv_rank)
                    if k.size == 0:
                        continue
                    k_edges = np.arange(0, k.size, TILE)
                    visible = self.mask.dense(q, k)
                    digest.update(np.packbits(visible).tobytes())
                    sums_of_rows = np.add.reduceat(visible, k_edges, axis=1, dtype=np.int32)
                    a = start // TILE
                    pairs[q_rank, kv_rank, a : a + q_edges.size, : k_edges.size] = np.add.reduceat(
                        sums_of_rows, q_edges, axis=0
                    )
        # The last tile of a rank may be smaller: it is full if all pairs that it has are visible.
        q_sizes, k_sizes = (_tile_sizes(layout) for layout in (self.q_layout, self.k_layout))
        # Full tiles are computed without a mask, empty ones not at all.
        full = pairs == q_sizes[:, None, :, None] * k_sizes[None, :, None, :]
        kinds = np.where(pairs == 0, EMPTY, np.where(full, FULL, PARTIAL))
        return kinds.astype(np.uint8), pairs, digest.digest()


class TileLookup(NamedTuple):
    """The tiles of all pairs of ranks, to look pairs of tokens up: arrays of any framework.

    Attributes:
        bits: Distinct tiles, uint8 ``[n, TILE, TILE // 8]``, as in :attr:`BlockGeometry.tiles`.
        index: Number of each tile, int32 ``[P * a, P * b]``, the tiles of a rank beside each other.
        q_slots, k_slots: Row, and column, of each query and key among the tiles, int32 ``[T]``.
        lanes: The bit of each column of a byte, uint8 ``[8]``.
    """

    bits: Any
    index: Any
    q_slots: Any
    k_slots: Any
    lanes: Any

    def shown(self, q_index: Any, k_index: Any) -> Any:
        """Return whether queries see keys, booleans, by global indices that broadcast.

        Indices beyond the last token, of padding, are moved to it.
        """
        row = self.q_slots[q_index.clip(0, len(self.q_slots) - 1)]
        column = self.k_slots[k_index.clip(0, len(self.k_slots) - 1)]
        tile = self.index[row // TILE, column // TILE]
        byte = self.bits[tile, row % TILE, column % TILE // 8]
        return (byte & self.lanes[column % 8]) != 0


def spans_of(q_len: int, k_len: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the positions ``[start, stop)`` of queries, aligned at the last key, and of keys."""
    return (k_len - q_len, k_len), (0, k_len)


def _slots(layout: Layout, tiles: int) -> npt.NDArray[np.int32]:
    """Return where each token is if all ranks' tokens are padded to whole tiles, int32 ``[T]``."""
    slots = np.empty(layout.seq_len, dtype=np.int32)
    for rank in range(layout.cp_size):
        positions = layout.positions(rank)[: int(layout.num_tokens(rank))]
        slots[positions] = rank * tiles * TILE + np.arange(positions.size)
    return slots


def _tile_sizes(layout: Layout) -> Ints:
    """Return how many tokens, without padding, each tile of each rank has, ``[rank, tile]``."""
    tokens = layout.num_tokens(np.arange(layout.cp_size))
    sizes: Ints = np.clip(tokens[:, None] - np.arange(0, layout.local_len, TILE), 0, TILE)
    return sizes


def _token_bounds(tiles: Bools, length: Ints) -> tuple[Ints, Ints]:
    """Return where the first True tile starts and the last one stops, in tokens, ``[..., 1]``.

    ``length`` is the number of tokens of each rank, ``[...]``.
    """
    stop = tiles.shape[-1] - tiles[..., ::-1].argmax(axis=-1)[..., None]
    return tiles.argmax(axis=-1)[..., None] * TILE, np.minimum(stop * TILE, length[..., None])


Geometry = BandGeometry | BlockGeometry
