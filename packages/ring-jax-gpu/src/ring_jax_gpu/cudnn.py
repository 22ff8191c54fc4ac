"""``cudnn``: cuDNN's attention, for what it does faster than the kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, cast

import jax.numpy as jnp
from jax import lax

from ring_core import Capabilities, KernelConfig, RingProgram
from ring_core.base.arguments import not_none
from ring_jax.collectives import Ranks
from ring_jax.kernels import compute_capability
from ring_jax.rank_view import remote_table, step_table
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    Grads,
    Item,
    ItemTable,
    KeyBlock,
    LocalShape,
    Pass,
    QueryBlock,
    Static,
)
from ring_jax.strategies.steps import merge
from ring_jax_gpu import fmha
from ring_jax_gpu.head_dims import HeadDims, wide

_HOPPER, _AMPERE = 90, 80
_MULTIPLE = 8  # of head dims
_MIXED = HeadDims(192, 128)  # the only ones that its backward takes unequal
_MIXED_FROM = 91000  # of cuDNN
_FAR = 256.0  # of a shift
_LEAST = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}  # -inf in a bias; it may subtract two


class Tile(NamedTuple):
    """What cuDNN does at once: all queries see all keys, or it is a causal square."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    window: int | None  # the last keys that a query sees, its own included

    @classmethod
    def of(cls, item: Item) -> Tile | None:
        """``None`` if it cannot do an item."""
        _, _, q_start, q_stop, k_start, k_stop = item.rectangle
        lo, hi, (many, keys) = item.lo, item.hi, (q_stop - q_start, k_stop - k_start)
        if lo <= 1 - keys and hi >= many - 1:
            return cls(q_start, q_stop, k_start, k_stop, causal=False, window=None)
        if lo != 0 or hi < 0 or many > keys:
            return None
        return cls(
            q_start, q_stop, k_start, k_start + many, causal=True,
            window=None if hi >= many - 1 else hi + 1,
        )  # fmt: skip

    def queries(self, x: Array) -> Array:
        """The rows of these queries, of ``[B, H, T, ...]``."""
        return x[:, :, self.q_start : self.q_stop]

    def bias(self, x: Array | None) -> Array | None:
        """What is added to its scores."""
        return None if x is None else self.queries(x)[..., self.k_start : self.k_stop]


