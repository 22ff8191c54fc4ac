"""``cudnn``: cuDNN's attention, for calls that it computes faster than the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, cast

import jax.numpy as jnp
from jax import lax

from ring_core import Capabilities, KernelConfig, Mask, Request, RingProgram
from ring_core.base.arguments import not_none
from ring_jax.kernels import compute_capability
from ring_jax.rank_view import Launches, remote_table, step_table
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    CallSpec,
    Direction,
    Grads,
    Item,
    ItemTable,
    Kernel,
    KeyBlock,
    LaunchSpec,
    LocalShape,
    QueryBlock,
)
from ring_jax.strategies.steps import merge
from ring_jax_gpu import fmha
from ring_jax_gpu.head_dims import HeadDims, pad_dim

_HOPPER, _AMPERE = 90, 80
_DIM_MULTIPLE = 8  # head dims must be a multiple of it
_MIXED_DIMS = HeadDims(192, 128)  # the only unequal head dims of its backward
_MIXED_DIMS_VERSION = 91000  # first cuDNN with these
_LARGE_SHIFT = 256.0  # from here on the shift of a bias is subtracted from the bias
# Values for -inf in a bias; cuDNN may subtract two of them.
_MIN_BIAS = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}


class Tile(NamedTuple):
    """The scores of one cuDNN call: a full rectangle, or a causal square."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    window: int | None  # number of keys that a query sees, its own included

    @classmethod
    def of(cls, item: Item[int]) -> Tile | None:
        """Return the tile of a work item; ``None`` if it has another shape."""
        q_start, q_stop, k_start, k_stop, lo, hi = item
        queries, keys = q_stop - q_start, k_stop - k_start
        if lo <= 1 - keys and hi >= queries - 1:
            return cls(q_start, q_stop, k_start, k_stop, causal=False, window=None)
        if lo != 0 or hi < 0 or queries > keys:
            return None
        # Keys after the last query are not seen.
        return cls(
            q_start, q_stop, k_start, k_start + queries, causal=True,
            window=None if hi >= queries - 1 else hi + 1,
        )  # fmt: skip

    def queries(self, x: Array) -> Array:
        """Slice the rows of the tile's queries out of ``[B, H, T, ...]``."""
        return x[:, :, self.q_start : self.q_stop]

    def bias(self, x: Array | None) -> Array | None:
        """Slice the tile's bias out of ``[B or 1, H or 1, T, S]``."""
        return None if x is None else self.queries(x)[..., self.k_start : self.k_stop]


