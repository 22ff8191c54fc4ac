"""Translate a step's operands into the arguments of the Triton kernels, by name.

For bands and documents a kernel derives from the items which blocks of scores to visit. If segment
ids, a predicate or a mask that is an array decide, the blocks that are not empty are listed for
each block of the outer side: partial ones first, then full ones. The outer side are the queries,
except in the kernel for dK and dV, whose outer side are the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_core import Plan
from ring_core.base.arguments import FULL, PARTIAL, not_none
from ring_core.philox import dropout_threshold
from ring_core.triton.tile_configs import (
    Blocks,
    KernelPass,
    Table,
    choose_blocks,
    heads_per_swizzle,
    padded_head_dim,
    positions_aligned8,
    score_unit,
)
from ring_jax.kernels.block_index import item_bounds, kinds_of
from ring_jax.positions import searchsorted
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    CallSpec,
    ItemTable,
    KeyBlock,
    LaunchSpec,
    QueryBlock,
)
from ring_jax_gpu.block_index import PredicateTiles, block_index, in_tiles, segment_cells
from ring_jax_gpu.launch import (
    CELLS,
    IDS_ASCEND,
    ITEM_NUMBER,
    LISTS,
    SEGMENT_CELLS,
    Arrays,
    KernelName,
    Launch,
)
from ring_jax_gpu.primitive import launch_kernel

HOPPER_DIMS = (64, 128)
#: Soft caps and positions below these lose less in the kernels for Hopper than 16 bits do: they
#: take ``tanh`` from exponentials, and its rounding is times the cap; positions are float32.
LARGEST_CAP, POSITIONS = 1024.0, 2**24


@dataclass(frozen=True, eq=False)
class StepWork:
    """The work of one step for the Triton kernels, of which each method launches one.

    Attributes:
        separate_kv: Keys and values, and their gradients, are separate arrays. In calls of several
            steps they travel, and lie, side by side.
        blocks: Table of block sizes; ``None`` is the package's own.
        roles: On Hopper, use the warp-specialised kernels where they can do the step.
    """

    spec: LaunchSpec
    rows: QueryBlock
    columns: KeyBlock
    work: ItemTable
    separate_kv: bool
    blocks: Table | None
    roles: bool

    @property
    def call(self) -> CallSpec:
        """The call that the step belongs to."""
        return self.spec.call

    def fwd(self, into: AttentionState, before: Array | None) -> AttentionState:
        """Merge the attention of the work items into ``into``.

        With ``before``, the accumulated output is read from there, and ``into.out``, which may have
        a narrower dtype, is only written.
        """
        launch, arrays = self._plan("fwd")
        arrays |= {} if before is None else {"before": before}
        return AttentionState(**launch_kernel(launch, arrays, into._asdict()))

    def bwd_dq(self, upstream: BackwardInputs, dq: Array) -> Array:
        """Add the gradient of the queries to ``dq``."""
        return launch_kernel(*self._plan("bwd_dq", upstream), {"dq": dq})["dq"]

    def split_kv(self, kv: Array, keys: str, values: str) -> Arrays:
        """Name keys and values that lie side by side, as two arrays if ``separate_kv``, else one.

        The compiler splits what was concatenated just before without a copy.
        """
        if not self.separate_kv:
            return {keys: kv}
        parts = jnp.split(kv, [self.call.head_dim], axis=-1)
        return dict(zip((keys, values), parts, strict=True))

    def bwd_dkv(self, upstream: BackwardInputs, dkv: Arrays) -> Arrays:
        """Add the gradients of keys and values to ``dkv``."""
        return launch_kernel(*self._plan("bwd_dkv", upstream), dkv)

    def bwd_fused(
        self, upstream: BackwardInputs, dq: Array, dkv: Arrays, *, only_on_hopper: bool
    ) -> tuple[Array, Arrays]:
        """Add the gradients of queries, keys and values in one kernel.

        With ``only_on_hopper``, other GPUs use two kernels, which are faster there.
        """
        launch, arrays = self._plan("bwd_fused", upstream)
        if only_on_hopper:
            (dq_launch, of_dq), (dkv_launch, of_dkv) = (
                self._plan("bwd_dq", upstream), self._plan("bwd_dkv", upstream)
            )  # fmt: skip
            launch = replace(launch, fallback=(dq_launch, dkv_launch))
            # Documents of queries, and lists of blocks of their sizes.
            arrays |= of_dq | of_dkv
        changed = launch_kernel(launch, arrays, {"dq": dq, **dkv})
        return changed.pop("dq"), changed

    def bwd_dbias(self, upstream: BackwardInputs, dbias: Array) -> Array:
        """Add the gradient of the bias to ``dbias``."""
        planned = self._plan("bwd_dbias", upstream, dbias=dbias)
        return launch_kernel(*planned, {"dbias": dbias})["dbias"]

    def suits_hopper(self, name: KernelPass) -> bool:
        """Return True if a pass has a kernel for Hopper that can do the step.

        They do bands, documents or segment ids, ALiBi, soft caps, dropout in the backward, a
        positive scale, 16-bit dtypes, and one head dim of 64 or 128, in blocks of their own choice.
        Which GPU it is, is known only when it is lowered.
        """
        rows, call, plan = self.rows, self.call, self.call.plan
        config, length = call.config, max(plan.seq_len, plan.kv_seq_len)
        absent = (rows.bias, self.work.kinds, config.block_q, config.block_k)
        return (
            self.roles
            and all(x is None for x in absent)
            and (rows.ids is None or rows.cells is None)
            and (call.softcap is None or call.softcap <= LARGEST_CAP)
            and (rows.slopes is None or length <= POSITIONS)
            and (rows.seed is None or (name != "fwd" and self._suits_philox))
            and call.scale > 0
            and rows.q.size > 0
            and call.head_dim == self._v_dim in HOPPER_DIMS
            and rows.q.dtype.itemsize == 2
        )

    @property
    def _suits_philox(self) -> bool:
        """Return True if four keys share a call of Philox, and some words keep a weight."""
        return (
            _positions_aligned8(self.call.plan) and dropout_threshold(self.call.dropout_p) < 2**32
        )

    def _kinds(self, blocks: Blocks) -> Array:
        """Return the kind of each block, int32 ``[1 or B, I, J]``.

        With a bias no block is full: the kernel reads the bias in partial blocks only.
        """
        rows, columns, tiles = self.rows, self.columns, self._predicate_tiles
        lengths = rows.q.shape[2], columns.kv.shape[2]
        kinds = kinds_of(
            rows, columns, self.work,
            None if tiles is None else in_tiles(tiles, lengths, blocks.q, blocks.k),
            blocks.q, blocks.k, bias_masks=self.call.bias_masks,
        )  # fmt: skip
        return kinds if rows.bias is None else jnp.where(kinds == FULL, PARTIAL, kinds)

    def _plan(
        self,
        name: KernelPass,
        upstream: BackwardInputs | None = None,
        *,
        dbias: Array | None = None,
    ) -> tuple[Launch, Arrays]:
        """Return the launch of a kernel, and the arrays that it reads, by name."""
        kernel: KernelName = "bwd_dkv" if name == "bwd_fused" else name
        per_score = (self.rows.bias, self.rows.seed, self.work.kinds)
        blocks, is_q_major = choose_blocks(
            self.call.config, name, max(self.call.head_dim, self._v_dim),
            self.rows.q.dtype.itemsize, table=self.blocks,
            per_score_inputs=any(x is not None for x in per_score),
        ), kernel != "bwd_dkv"  # fmt: skip
        keys = self.split_kv(self.columns.kv, "k" if self.separate_kv else "kv", "v")
        arrays = {
            "q": self.rows.q,
            **keys,
            **self._option_arrays(),
            "items": item_bounds(self.work),
        }
        if upstream is not None:
            arrays |= {"dout": upstream.dout, "lse": upstream.lse, "delta": upstream.delta}
        if self._has_documents:
            outer, inner = not_none(self.rows.cells), not_none(self.columns.cells)
            outer, inner = (outer, inner) if is_q_major else (inner, outer)
            # The inner tokens [start, stop) in the document of each outer token.
            ends = [searchsorted(inner, outer, side) for side in ("left", "right")]
            arrays[CELLS[kernel]] = jnp.stack(ends)
        array_mask = self.rows.bias if self.call.bias_masks else None
        is_indexed = any(x is not None for x in (self.work.kinds, self.rows.ids, array_mask))
        numbers = self._numbers | self._strides(kernel)
        # The kernel for the gradient of a bias has a program for each block, and takes no list.
        if kernel != "bwd_dbias":
            numbers["block_index_batch"] = 0
        if is_indexed and kernel != "bwd_dbias":
            # Lists are by outer block. Where all batch rows see alike they share one: stride 0.
            kinds = self._kinds(blocks)
            kinds = kinds if is_q_major else kinds.swapaxes(1, 2)
            blocks_of_list, counts = block_index(kinds)
            arrays |= dict(zip(LISTS[kernel], (blocks_of_list, counts), strict=True))
            num_lists, *list_shape = blocks_of_list.shape
            numbers["block_index_batch"] = math.prod(list_shape) if num_lists > 1 else 0
        consts = {
            "INDEXED": is_indexed or kernel == "bwd_dbias", "FUSED": name == "bwd_fused",
            "OVERWRITE": self.spec.overwrite and kernel in ("fwd", "bwd_dkv"), **self._consts,
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
                row=(self.call.head_dim + self._v_dim) * self.rows.q.dtype.itemsize,
            )  # fmt: skip
            q_programs, k_programs = num_q_blocks * batch * heads, num_k_blocks * batch * kv_heads
            grid = (q_programs if is_q_major else k_programs, 1, 1)
        # What Hopper's kernels can do is marked: which GPU it is, is known when this is lowered.
        hopper = name in ("fwd", "bwd_fused") and self.suits_hopper(name)
        if hopper and self.rows.ids is not None:
            ids = not_none(self.rows.ids), not_none(self.columns.ids)
            cells, ascend = segment_cells(*(ids if is_q_major else ids[::-1]))
            arrays |= {SEGMENT_CELLS: cells, IDS_ASCEND: ascend}
        launch = Launch(
            kernel, tuple(numbers.items()), tuple(consts.items()), grid, blocks.warps,
            blocks.stages, hopper=hopper, rectangles=self.spec.rectangles if hopper else (),
        )  # fmt: skip
        if launch.rectangles:
            arrays[ITEM_NUMBER] = not_none(self.work.number)
        return launch, arrays

    @property
    def _v_dim(self) -> int:
        """Head dim of the values."""
        return self.columns.kv.shape[3] - self.call.head_dim

    @property
    def _has_documents(self) -> bool:
        """Return True if kernels must compare documents; a predicate's tiles account for them."""
        return self.rows.cells is not None and self.work.kinds is None

    @property
    def _numbers(self) -> dict[str, int]:
        """Lengths, numbers of heads and strides of option arrays, by parameter name.

        A stride of 0 is of a dimension that broadcasts.
        """
        rows, (batch, heads, q_len, _) = self.rows, self.rows.q.shape
        kv_heads, k_len = self.columns.kv.shape[1:3]
        bias_dims, shift_dims = (
            (1, 1) if x is None else x.shape[:2] for x in (rows.bias, rows.bias_shift)
        )
        per_batch = rows.slopes is not None and rows.slopes.shape[0] == batch
        return {
            "q_len": q_len, "k_len": k_len, "heads": heads, "group": heads // kv_heads,
            "slopes_batch": heads if per_batch else 0,
            "bias_batch": bias_dims[1] * q_len * k_len if bias_dims[0] > 1 else 0,
            "bias_head": q_len * k_len if bias_dims[1] > 1 else 0, "bias_row": k_len,
            "bias_shift_batch": shift_dims[1] * q_len if shift_dims[0] > 1 else 0,
            "bias_shift_head": q_len if shift_dims[1] > 1 else 0,
        }  # fmt: skip

    @property
    def _kv_row_strides(self) -> tuple[int, int]:
        """Elements from one key to the next, and from one value to the next."""
        kv_dim = self.columns.kv.shape[3]
        return (self.call.head_dim, self._v_dim) if self.separate_kv else (kv_dim, kv_dim)

    def _strides(self, kernel: KernelName) -> dict[str, int]:
        """Return the strides over batch rows and heads of a kernel's tensors, by parameter name."""
        _, *queries, dim = self.rows.q.shape
        keys, (k_stride, v_stride) = self.columns.kv.shape[1:3], self._kv_row_strides
        shapes = {
            "q": (*queries, dim), "k": (*keys, k_stride), "v": (*keys, v_stride),
            "out": (*queries, self._v_dim), "lse": (*queries, 1),
        }  # fmt: skip
        if kernel in ("bwd_dq", "bwd_dkv"):
            shapes["dq"] = shapes["q"]
        if kernel == "bwd_dkv":
            shapes |= {"dk": shapes["k"], "dv": shapes["v"]}
        strides: dict[str, int] = {}
        for name, (heads, length, row) in shapes.items():
            strides |= {f"{name}_batch": heads * length * row, f"{name}_head": length * row}
        return strides

    @cached_property
    def _consts(self) -> dict[str, Any]:
        """The compile-time constants that all kernels of the step share, by name."""
        call, (k_stride, v_stride) = self.call, self._kv_row_strides
        return {
            "KV_PACKED": not self.separate_kv, "BIAS_BY_POSITION": False,
            "ALIGNED8": _positions_aligned8(call.plan), "Q_STEP": call.head_dim,
            "K_STEP": k_stride, "V_STEP": v_stride, "OUT_STEP": self._v_dim,
            "DQ_STEP": call.head_dim, "DK_STEP": k_stride, "DV_STEP": v_stride,
            "D": call.head_dim, "DV": self._v_dim,
            "PADDED": padded_head_dim(call.head_dim), "PADDED_V": padded_head_dim(self._v_dim),
            "ITEMS": self.work.items.shape[0], "ALL_PARTIAL": self.rows.bias is not None,
            "SCALE": call.scale, "SOFTCAP": call.softcap, "UNIT": score_unit(self.rows.q.dtype.itemsize),
            "DROPPED": dropout_threshold(call.dropout_p) if call.dropout_p > 0 else None,
        }  # fmt: skip

    def _option_arrays(self) -> Arrays:
        """Return the arrays of options, and the positions and indices of tokens that they need."""
        rows, columns = self.rows, self.columns
        options = {
            "q_ids": rows.ids, "k_ids": columns.ids, "bias": rows.bias, "bias_shift": rows.bias_shift,
        }  # fmt: skip
        if rows.slopes is not None:
            options |= {"slopes": rows.slopes.astype(jnp.float32), "q_at": rows.positions}
        if rows.seed is not None:
            seed_words = lax.bitcast_convert_type(rows.seed, jnp.int32)
            # Global numbers, for Philox: on any mesh the same weights are dropped.
            dropout = jnp.concatenate([seed_words, not_none(rows.numbers)])
            options |= {"dropout": dropout, "q_index": rows.indices}
        if rows.slopes is not None or rows.seed is not None:
            options["k_at"] = columns.positions
        if (tiles := self._predicate_tiles) is not None:
            options |= {"bits": self._tile_bits, "tiles": tiles.which}
        return {name: array for name, array in options.items() if array is not None}

    @cached_property
    def _tile_bits(self) -> Array:
        """The predicate's partial tiles, in words of 32 bits: one constant for all kernels."""
        return jnp.asarray(not_none(self._predicate_tiles).bits.view(np.int32))

    @cached_property
    def _predicate_tiles(self) -> PredicateTiles | None:
        """The tiles of this step's predicate; ``None`` without a predicate."""
        kinds, geometry = self.work.kinds, self.call.plan.blocks
        if kinds is None or geometry is None:
            return None
        bits, index = not_none(geometry.tiles)  # others are refused before
        # The plan has an index for each pair of ranks; which pair this is, is known on the device.
        which = jnp.asarray(index)[self.work.q_rank, self.work.kv_rank]
        which = jnp.where(kinds == PARTIAL, which, jnp.where(kinds == FULL, -1, -2))
        return PredicateTiles(bits, which.astype(jnp.int32))


@lru_cache(maxsize=64)
def _positions_aligned8(plan: Plan) -> bool:
    """Return True if :func:`positions_aligned8` holds for the keys of every rank."""
    return all(positions_aligned8(plan.k_positions(rank)) for rank in range(plan.cp_size))
