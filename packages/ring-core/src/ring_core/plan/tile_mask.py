"""Classify every tile of a predicate mask once, when the plan is made.

A predicate may be any rule, so it is evaluated on all pairs, tile by tile, and each tile kept as
empty, partial or full. Kernels skip the empty ones, mask nothing in the full ones, and evaluate the
rule, or read the tile from a deduplicated store, in the partial ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import EMPTY, FULL, PARTIAL, TILE, Bools, Ints, not_none
from ring_core.layouts.layout import Layout
from ring_core.masks.band import UNBOUNDED, Rectangles
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

    Raises:
        ValueError: More than ``2 ** 34`` pairs, or a predicate that fails or returns no booleans.
    """

    kinds: npt.NDArray[np.uint8] = field(init=False)
    pairs: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        total = self.q_layout.padded_len * self.k_layout.padded_len
        if total > MAX_PAIRS:
            raise ValueError(
                f"a predicate mask over {self.q_layout.seq_len} x {self.k_layout.seq_len} tokens has "
                f"{total} pairs to classify, more than {MAX_PAIRS}; use causal, window, chunk_size "
                f"or cu_seqlens, which need no classification, or a shorter sequence"
            )
        self._check_predicate()
        for name, tiles in zip(("kinds", "pairs"), self._kinds_and_pairs(), strict=True):
            object.__setattr__(self, name, tiles)  # the dataclass is frozen

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

    def digest(self) -> bytes:
        """Return 16 bytes by which ranks compare what their predicates show.

        They are a hash of the kinds and counts of tiles: predicates that differ inside of tiles
        alone, and show equally many pairs there, are not told apart.
        """
        return hashlib.blake2b(self.kinds.tobytes() + self.pairs.tobytes(), digest_size=16).digest()

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

    def _kinds_and_pairs(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Evaluate the mask on all pairs of tokens, and return ``kinds`` and ``pairs``."""
        q_len, k_len = self.q_layout.local_len, self.k_layout.local_len
        size = self.q_layout.cp_size
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
        return kinds.astype(np.uint8), pairs


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