@dataclass(frozen=True)
class CudnnKernel(Kernel):
    """cuDNN's attention, for calls in which each rank has at most one item a step.

    The item must be a full rectangle, or a causal square, which may have a window to the left if
    there is no bias. Head dims are padded with zeros to a multiple of 8, and unequal ones to the
    larger of the two, except 192 and 128. A bias must have the dtype of Q, K and V, and items then
    even numbers of queries and keys. Less a row's shift, values below -2**41 in it (float16:
    -2**15) are raised to that; rows that it hides entirely get zeros. The backward adds to dQ in an
    order that differs from run to run.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        name="cudnn", devices=("cuda",), dtypes=("bfloat16", "float16"), max_head_dim=256,
        mixed_head_dims=True, bands="any", bias=True, exact_nan=False,
    )  # fmt: skip

    def refusals(
        self, direction: Direction, local: LocalShape, config: KernelConfig, program: RingProgram, /
    ) -> tuple[str, ...]:
        """Return why cuDNN, jax or the GPU cannot do a call, forward or backward."""
        del direction, config  # a call whose backward it cannot do is refused as a whole
        return (*_refused_here(compute_capability(), local), *_refused_steps(local, program))

    def leads(self, capability: int, request: Request, mask: Mask, /) -> bool:
        """Return True for calls that it computes faster than Triton's kernels.

        On an H200, forward + backward (``benchmarks/results/jax-options-h200.json``), these have
        head dims above 128, or up to 64 without a window, or a bias. Elsewhere nothing was timed.
        """
        dim = max(request.head_dim, request.v_head_dim)
        is_faster = dim > 128 or request.bias or (dim <= 64 and mask.window is None)
        return capability // 10 == _HOPPER // 10 and is_faster

    def attend_into(
        self,
        spec: LaunchSpec,
        rows: QueryBlock,
        columns: KeyBlock,
        work: ItemTable,
        into: AttentionState,
    ) -> AttentionState:
        """Return ``into`` merged with the attention of the work item."""
        return _for_own_tile(spec, work, partial(_attend, spec, rows, columns), into)

    def grads_into(
        self, spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, upstream: BackwardInputs, work: ItemTable,
        into: Grads,
    ) -> Grads:  # fmt: skip
        """Return ``into`` plus the gradients of the work item."""
        run = partial(_differentiate, spec, rows, columns, upstream)
        return _for_own_tile(spec, work, run, into)


def _refused_here(capability: int | None, local: LocalShape) -> Iterator[str]:
    """Yield the reasons for which the installed jax or cuDNN, or the GPU, cannot run a call.

    ``capability`` is the GPU's compute capability; ``None`` without a GPU: then programs are
    compiled for Hopper.
    """
    binding = fmha.found_binding()
    if isinstance(binding, str):
        yield binding
    if capability is None:
        return
    if fmha.cudnn_version() is None:
        yield "cuDNN is not installed"
    if capability < _AMPERE:
        yield f"needs compute capability 8.0, not {capability / 10:.1f}"
    if capability != _HOPPER and (widest := max(local.head_dim, local.v_head_dim)) > 128:
        yield f"takes head dims up to 128, on Hopper up to 256, not {widest}"


def _refused_steps(local: LocalShape, program: RingProgram) -> Iterator[str]:
    """Yield why a program's work items, array mask or bias do not fit cuDNN."""
    gathers = len(local.k_lengths) > 1
    parts = [
        step_table(program, n) for n, x in enumerate(program.steps) if not (gathers and x.shift)
    ]
    parts += [not_none(remote_table(program))] if gathers else []
    if any(part.helpers for part in parts):
        yield "has no ranks that help each other (strategy 'balanced')"
        return
    items = [Launches.of(part).items for part in parts if part.own.size]
    tiles = [Tile.of(x) for some in items for x in some or () if not x.is_empty]
    if None in items:
        yield "takes one rectangle a rank and step, and this plan has more"
    elif None in tiles:
        yield "takes whole rectangles and causal squares only, and this plan has others"
    if local.has_mask:
        yield "has no masks that are arrays"
    elif local.has_bias:
        fitting = [tile for tile in tiles if tile is not None]
        if local.bias_dtype != local.dtype:
            yield f"takes a bias in {local.dtype}, not {local.bias_dtype}"
        if any((x.q_stop - x.q_start) % 2 or (x.k_stop - x.k_start) % 2 for x in fitting):
            yield "takes a bias for even numbers of queries and keys only"
        if any(x.window for x in fitting):
            yield "has no window beside a bias"


def _for_own_tile[State: (AttentionState, Grads)](
    spec: LaunchSpec, work: ItemTable, run: Callable[[Tile, State], State], into: State
) -> State:
    """Run a function on this rank's tile; a rank without one returns ``into``.

    Which item is this rank's is known on the device only, so there is a branch for each distinct
    tile.
    """
    tiles = [None if item.is_empty else Tile.of(item) for item in not_none(spec.items)]
    distinct = list(dict.fromkeys(tiles))
    branches = [(lambda x: x) if tile is None else partial(run, tile) for tile in distinct]
    if len(branches) == 1:
        return branches[0](into)
    branch_of_item = jnp.asarray([distinct.index(tile) for tile in tiles], jnp.int32)
    return cast("State", lax.switch(branch_of_item[not_none(work.number)], branches, into))


def _attend(
    spec: LaunchSpec, rows: QueryBlock, columns: KeyBlock, tile: Tile, into: AttentionState
) -> AttentionState:
    """Merge the attention of one tile into ``into``, or return it alone if that may be replaced."""
    dims, wide = HeadDims.of(spec.call, columns), spec.call.wide
    operands, pattern = _fmha_operands(spec.call, rows, columns, tile)
    out, lse = fmha.attend(pattern, *operands)
    lse = lse - _shift_in_lse(rows, tile)
    hidden = _hidden_rows(tile, rows.bias)
    if hidden is not None:
        lse, out = jnp.where(hidden, -jnp.inf, lse), jnp.where(hidden[..., None], 0, out)
    state = AttentionState(out[..., : dims.v].astype(wide), lse.astype(wide))
    if lse.shape == into.lse.shape and spec.overwrite:
        return state
    state = merge(AttentionState(tile.queries(into.out), tile.queries(into.lse)), state)
    return AttentionState(*(
        lax.dynamic_update_slice_in_dim(x, y, tile.q_start, axis=2)
        for x, y in zip(into, state, strict=True)
    ))  # fmt: skip