@dataclass(frozen=True)
class CudnnKernel:
    """Takes calls whose ranks each have at most one rectangle a step, whole or a causal square.

    With a window to the left such a square may have one, without a bias. Head dims get zeros up to
    a multiple of 8, and where V's is another than that of Q and K up to the larger of the two, but
    for 192 and 128. A bias has to have the dtype of Q, K and V, and what is below -2**41 in it
    (float16: -2**15), less a row's shift, counts as this; rows of which it hides all are left out.
    The backward adds to dQ in an order that differs from run to run.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="cudnn", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        mixed_head_dims=True, bands="any", bias=True, exact_nan=False,
    )  # fmt: skip

    def refusals(
        self, direction: Pass, local: LocalShape, config: KernelConfig, program: RingProgram, /
    ) -> tuple[str, ...]:
        """What it has no kernel for, here."""
        del direction, config  # what it cannot do backward it is not asked to do forward
        return (*_refused_here(compute_capability(), local), *_refused_steps(local, program))

    def attend_into(
        self,
        static: Static,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Attend and merge into ``into``."""
        del work  # known when the call is traced
        return _for_own_tile(static, partial(_attend, static, rows, columns), into)

    def grads_into(
        self, static: Static, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Add the items' gradients to ``into``."""
        del work
        return _for_own_tile(static, partial(_differentiate, static, rows, columns, upstream), into)


def _refused_here(capability: int | None, local: LocalShape) -> Iterator[str]:
    """What jax, cuDNN or the GPU do not do; without a GPU at hand programs are for Hopper."""
    found = fmha.found_binding()
    if isinstance(found, str):
        yield found
    if capability is None:
        return
    if fmha.cudnn_version() is None:
        yield "cuDNN is not installed"
    if capability < _AMPERE:
        yield f"needs compute capability 8.0, not {capability / 10:.1f}"
    if capability != _HOPPER and (widest := max(local.head_dim, local.v_head_dim)) > 128:
        yield f"takes head dims up to 128, on Hopper up to 256, not {widest}"


def _refused_steps(local: LocalShape, program: RingProgram) -> Iterator[str]:
    gathers = len(local.k_lengths) > 1
    parts = [
        step_table(program, n) for n, x in enumerate(program.steps) if not (gathers and x.shift)
    ]
    parts += [not_none(remote_table(program))] if gathers else []
    if any(part.helpers for part in parts):
        yield "has no ranks that help each other (strategy 'balanced')"
        return
    items = [part.items for part in parts]
    tiles = [Tile.of(item) for some in items for item in some or ()]
    if None in items:
        yield "takes one rectangle a rank and step, and this plan has more"
    elif None in tiles:
        yield "takes whole rectangles and causal squares only, and this plan has others"
    if local.has_mask:
        yield "has no masks that are arrays"
    elif local.has_bias:
        known = [tile for tile in tiles if tile is not None]
        if local.bias_dtype != local.dtype:
            yield f"takes a bias in {local.dtype}, not {local.bias_dtype}"
        if any((x.q_stop - x.q_start) % 2 or (x.k_stop - x.k_start) % 2 for x in known):
            yield "takes a bias for even numbers of queries and keys only"
        if any(x.window for x in known):
            yield "has no window beside a bias"


def _for_own_tile[State: (AttentionState, Grads)](
    static: Static, run: Callable[[Tile, State], State], into: State
) -> State:
    """Run what this rank has to do; ranks that have the same share a program."""
    tiles = {item.rectangle.q_rank: Tile.of(item) for item in not_none(static.items)}
    of_ranks = [tiles.get(rank) for rank in range(static.plan.cp_size)]
    several = list(dict.fromkeys(of_ranks))
    runs = [(lambda x: x) if tile is None else partial(run, tile) for tile in several]
    if len(runs) == 1:
        return runs[0](into)
    which = jnp.asarray([several.index(tile) for tile in of_ranks], jnp.int32)
    rank = Ranks(static.axis_name, static.plan.cp_size).rank()
    return cast("State", lax.switch(which[rank], runs, into))


def _attend(
    static: Static, rows: QueryBlock, columns: KeyBlock, tile: Tile, into: AttentionState
) -> AttentionState:
    dims = HeadDims.of(static, columns)
    given, pattern = _given(static, rows, columns, tile)
    out, lse = fmha.attend(pattern, *given)
    lse = lse - _not_taken_off(rows, tile)
    hidden = _hidden(tile, rows.bias)
    if hidden is not None:
        lse, out = jnp.where(hidden, -jnp.inf, lse), jnp.where(hidden[..., None], 0, out)
    found = AttentionState(out[..., : dims.v].astype(static.wide), lse.astype(static.wide))
    if lse.shape == into.lse.shape and static.fresh:
        return found
    found = merge(AttentionState(tile.queries(into.out), tile.queries(into.lse)), found)
    return AttentionState(*(
        lax.dynamic_update_slice_in_dim(x, y, tile.q_start, axis=2)
        for x, y in zip(into, found, strict=True)
    ))  # fmt: skip


def _differentiate(
    static: Static,
    rows: QueryBlock,
    columns: KeyBlock,
    upstream: BackwardInputs,
    tile: Tile,
    into: Grads,
) -> Grads:
    dims = HeadDims.of(static, columns)
    given, pattern = _given(static, rows, columns, tile)
    lse, out, dout = map(tile.queries, (upstream.lse, not_none(upstream.out), upstream.dout))
    lse = lse + _not_taken_off(rows, tile)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # nothing seen: probabilities are 0
    v_dim = given[2].shape[3]
    dq, dk, dv, dbias = fmha.differentiate(
        pattern, *given, lse.astype(jnp.float32), wide(out, v_dim), wide(dout, v_dim)
    )
    dkv = jnp.concatenate([dk[..., : dims.qk], dv[..., : dims.v]], axis=-1).astype(static.wide)
    if not (static.fresh and dkv.shape == into.dkv.shape):
        dkv = _add(into.dkv, dkv, (tile.k_start, 0))
    if into.dbias is not None and dbias is not None:
        into = into._replace(dbias=_add(into.dbias, dbias, (tile.q_start, tile.k_start)))
    return Grads(_add(into.dq, dq[..., : dims.qk], (tile.q_start, 0)), dkv, into.dbias)


def _given(
    static: Static, rows: QueryBlock, columns: KeyBlock, tile: Tile
) -> tuple[tuple[Array, Array, Array, Array | None], fmha.Pattern]:
    """What cuDNN takes of a tile: ``(q, k, v, bias)``, and what it is told of them."""
    dims = HeadDims.of(static, columns)
    k, v = dims.apart(columns.kv[:, :, tile.k_start : tile.k_stop])
    qk_dim, v_dim = _call_dims(dims)
    bias = tile.bias(rows.bias)
    if bias is not None:
        if (taken := _taken_off(rows, tile)) is not None:
            bias = (bias.astype(static.wide) - taken[..., None]).astype(bias.dtype)
        bias = jnp.maximum(bias, jnp.asarray(_LEAST[static.dtype], bias.dtype))
    pattern = fmha.Pattern(
        static.scale, tile.causal, tile.window, bias is not None and static.bias_grad
    )
    return (wide(tile.queries(rows.q), qk_dim), wide(k, qk_dim), wide(v, v_dim), bias), pattern


def _taken_off(rows: QueryBlock, tile: Tile) -> Array | None:
    """Return what is taken off the bias of a tile's rows, ``[B or 1, H or 1, n]``.

    That is the rows' shift where it is far from 0. What is left then keeps its digits in half
    precision: a number within twice the shift differs from it by one that the dtype holds, and
    others weigh nothing. Beside a smaller shift float32 holds ``lse``, and half precision would
    round what is left.
    """
    if rows.bias_shift is None:
        return None
    shift = tile.queries(rows.bias_shift)
    return jnp.where(jnp.abs(shift) < _FAR, 0, shift)


def _not_taken_off(rows: QueryBlock, tile: Tile) -> Array | float:
    """Return the rest of the rows' shift, by which ``lse`` here is larger than that of the call."""
    if rows.bias_shift is None:
        return 0.0
    shift = tile.queries(rows.bias_shift)
    return jnp.where(jnp.abs(shift) < _FAR, shift, 0)


def _call_dims(dims: HeadDims) -> HeadDims:
    version = fmha.cudnn_version()
    is_able = version is None or version >= _MIXED_FROM
    dims = HeadDims(*(-(-dim // _MULTIPLE) * _MULTIPLE for dim in dims))
    fits = dims.qk == dims.v or (dims == _MIXED and is_able)
    return dims if fits else HeadDims(max(dims), max(dims))


def _hidden(tile: Tile, bias: Array | None) -> Array | None:
    """The queries of which a bias hides all keys, ``[B or 1, H or 1, T]``."""
    bias = tile.bias(bias)
    if bias is None:
        return None
    shown = bias > -jnp.inf
    if tile.causal:
        i, j = (lax.broadcasted_iota(jnp.int32, shown.shape[2:], n) for n in (0, 1))
        shown &= (i >= j)[None, None]
    return ~shown.any(axis=-1)


def _add(into: Array, x: Array, start: tuple[int, int]) -> Array:
    """A part of the last two dimensions, added; all of them without reading and writing others."""
    x = x.astype(into.dtype)
    if x.shape == into.shape:
        return into + x
    at = (0, 0, *start)
    old = lax.slice(into, at, tuple(a + n for a, n in zip(at, x.shape, strict=True)))
    return lax.dynamic_update_slice(into, old + x, at)
