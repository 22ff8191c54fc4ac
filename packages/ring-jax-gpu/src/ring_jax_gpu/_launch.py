"""From what the loop hands over to what a Triton kernel takes, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax

from ring_core import TABLE_COLUMNS, UnsupportedError
from ring_core.philox import dropout_threshold
from ring_jax._types import Array, Columns, Result, Rows, Static, Upstream, Work
from ring_jax_gpu._blocks import Blocks, Pass, choose_blocks, padded
from ring_jax_gpu._call import Launch, run
from ring_jax_gpu._visits import (
    FULL,
    PARTIAL,
    block_kinds,
    by_columns,
    by_rows,
    in_documents,
    item_bounds,
)

Arrays = dict[str, Array]

# Heads take turns as long as what they read is no more than this: keys and values of blocks of
# queries, queries of blocks of keys. Measured on an H200.
_KEYS_TOGETHER = 16 * 2**20
_QUERIES_TOGETHER = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Call:
    """A step's work for the kernels."""

    static: Static
    rows: Rows
    columns: Columns
    work: Work

    def attend(self, into: Result) -> Result:
        """Merge what the queries see into a result."""
        blocks = self._choose("attend")
        changed = self._run("attend", blocks, {"out": into.out, "lse": into.lse})
        return Result(changed["out"], changed["lse"])

    def add_to_queries(self, upstream: Upstream, dq: Array) -> Array:
        """Add the gradient of the queries."""
        blocks = self._choose("add_to_queries")
        return self._run("add_to_queries", blocks, {"dq": dq}, upstream)["dq"]

    def add_to_keys(self, upstream: Upstream, dkv: Array) -> Array:
        """Add the gradients of keys and values."""
        blocks = self._choose("add_to_keys")
        return self._run("add_to_keys", blocks, {"dkv": dkv}, upstream)["dkv"]

    def add_to_all(self, upstream: Upstream, dq: Array, dkv: Array) -> tuple[Array, Array]:
        """Both at once."""
        blocks = self._choose("add_to_all")
        changed = self._run("add_to_keys", blocks, {"dq": dq, "dkv": dkv}, upstream, fused=True)
        return changed["dq"], changed["dkv"]

    def add_to_bias(self, upstream: Upstream, dbias: Array) -> Array:
        """Add the gradient of the bias."""
        blocks = self._choose("add_to_bias")
        return self._run("add_to_bias", blocks, {"dbias": dbias}, upstream)["dbias"]

    def _choose(self, name: Pass) -> Blocks:
        widest = max(self.static.head_dim, self._v_dim)
        rows, has_tiles = self.rows, self.work.kinds is not None
        crowded = rows.bias is not None or rows.seed is not None or has_tiles
        return choose_blocks(
            self.static.config, name, widest, rows.q.dtype.itemsize, crowded=crowded
        )

    def _run(
        self, kernel: str, blocks: Blocks, changed: Arrays, upstream: Upstream | None = None, *,
        fused: bool = False,
    ) -> Arrays:  # fmt: skip
        """Launch a kernel and return what it changed."""
        goes_by_rows = kernel != "add_to_keys"
        given = {"q": self.rows.q, "kv": self.columns.kv, **self._marks(), **self._options()}
        given |= {} if upstream is None else upstream._asdict()
        given["items"] = item_bounds(self.work)
        if self._has_documents:
            assert self.rows.cells is not None and self.columns.cells is not None
            sides = (self.rows.cells, self.columns.cells)
            given["cells"] = in_documents(*(sides if goes_by_rows else sides[::-1]))
        is_listed = self.work.kinds is not None or self.rows.ids is not None
        numbers = self._numbers
        if kernel != "add_to_bias":
            numbers["visits_batch"] = 0
        if is_listed and kernel != "add_to_bias":
            kinds = block_kinds(self.rows, self.columns, self.work, blocks.q, blocks.k)
            if self.rows.bias is not None:  # every block needs its mask
                kinds = jnp.where(kinds == FULL, PARTIAL, kinds)
            given["visits"], given["counts"] = (by_rows if goes_by_rows else by_columns)(kinds)
            many, outer, inner = given["visits"].shape
            numbers["visits_batch"] = outer * inner if many > 1 else 0
        facts = {
            "LISTED": is_listed or kernel == "add_to_bias", "FUSED": fused,
            **self._facts, **self._sizes(blocks),
        }  # fmt: skip
        batch, heads, q_len = self.rows.q.shape[:3]
        _, kv_heads, k_len, _ = self.columns.kv.shape
        across, down = -(-k_len // blocks.k), -(-q_len // blocks.q)
        if kernel == "add_to_bias":
            shape = changed["dbias"].shape
            numbers |= {
                "shared_batch": batch // shape[0], "shared_heads": heads // shape[1],
                "bias_heads": shape[1],
            }  # fmt: skip
            grid = (across, down, shape[0] * shape[1])
        else:
            numbers["together"] = self._together(goes_by_rows)
            many = down * batch * heads if goes_by_rows else across * batch * kv_heads
            grid = (many, 1, 1)
        launch = Launch(
            kernel, tuple(numbers.items()), tuple(facts.items()), grid, blocks.warps, blocks.stages
        )
        return run(launch, given, changed)

    def _together(self, goes_by_rows: bool) -> int:
        """How many heads take turns; of queries, those that share keys always do."""
        batch, heads, q_len, head_dim = self.rows.q.shape
        kv_heads, k_len = self.columns.kv.shape[1:3]
        group = heads // kv_heads
        row = (head_dim + self._v_dim) * self.rows.q.dtype.itemsize
        if goes_by_rows:
            wanted = _KEYS_TOGETHER // max(1, k_len * row)
        else:
            wanted = _QUERIES_TOGETHER // max(1, q_len * group * row)
        many = batch * kv_heads
        together = max(n for n in range(1, many + 1) if n <= max(1, wanted) and many % n == 0)
        return together * group if goes_by_rows else together

    @property
    def _v_dim(self) -> int:
        return self.columns.kv.shape[3] - self.static.head_dim

    @property
    def _has_documents(self) -> bool:
        """Whether cells matter; the tiles of a predicate hold them already."""
        return self.rows.cells is not None and self.work.kinds is None

    @property
    def _numbers(self) -> dict[str, int]:
        """What the kernels compute with."""
        rows, columns = self.rows, self.columns
        batch, heads, q_len, _ = rows.q.shape
        k_len = columns.kv.shape[2]
        of_bias = (1, 1) if rows.bias is None else rows.bias.shape[:2]
        per_batch = rows.slopes is not None and rows.slopes.shape[0] == batch
        return {
            "q_len": q_len, "k_len": k_len, "heads": heads, "group": heads // columns.kv.shape[1],
            "slopes_batch": heads if per_batch else 0,
            "bias_batch": of_bias[1] * q_len * k_len if of_bias[0] > 1 else 0,
            "bias_head": q_len * k_len if of_bias[1] > 1 else 0,
        }  # fmt: skip

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What the kernels are compiled for, but for sizes."""
        static = self.static
        return {
            "D": static.head_dim, "DV": self._v_dim, "PADDED": padded(static.head_dim),
            "PADDED_V": padded(self._v_dim), "ITEMS": self.work.items.shape[0],
            "ALL_PARTIAL": self.rows.bias is not None, "SCALE": static.scale,
            "SOFTCAP": static.softcap,
            "DROPPED": dropout_threshold(static.dropout_p) if static.dropout_p > 0 else None,
        }  # fmt: skip

    def _sizes(self, blocks: Blocks) -> dict[str, Any]:
        return {
            "BLOCK_Q": blocks.q, "BLOCK_K": blocks.k,
            "EVEN_Q": self.rows.q.shape[2] % blocks.q == 0,
            "EVEN_K": self.columns.kv.shape[2] % blocks.k == 0,
        }  # fmt: skip

    def _marks(self) -> Arrays:
        """Numbers of tokens, those that the call needs."""
        rows, columns = self.rows, self.columns
        marks: dict[str, Array | None] = {"q_ids": rows.ids, "k_ids": columns.ids}
        if rows.slopes is not None:
            marks["q_at"] = rows.positions
        if rows.seed is not None:
            marks["q_index"] = rows.indices
        if rows.slopes is not None or rows.seed is not None:
            marks["k_at"] = columns.positions
        return {name: array for name, array in marks.items() if array is not None}

    def _options(self) -> Arrays:
        """The arrays of options."""
        rows, options = self.rows, {}
        if rows.bias is not None:
            options["bias"] = rows.bias
        if rows.slopes is not None:
            options["slopes"] = rows.slopes.astype(jnp.float32)
        if rows.seed is not None and rows.offsets is not None:
            words = lax.bitcast_convert_type(rows.seed, jnp.int32)
            options["dropout"] = jnp.concatenate([words, rows.offsets])
        return options | (self._tiles() if self.work.kinds is not None else {})

    def _tiles(self) -> Arrays:
        """The tiles of a predicate, each once, and which of them lies where.

        Raises:
            UnsupportedError: They take more memory than they may.
        """
        geometry = self.static.plan.blocks
        assert geometry is not None and self.work.kinds is not None
        if geometry.tiles is None:
            raise UnsupportedError(
                "kernel 'triton': the partial tiles of this predicate take more than 64 MiB. "
                "Instead: use kernel='xla', which evaluates the predicate block by block"
            )
        bits, index = geometry.tiles
        # Rows of the table that hold nothing come last: the first one says whose tiles these are.
        ranks = [self.work.items[0, TABLE_COLUMNS.index(name)] for name in ("q_rank", "kv_rank")]
        which = jnp.asarray(index)[ranks[0], ranks[1]]
        kinds = self.work.kinds
        which = jnp.where(kinds == PARTIAL, which, jnp.where(kinds == FULL, -1, -2))
        return {"bits": jnp.asarray(bits), "tiles": which.astype(jnp.int32)}