def _differentiate(
    spec: LaunchSpec,
    rows: QueryBlock,
    columns: KeyBlock,
    upstream: BackwardInputs,
    tile: Tile,
    into: Grads,
) -> Grads:
    """Add the gradients of one tile to ``into``; dK/dV replace it if they may."""
    dims = HeadDims.of(spec.call, columns)
    operands, pattern = _fmha_operands(spec.call, rows, columns, tile)
    lse, out, dout = map(tile.queries, (upstream.lse, not_none(upstream.out), upstream.dout))
    lse = lse + _shift_in_lse(rows, tile)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # rows that see nothing get probabilities of 0
    v_dim = operands[2].shape[3]
    dq, dk, dv, dbias = fmha.differentiate(
        pattern, *operands, lse.astype(jnp.float32), pad_dim(out, v_dim), pad_dim(dout, v_dim)
    )
    dkv = jnp.concatenate([dk[..., : dims.qk], dv[..., : dims.v]], axis=-1).astype(spec.call.wide)
    if not (spec.overwrite and dkv.shape == into.dkv.shape):
        dkv = _add(into.dkv, dkv, (tile.k_start, 0))
    if into.dbias is not None and dbias is not None:
        into = into._replace(dbias=_add(into.dbias, dbias, (tile.q_start, tile.k_start)))
    return Grads(_add(into.dq, dq[..., : dims.qk], (tile.q_start, 0)), dkv, into.dbias)


def _fmha_operands(
    call: CallSpec, rows: QueryBlock, columns: KeyBlock, tile: Tile
) -> tuple[tuple[Array, Array, Array, Array | None], fmha.Pattern]:
    """Return the arrays ``(q, k, v, bias)`` of a cuDNN call, padded, and its static parameters."""
    dims = HeadDims.of(call, columns)
    k, v = dims.split(columns.kv[:, :, tile.k_start : tile.k_stop])
    qk_dim, v_dim = _padded_dims(dims)
    bias = tile.bias(rows.bias)
    if bias is not None:
        if (shift := _shift_in_bias(rows, tile)) is not None:
            bias = (bias.astype(call.wide) - shift[..., None]).astype(bias.dtype)
        bias = jnp.maximum(bias, jnp.asarray(_MIN_BIAS[call.dtype], bias.dtype))
    pattern = fmha.Pattern(
        call.scale, tile.causal, tile.window, bias is not None and call.bias_grad
    )
    q = pad_dim(tile.queries(rows.q), qk_dim)
    return (q, pad_dim(k, qk_dim), pad_dim(v, v_dim), bias), pattern


def _shift_in_bias(rows: QueryBlock, tile: Tile) -> Array | None:
    """Return the shift to subtract from the bias of a tile's rows, ``[B or 1, H or 1, n]``.

    That is the rows' shift where it is large, else 0. The difference then keeps its digits in half
    precision: a number within twice the shift differs from it by one that the dtype holds, and
    others have no weight. A smaller shift stays in ``lse``, which float32 holds, as half precision
    would round the difference.
    """
    if rows.bias_shift is None:
        return None
    shift = tile.queries(rows.bias_shift)
    return jnp.where(jnp.abs(shift) < _LARGE_SHIFT, 0, shift)


def _shift_in_lse(rows: QueryBlock, tile: Tile) -> Array | float:
    """Return the rest of the rows' shift, by which cuDNN's ``lse`` is larger than the call's."""
    if rows.bias_shift is None:
        return 0.0
    shift = tile.queries(rows.bias_shift)
    return jnp.where(jnp.abs(shift) < _LARGE_SHIFT, shift, 0)


def _padded_dims(dims: HeadDims) -> HeadDims:
    """Return the head dims to call cuDNN with."""
    version = fmha.cudnn_version()
    takes_mixed = version is None or version >= _MIXED_DIMS_VERSION
    dims = HeadDims(*(-(-dim // _DIM_MULTIPLE) * _DIM_MULTIPLE for dim in dims))
    fits = dims.qk == dims.v or (dims == _MIXED_DIMS and takes_mixed)
    return dims if fits else HeadDims(max(dims), max(dims))


def _hidden_rows(tile: Tile, bias: Array | None) -> Array | None:
    """Return which queries of a tile see no key because of the bias, ``[B or 1, H or 1, T]``."""
    bias = tile.bias(bias)
    if bias is None:
        return None
    shown = bias != -jnp.inf
    if tile.causal:
        i, j = (lax.broadcasted_iota(jnp.int32, shown.shape[2:], n) for n in (0, 1))
        shown &= (i >= j)[None, None]
    return ~shown.any(axis=-1)


def _add(into: Array, x: Array, start: tuple[int, int]) -> Array:
    """Add ``x`` to the part of ``into`` that begins at ``start`` in the last two dimensions."""
    x = x.astype(into.dtype)
    if x.shape == into.shape:
        return into + x
    start4 = (0, 0, *start)
    old = lax.slice(into, start4, tuple(a + n for a, n in zip(start4, x.shape, strict=True)))
    return lax.dynamic_update_slice(into, old + x, start4)
