"""From what the loop hands over to what a Triton kernel takes, by name.

For bands and documents a kernel works out from the items which blocks of scores to visit; where
segment ids, a predicate or a mask that is an array decide, the blocks that are not empty are
indexed, for each block of the outer side: partial ones first, then full ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from ring_core import EMPTY, FULL, PARTIAL, TABLE_COLUMNS, TILE, Plan, UnsupportedError
from ring_core.base.arguments import not_none
from ring_core.philox import dropout_threshold
from ring_core.triton.tile_configs import (
    Blocks,
    Pass,
    Table,
    choose_blocks,
    heads_per_swizzle,
    padded,
    parts_of_tiles,
    positions_aligned8,
)
from ring_jax.kernels.block_index import Flags, item_bounds, kinds_of, shown_in_blocks
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    ItemTable,
    KeyBlock,
    QueryBlock,
    Static,
)
from ring_jax.search import searchsorted
from ring_jax_gpu.launch import RANK_OPERAND, Arrays, Kernel, Launch
from ring_jax_gpu.primitive import run

_HOPPER_DIMS = (64, 128)


class Tiles(NamedTuple):
    """A predicate's.

    Attributes:
        bits: The partial ones, each once, uint8 ``[n, 128, 16]``.
        which: Which of them lies where, int32; -1 shows all, -2 nothing.
    """

    bits: npt.NDArray[np.uint8]
    which: Array


@dataclass(frozen=True, eq=False)
class Call:
    """A step's work for the kernels.

    Attributes:
        separate_kv: Keys and values, and their gradients, are arrays of their own. In calls of
            several steps they travel side by side.
        blocks, roles: As of ``TritonKernel``.
    """

    static: Static
    rows: QueryBlock
    columns: KeyBlock
    work: ItemTable
    separate_kv: bool
    blocks: Table | None
    roles: bool

    def fwd(self, into: AttentionState, before: Array | None) -> AttentionState:
        """Merge what the queries see into a result, or into ``before``, which ``out`` rounds."""
        launch, given = self._plan("fwd")
        given |= {} if before is None else {"before": before}
        return AttentionState(**run(launch, given, into._asdict()))

    def bwd_dq(self, upstream: BackwardInputs, dq: Array) -> Array:
        """Add the gradient of the queries."""
        return run(*self._plan("bwd_dq", upstream), {"dq": dq})["dq"]

    def parts_of(self, both: Array, keys: str, values: str) -> Arrays:
        """What lies side by side, by name; side by side still in calls of several steps.

        The compiler takes apart what was just joined without a copy.
        """
        if not self.separate_kv:
            return {keys: both}
        parts = jnp.split(both, [self.static.head_dim], axis=-1)
        return dict(zip((keys, values), parts, strict=True))

    def bwd_dkv(self, upstream: BackwardInputs, dkv: Arrays) -> Arrays:
        """Add the gradients of keys and values."""
        return run(*self._plan("bwd_dkv", upstream), dkv)

    def bwd_fused(
        self, upstream: BackwardInputs, dq: Array, dkv: Arrays, *, only_on_hopper: bool
    ) -> tuple[Array, Arrays]:
        """Both, in one kernel or, where that is slower, in two."""
        launch, given = self._plan("bwd_fused", upstream)
        if only_on_hopper:
            others = (self._plan(name, upstream)[0] for name in ("bwd_dq", "bwd_dkv"))
            launch = replace(launch, fallback=tuple(others))
        changed = run(launch, given, {"dq": dq, **dkv})
        return changed.pop("dq"), changed

    def bwd_dbias(self, upstream: BackwardInputs, dbias: Array) -> Array:
        """Add the gradient of the bias."""
        return run(*self._plan("bwd_dbias", upstream, dbias=dbias), {"dbias": dbias})["dbias"]

    @property
    def on_hopper(self) -> bool:
        """Whether the kernels for Hopper do it there: bands, no option, usual head dims."""
        rows, static, config = self.rows, self.static, self.static.config
        options = (rows.ids, rows.bias, rows.slopes, rows.seed, static.softcap, self.work.kinds)
        is_plain = all(x is None for x in options) and not self._has_documents
        return (
            self.roles and is_plain and (config.block_q, config.block_k) == (None, None)
            and static.scale > 0 and rows.q.size > 0
            and static.head_dim == self._v_dim in _HOPPER_DIMS and rows.q.dtype.itemsize == 2
        )  # fmt: skip

    def _choose(self, name: Pass) -> Blocks:
        per_score = (self.rows.bias, self.rows.seed, self.work.kinds)
        return choose_blocks(
            self.static.config, name, max(self.static.head_dim, self._v_dim),
            self.rows.q.dtype.itemsize, rows=self.blocks,
            per_score_inputs=any(x is not None for x in per_score),
        )  # fmt: skip

    def _kinds(self, blocks: Blocks, masked_by: Array | None) -> Array:
        """The kind of each block, int32 ``[1 or B, I, J]``; with a bias each needs its mask."""
        kinds = block_kinds(
            self.rows, self.columns, self.work, self._tiles_of_predicate, blocks.q, blocks.k
        )
        if masked_by is not None:
            kinds = jnp.where(shown_in_blocks(masked_by, blocks.q, blocks.k), kinds, EMPTY)
        return kinds if self.rows.bias is None else jnp.where(kinds == FULL, PARTIAL, kinds)

    def _plan(
        self, name: Pass, upstream: BackwardInputs | None = None, *, dbias: Array | None = None
    ) -> tuple[Launch, Arrays]:
        kernel: Kernel = "bwd_dkv" if name == "bwd_fused" else name
        blocks, is_q_major = self._choose(name), kernel != "bwd_dkv"
        keys = self.parts_of(self.columns.kv, "k" if self.separate_kv else "kv", "v")
        given = {"q": self.rows.q, **keys, **self._options(), "items": item_bounds(self.work)}
        if upstream is not None:
            given |= {"dout": upstream.dout, "lse": upstream.lse, "delta": upstream.delta}
        if self._has_documents:
            sides = (not_none(self.rows.cells), not_none(self.columns.cells))
            given["cells"] = in_documents(*(sides if is_q_major else sides[::-1]))
        masked_by = self.rows.bias if self.static.bias_masks else None
        is_indexed = any(x is not None for x in (self.work.kinds, self.rows.ids, masked_by))
        numbers = self._numbers | self._strides(kernel)
        if kernel != "bwd_dbias":
            numbers["block_index_batch"] = 0
        if is_indexed and kernel != "bwd_dbias":
            kinds = self._kinds(blocks, masked_by)
            kinds = kinds if is_q_major else kinds.swapaxes(1, 2)
            given["block_index"], given["counts"] = block_index(kinds)
            many, outer, inner = given["block_index"].shape
            numbers["block_index_batch"] = outer * inner if many > 1 else 0
        consts = {
            "INDEXED": is_indexed or kernel == "bwd_dbias", "FUSED": name == "bwd_fused",
            "FRESH": self.static.fresh and kernel in ("fwd", "bwd_dkv"), **self._consts,
            "BLOCK_Q": blocks.q, "BLOCK_K": blocks.k,
            "Q_IS_MULTIPLE": self.rows.q.shape[2] % blocks.q == 0,
            "K_IS_MULTIPLE": self.columns.kv.shape[2] % blocks.k == 0,
        }  # fmt: skip
        batch, heads, q_len = self.rows.q.shape[:3]
        _, kv_heads, k_len, _ = self.columns.kv.shape
        num_k_blocks, num_q_blocks = -(-k_len // blocks.k), -(-q_len // blocks.q)
        if dbias is not None:
            bias_batch, bias_heads = dbias.shape[:2]
            numbers |= {
                "shared_batch": batch // bias_batch, "shared_heads": heads // bias_heads,
                "bias_heads": bias_heads, "dbias_batch": bias_heads * q_len * k_len,
                "dbias_head": q_len * k_len, "dbias_row": k_len,
            }  # fmt: skip
            grid = (num_k_blocks, num_q_blocks, bias_batch * bias_heads)
        else:
            numbers["heads_per_swizzle"] = heads_per_swizzle(
                name, batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, k_len=k_len,
                row=(self.static.head_dim + self._v_dim) * self.rows.q.dtype.itemsize,
            )  # fmt: skip
            many = num_q_blocks * batch * heads if is_q_major else num_k_blocks * batch * kv_heads
            grid = (many, 1, 1)
        hopper = name in ("fwd", "bwd_fused") and self.on_hopper
        launch = Launch(
            kernel, tuple(numbers.items()), tuple(consts.items()), grid, blocks.warps,
            blocks.stages, hopper=hopper, rectangles=self.static.rectangles if hopper else (),
        )  # fmt: skip
        if launch.rectangles:
            given[RANK_OPERAND] = self.work.items[0, TABLE_COLUMNS.index("q_rank")]
        return launch, given

    @property
    def _v_dim(self) -> int:
        return self.columns.kv.shape[3] - self.static.head_dim

    @property
    def _has_documents(self) -> bool:
        """Whether cells matter; the tiles of a predicate hold them already."""
        return self.rows.cells is not None and self.work.kinds is None

    @property
    def _numbers(self) -> dict[str, int]:
        rows, (batch, heads, q_len, _) = self.rows, self.rows.q.shape
        kv_heads, k_len = self.columns.kv.shape[1:3]
        of_bias, of_shift = (
            (1, 1) if x is None else x.shape[:2] for x in (rows.bias, rows.bias_shift)
        )
        per_batch = rows.slopes is not None and rows.slopes.shape[0] == batch
        return {
            "q_len": q_len, "k_len": k_len, "heads": heads, "group": heads // kv_heads,
            "slopes_batch": heads if per_batch else 0,
            "bias_batch": of_bias[1] * q_len * k_len if of_bias[0] > 1 else 0,
            "bias_head": q_len * k_len if of_bias[1] > 1 else 0, "bias_row": k_len,
            "bias_shift_batch": of_shift[1] * q_len if of_shift[0] > 1 else 0,
            "bias_shift_head": q_len if of_shift[1] > 1 else 0,
        }  # fmt: skip

    @property
    def _key_steps(self) -> tuple[int, int]:
        """From key to key, and from value to value."""
        both = self.columns.kv.shape[3]
        return (self.static.head_dim, self._v_dim) if self.separate_kv else (both, both)

    def _strides(self, kernel: Kernel) -> dict[str, int]:
        """From batch row to batch row and from head to head of what a kernel touches."""
        _, *queries, dim = self.rows.q.shape
        keys, (of_k, of_v) = self.columns.kv.shape[1:3], self._key_steps
        shapes = {
            "q": (*queries, dim), "k": (*keys, of_k), "v": (*keys, of_v),
            "out": (*queries, self._v_dim), "lse": (*queries, 1),
        }  # fmt: skip
        if kernel in ("bwd_dq", "bwd_dkv"):
            shapes["dq"] = shapes["q"]
        if kernel == "bwd_dkv":
            shapes |= {"dk": shapes["k"], "dv": shapes["v"]}
        found: dict[str, int] = {}
        for name, (many, length, row) in shapes.items():
            found |= {f"{name}_batch": many * length * row, f"{name}_head": length * row}
        return found

    @cached_property
    def _consts(self) -> dict[str, Any]:
        static, (of_k, of_v) = self.static, self._key_steps
        return {
            "KV_PACKED": not self.separate_kv, "BIAS_BY_POSITION": False,
            "ALIGNED8": _positions_aligned8(static.plan), "Q_STEP": static.head_dim, "K_STEP": of_k,
            "V_STEP": of_v, "OUT_STEP": self._v_dim, "DQ_STEP": static.head_dim, "DK_STEP": of_k,
            "DV_STEP": of_v, "D": static.head_dim, "DV": self._v_dim,
            "PADDED": padded(static.head_dim), "PADDED_V": padded(self._v_dim),
            "ITEMS": self.work.items.shape[0], "ALL_PARTIAL": self.rows.bias is not None,
            "SCALE": static.scale, "SOFTCAP": static.softcap,
            "DROPPED": dropout_threshold(static.dropout_p) if static.dropout_p > 0 else None,
        }  # fmt: skip

    def _options(self) -> Arrays:
        """The arrays of options, and the numbers of tokens that these need."""
        rows, columns = self.rows, self.columns
        options = {
            "q_ids": rows.ids, "k_ids": columns.ids, "bias": rows.bias, "bias_shift": rows.bias_shift,
        }  # fmt: skip
        if rows.slopes is not None:
            options |= {"slopes": rows.slopes.astype(jnp.float32), "q_at": rows.positions}
        if rows.seed is not None:
            words = lax.bitcast_convert_type(rows.seed, jnp.int32)
            dropout = jnp.concatenate([words, not_none(rows.offsets)])
            options |= {"dropout": dropout, "q_index": rows.indices}
        if rows.slopes is not None or rows.seed is not None:
            options["k_at"] = columns.positions
        if (tiles := self._tiles_of_predicate) is not None:
            options |= {"bits": jnp.asarray(tiles.bits.view(np.int32)), "tiles": tiles.which}
        return {name: array for name, array in options.items() if array is not None}

    @cached_property
    def _tiles_of_predicate(self) -> Tiles | None:
        """``None`` without a predicate.

        Raises:
            UnsupportedError: They take more memory than they may.
        """
        kinds, geometry = self.work.kinds, self.static.plan.blocks
        if kinds is None or geometry is None:
            return None
        if geometry.tiles is None:
            raise UnsupportedError(
                "kernel 'triton': the partial tiles of this predicate take more than 64 MiB. "
                "Instead: use kernel='xla', which evaluates the predicate block by block"
            )
        bits, index = geometry.tiles
        # Rows of the table that hold nothing come last: the first one says whose tiles these are.
        ranks = (self.work.items[0, TABLE_COLUMNS.index(name)] for name in ("q_rank", "kv_rank"))
        which = jnp.asarray(index)[tuple(ranks)]
        which = jnp.where(kinds == PARTIAL, which, jnp.where(kinds == FULL, -1, -2))
        return Tiles(bits, which.astype(jnp.int32))


@lru_cache(maxsize=64)
def _positions_aligned8(plan: Plan) -> bool:
    """Whether keys of all ranks do."""
    return all(positions_aligned8(plan.k_positions(rank)) for rank in range(plan.cp_size))


def in_documents(outer: Array, inner: Array) -> Array:
    """From where to where the inner tokens lie in the document of each outer one, int32 [2, T].

    Cells grow along both sides.
    """
    return jnp.stack([searchsorted(inner, outer, "left"), searchsorted(inner, outer, "right")])


def block_kinds(
    rows: QueryBlock,
    columns: KeyBlock,
    work: ItemTable,
    tiles: Tiles | None,
    block_q: int,
    block_k: int,
) -> Array:
    """The kind of each block, int32 ``[1 or B, I, J]``."""
    grid = (-(-rows.q.shape[2] // block_q), -(-columns.kv.shape[2] // block_k))
    in_tiles = None if tiles is None else _in_tiles(tiles, grid, block_q, block_k)
    return kinds_of(rows, columns, work, in_tiles, (block_q, block_k), grid)


def block_index(kinds: Array) -> tuple[Array, Array]:
    """Which inner blocks each outer block visits, int32, for kinds ``[1 or B, outer, inner]``.

    Returns:
        Their numbers, ``[1 or B, outer, inner]``, and how many of them are partial and how many
        full, ``[1 or B, outer, 2]``.
    """
    kind_order = jnp.where(kinds == EMPTY, FULL + 1, kinds)
    blocks = jnp.argsort(kind_order, axis=2, stable=True).astype(jnp.int32)
    counts = [(kinds == kind).sum(axis=2, dtype=jnp.int32) for kind in (PARTIAL, FULL)]
    return blocks, jnp.stack(counts, axis=2)


def _in_tiles(tiles: Tiles, grid: tuple[int, int], block_q: int, block_k: int) -> Flags:
    """What a predicate shows; ``[1, I, J]``.

    Finer than its tiles where blocks are.
    """
    num_q_parts = tiles.which.shape[0] * (TILE // min(TILE, block_q))
    some, every = (
        jnp.asarray(parts)[tiles.which].swapaxes(1, 2).reshape(num_q_parts, -1)
        for parts in parts_of_tiles(tiles.bits, min(TILE, block_q), min(TILE, block_k))
    )
    for axis, size in enumerate((block_q, block_k)):
        some, every = (_in_blocks(x, axis, grid[axis], size) for x in (some, every))
        some, every = some.any(axis=axis + 1), every.all(axis=axis + 1)
    return some[None], every[None]


def _in_blocks(parts: Array, axis: int, blocks: int, size: int) -> Array:
    """Flags of parts as ``blocks`` groups along an axis, the parts of a group along the next."""
    each = max(1, size // TILE)
    length, wanted = parts.shape[axis], blocks * each
    parts = jnp.pad(parts, [(0, max(0, wanted - length) if n == axis else 0) for n in range(2)])
    parts = parts[:wanted] if axis == 0 else parts[:, :wanted]
    return parts.reshape((*parts.shape[:axis], blocks, each, *parts.shape[axis + 1 :]))
