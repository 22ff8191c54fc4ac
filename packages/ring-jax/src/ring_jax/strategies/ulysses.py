"""Traded heads: ranks trade tokens for heads; each attends to all tokens with a part of the heads.

Two exchanges a pass, as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): in the forward
Q, K and V go from tokens to heads, and the output goes back; in the backward dout goes from tokens
to heads, and dQ, dK and dV go back. In between a call of one rank runs over all tokens in natural
order, so every layout will do. A :class:`ring_core.HeadPlan` says which heads a rank has.

Under ``hybrid`` groups of ranks trade, see :class:`ring_core.programs.grid.RankGrid`, and the inner
call is a ring or a gather over the ranks of other groups that have the same heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from ring_core import (
    ChunkLayout,
    HeadPlan,
    Layout,
    LayoutSpec,
    Request,
    RingProgram,
    StrategyConfig,
    StrategyName,
    UnsupportedError,
    ring_program,
)
from ring_core.choose.trading import (
    shared_bias_refusals,
    trade_automatic_refusals,
    trade_refusals,
)
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.programs.heads import PADDING
from ring_core.viz.text import figure, imbalance_line
from ring_jax.collectives import Ranks, permute
from ring_jax.records import (
    Array,
    AttentionState,
    BackwardInputs,
    CallSpec,
    Devices,
    Direction,
    Grads,
    Inputs,
    KVPayload,
    Trade,
    nbytes,
)
from ring_jax.strategies.gather import GATHER
from ring_jax.strategies.ring import RING
from ring_jax.strategies.steps import Strategy, add_sinks, to_bhtd

_INNER = {strategy.name: strategy for strategy in (RING, GATHER)}

#: Arrays to exchange, each with the layout of its tokens over the ranks.
Exchanged = tuple[Array, Layout]


class Traded(NamedTuple):
    """The inner call of a forward, kept for the backward, where only gradients travel.

    Exchanging Q, K and V once more would cost as much as the forward did.
    """

    inputs: Inputs  # by heads, sinks left out
    out: Array  # [B, T, H, Dv]
    lse: Array  # [B, H, T]
    last: KVPayload | None  # what the inner call keeps


@dataclass(frozen=True)
class HeadExchange:
    """Exchanges of a call: arrays of this device's tokens for those of its heads, and back.

    Attributes:
        call: The call.
        trade: Its trade.
        heads: Which heads each rank of the group attends with.
        ranks: The devices that trade.
    """

    call: CallSpec
    trade: Trade
    heads: HeadPlan
    ranks: Ranks

    @classmethod
    def of(cls, call: CallSpec) -> HeadExchange:
        """Make the exchanges of a call."""
        assert call.trade is not None
        ranks = Ranks(call.axis_name, call.trade.grid.ulysses_size)
        return cls(call, call.trade, call.trade.heads, ranks)

    def to_heads(self, *arrays: Exchanged) -> list[Array]:
        """Exchange ``[B, T_local, P * n, D]``, ``n`` heads for each rank, for ``[B, T, n, D]``."""
        return self._by_message(self._message_to_heads, arrays)

    def to_tokens(self, *arrays: Exchanged) -> list[Array]:
        """Exchange ``[B, T, n, D]`` for ``[B, T_local, P * n, D]``, the heads of all ranks."""
        return self._by_message(self._message_to_tokens, arrays)

    def _by_message(
        self, move: Callable[[Layout, Sequence[Array]], list[Array]], arrays: Sequence[Exchanged]
    ) -> list[Array]:
        """Exchange arrays, those that fit into one message in one."""
        kinds = [(layout, x.shape[0], x.dtype) for x, layout in arrays]
        moved: dict[int, Array] = {}
        for kind in dict.fromkeys(kinds):
            members = [n for n, other in enumerate(kinds) if other == kind]
            parts = move(kind[0], [arrays[n][0] for n in members])
            moved |= zip(members, parts, strict=True)
        return [moved[n] for n in range(len(arrays))]

    def _message_to_heads(self, layout: Layout, arrays: Sequence[Array]) -> list[Array]:
        size, (batch, length) = self.ranks.size, arrays[0].shape[:2]
        sizes = [(x.shape[2] // size, x.shape[3]) for x in arrays]
        # Side by side what goes to one rank: its heads of each array.
        parts = [
            x.reshape(batch, length, size, n * dim)
            for x, (n, dim) in zip(arrays, sizes, strict=True)
        ]
        received = self.ranks.trade(jnp.concatenate(parts, axis=3), 2, 1)[:, :, 0]
        return _parts(self.in_order(received, layout, 1), (batch, size * length), sizes)

    def _message_to_tokens(self, layout: Layout, arrays: Sequence[Array]) -> list[Array]:
        size, (batch, length) = self.ranks.size, arrays[0].shape[:2]
        sizes = [x.shape[2:] for x in arrays]
        message = jnp.concatenate([jax.lax.collapse(x, 2, 4) for x in arrays], axis=2)
        ranked = self.in_order(message, layout, 1, inverse=True)
        received = self.ranks.trade(ranked[:, :, None], 1, 2)
        return _parts(received, (batch, length // size, size), sizes)

    def in_order(self, x: Array, layout: Layout, dim: int, *, inverse: bool = False) -> Array:
        """Put tokens of the ranks that trade, one rank's behind the other's, in natural order.

        The inverse takes them from natural order.
        """
        size, grid = self.ranks.size, self.trade.grid
        names: Sequence[LayoutSpec] = [layout.name]
        if isinstance(layout.name, ChunkLayout) and grid.outer_size > 1:
            names = _chunks_of_groups(layout.name, grid)
        kinds = [*dict.fromkeys(names)]  # unlike groups may have chunks in unlike orders
        moves = [
            partial(permute, layout=Layout(name, x.shape[dim], size), dim=dim, inverse=not inverse)
            for name in kinds
        ]
        if len(moves) == 1:
            return moves[0](x)
        group = Ranks(self.call.axis_name, grid.outer_size, size).rank()
        numbers = np.array([kinds.index(name) for name in names], np.int32)
        return cast("Array", jax.lax.switch(jnp.asarray(numbers)[group], moves, x))

    def placed(self, x: Array, *, zero_padding: bool = False) -> Array:
        """Return ``[B, T, P * n, D]`` with a query head in each place, of ``[B, T, H, D]``."""
        heads = self.heads
        if _in_places(heads):
            return x
        taken = jnp.take(x, heads.q_filled.ravel(), axis=2)
        if not zero_padding:
            return taken
        return jnp.where((heads.q == PADDING).reshape(1, 1, -1, 1), 0, taken)

    def placed_keys(self, x: Array) -> Array:
        """Return ``[B, T, P * n, D]`` with a K/V head in each place, of ``[B, T, K, D]``."""
        heads = self.heads
        if heads.kv.size == len(heads.kv_slots):
            return x
        return jnp.take(x, heads.kv_filled.ravel(), axis=2)

    def without_padding(self, x: Array) -> Array:
        """Return ``[B, T, H, D]`` of the query heads, of those in all places."""
        heads = self.heads
        return x if _in_places(heads) else jnp.take(x, heads.q_slots, axis=2)

    def summed_copies(self, x: Array) -> Array:
        """Return ``[B, T, K, D]`` of the K/V heads: copies, in all places, are summed."""
        heads = self.heads
        if heads.kv.size == len(heads.kv_slots):
            return x
        copies = jnp.take(x, heads.kv_slots.ravel(), axis=2)
        return copies.reshape(*x.shape[:2], *heads.kv_slots.shape, x.shape[3]).sum(axis=3)

    def inputs(self, x: Inputs) -> Inputs:
        """Return the arrays of the inner call: all tokens of the group, and this rank's heads."""
        rows, columns = self.call.plan.q_layout, self.call.plan.k_layout
        q, k, v = self.to_heads(
            (self.placed(x.q), rows), (self.placed_keys(x.k), columns),
            (self.placed_keys(x.v), columns),
        )  # fmt: skip
        own = jnp.asarray(self.heads.q_filled)[self.ranks.rank()]
        sinks, slopes, numbers = x.sinks, x.slopes, x.numbers
        return Inputs(
            q, k, v, self._all_ids(x.q_ids, rows), self._all_ids(x.k_ids, columns),
            None if sinks is None else jnp.take(sinks, own, axis=0),
            None if x.bias is None else self._rows_to_heads(x.bias),
            None if slopes is None else jnp.take(slopes, own, axis=1), x.seed,
            # Dropout draws for the heads of the call, whatever rank has them.
            None if numbers is None else jnp.concatenate([numbers[:1], jnp.take(numbers[1:], own)]),
            bias_shift=None
            if x.bias_shift is None
            else self._rows_to_heads(x.bias_shift[..., None])[..., 0],
        )  # fmt: skip

    def bias_grad(self, grad: Array, bias: Array) -> Array:
        """Return the gradient of this rank's rows of a ``bias``.

        ``grad`` is that of all rows of the group, wide, and of this rank's heads.
        """
        rows = self.call.plan.q_layout
        if bias.shape[1] == 1:  # each rank has the part of its heads; they are summed wide
            return self.ranks.scatter(self.in_order(grad, rows, 2, inverse=True), 2)
        (own,) = self.to_tokens((grad.astype(bias.dtype).swapaxes(1, 2), rows))
        return self.without_padding(own).swapaxes(1, 2)

    def _rows_to_heads(self, x: Array) -> Array:
        """Exchange ``[B or 1, H or 1, T_local, n]`` for ``[B or 1, H_local or 1, T, n]``."""
        rows = self.call.plan.q_layout
        if x.shape[1] == 1:  # one for all heads: every rank gets all rows
            return self.in_order(self.ranks.gather(x, 2), rows, 2)
        (by_heads,) = self.to_heads((self.placed(x.swapaxes(1, 2)), rows))
        return by_heads.swapaxes(1, 2)

    def _all_ids(self, ids: Array | None, layout: Layout) -> Array | None:
        """Return the segment ids ``[B, T]`` of the group, in natural order."""
        return None if ids is None else self.in_order(self.ranks.gather(ids, 1), layout, 1)


def _in_places(heads: HeadPlan) -> bool:
    """Return True if query heads lie in their places already."""
    return bool(np.array_equal(heads.q_slots, np.arange(heads.q.size)))


def _parts(x: Array, lead: tuple[int, ...], sizes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Split a message along its last dimension into arrays ``[B, T, heads, D]``.

    ``lead`` are its other dimensions, of which the third, if there is one, is that of the ranks.
    """
    widths = [heads * dim for heads, dim in sizes]
    parts = jnp.split(x, np.cumsum(widths)[:-1].tolist(), axis=-1)
    ranks = lead[2] if len(lead) > 2 else 1
    return [
        part.reshape(*lead[:2], ranks * heads, dim)
        for part, (heads, dim) in zip(parts, sizes, strict=True)
    ]


def _chunks_of_groups(layout: ChunkLayout, grid: RankGrid) -> list[ChunkLayout]:
    """Return the chunks of each group's ranks, numbered within the group."""
    size = grid.ulysses_size
    groups = layout.table.reshape(grid.outer_size, -1)
    numbers = np.argsort(np.argsort(groups, axis=1), axis=1).reshape(grid.outer_size, size, -1)
    return [ChunkLayout(tuple(map(tuple, group))) for group in numbers.tolist()]


def _traded_forward(call: CallSpec, x: Inputs) -> tuple[AttentionState, Traded]:
    """Compute attention of this device's queries, with sinks.

    ``out`` is rounded to the inputs' dtype before it travels.
    """
    exchange, inner, rows = HeadExchange.of(call), call.inner, call.plan.q_layout
    # Ranks trade tokens for heads ...
    inputs = exchange.inputs(x)
    # ... each attends to the tokens of its group with its own heads ...
    state, last = _INNER[inner.strategy].forward(inner, inputs)
    if inputs.sinks is not None:
        state = add_sinks(inner, state, inputs.sinks)
    out, lse = state.out.swapaxes(1, 2).astype(x.q.dtype), state.lse
    # ... and results go back to the ranks that hold their tokens. Those of places without a head
    # are dropped there: messages have equal sizes.
    own_out, own_lse = map(
        exchange.without_padding,
        exchange.to_tokens((out, rows), (lse.swapaxes(1, 2)[..., None], rows)),
    )
    result = AttentionState(to_bhtd(own_out), own_lse[..., 0].swapaxes(1, 2))
    return result, Traded(inputs._replace(sinks=None), out, lse, last)


def _traded_backward(call: CallSpec, x: Inputs, upstream: BackwardInputs, traded: Traded) -> Grads:
    """Compute the gradients of this device's shards, heads first.

    Where they are whole, as no other rank adds to them, they are rounded before they travel.
    """
    exchange, inner, plan = HeadExchange.of(call), call.inner, call.plan
    # dout and delta go from tokens to heads; the others stayed since the forward. Places without a
    # head get zeros, so that they add to no gradient ...
    dout, delta = exchange.to_heads(
        *(
            (exchange.placed(part, zero_padding=True), plan.q_layout)
            for part in (upstream.dout.swapaxes(1, 2), upstream.delta.swapaxes(1, 2)[..., None])
        )
    )
    by_heads = BackwardInputs(
        to_bhtd(dout), traded.lse, delta[..., 0].swapaxes(1, 2), to_bhtd(traded.out)
    )
    # ... the backward of all tokens runs for this rank's heads ...
    grads = _INNER[inner.strategy].backward(inner, traded.inputs, by_heads, traded.last)
    # ... and gradients go back to the ranks that hold their tokens, those of copied K/V heads wide:
    # they are summed there.
    kv_dtype = x.k.dtype if exchange.heads.copies == 1 else call.wide
    dq, dkv = exchange.to_tokens(
        (grads.dq.swapaxes(1, 2).astype(x.q.dtype), plan.q_layout),
        (grads.dkv.swapaxes(1, 2).astype(kv_dtype), plan.k_layout),
    )
    dbias = grads.dbias
    if dbias is not None and x.bias is not None:
        dbias = exchange.bias_grad(dbias, x.bias)
    return Grads(to_bhtd(exchange.without_padding(dq)), to_bhtd(exchange.summed_copies(dkv)), dbias)


def _traded_sent(call: CallSpec, x: Inputs, direction: Direction) -> int:
    """Return the bytes that leave all ranks together in one pass, with places without a head."""
    exchange, inner, wide = HeadExchange.of(call), call.inner, np.dtype(call.wide).itemsize
    size, itemsize, heads = exchange.ranks.size, x.q.dtype.itemsize, exchange.heads
    (batch, q_len, _, dim), (_, k_len, _, v_dim) = x.q.shape, x.v.shape
    (_, q_places), (_, kv_places) = heads.q.shape, heads.kv.shape
    rows, columns = batch * q_len * q_places, batch * k_len * kv_places * (dim + v_dim)
    # To each other rank of the group: its heads of this rank's tokens, and what all ranks get.
    bias_rows = 0
    if x.bias is not None:
        places = 1 if x.bias.shape[1] == 1 else q_places
        bias_rows = x.bias.size // x.bias.shape[1] * places
    if direction == "forward":
        sent = rows * (dim + v_dim) * itemsize + columns * itemsize + rows * wide
        sent += nbytes(x.q_ids, x.k_ids)
        if x.bias is not None:
            sent += bias_rows * x.bias.dtype.itemsize
        if x.bias_shift is not None:
            shift = x.bias_shift
            places = 1 if shift.shape[1] == 1 else q_places
            sent += shift.size // shift.shape[1] * places * wide
    else:
        sent = rows * (dim + v_dim) * itemsize + rows * wide
        sent += columns * (itemsize if heads.copies == 1 else wide)
        if x.bias is not None and call.bias_grad:
            sent += bias_rows * (wide if x.bias.shape[1] == 1 else x.bias.dtype.itemsize)
    # Rings, or gathers, of the inner call run side by side: one for each rank of a group.
    between = _INNER[inner.strategy].sent(inner, _shapes_inside(x, size, heads), direction)
    return call.plan.cp_size * (size - 1) * int(sent) + size * between


def _shapes_inside(x: Inputs, size: int, heads: HeadPlan) -> Inputs:
    """Return the inner call's queries, keys and ids by their shapes."""

    def struct(array: Array | None, places: int | None = None) -> Any:
        if array is None:
            return None
        batch, length, *rest = array.shape
        shape = (batch, size * length, *([] if places is None else [places, rest[1]]))
        return jax.ShapeDtypeStruct(shape, array.dtype)

    (_, q_places), (_, kv_places) = heads.q.shape, heads.kv.shape
    return Inputs(
        struct(x.q, q_places), struct(x.k, kv_places), struct(x.v, kv_places), struct(x.q_ids),
        struct(x.k_ids), *[None] * 5,
    )  # fmt: skip


def _figures(call: CallSpec) -> list[str]:
    """Return how even the work is, who trades, how heads are placed, and what groups send."""
    exchange, inner = HeadExchange.of(call), call.inner
    grid, placing = exchange.trade.grid, exchange.heads.describe()
    trade = f"tokens for heads among {grid.ulysses_size} devices, and back, in each pass"
    lines = [figure("exchanges", trade), *([figure("heads", placing)] if placing else ())]
    if grid.outer_size == 1:
        return [imbalance_line(inner.program), *lines]
    between = f"{inner.strategy} over {grid.outer_size} groups of {grid.ulysses_size} devices:"
    return [*lines, figure("between groups", between), *_INNER[inner.strategy].figures(inner)]


def _trade_of_all(
    _config: StrategyConfig, program: RingProgram, request: Request, _devices: Devices
) -> Trade:
    """Return the trade of all ranks along the axis."""
    grid = RankGrid(program.plan.cp_size, program.plan.cp_size)
    return _trade(grid, program, request, "ring")


def _trade(grid: RankGrid, program: RingProgram, request: Request, strategy: StrategyName) -> Trade:
    inner = ring_program(grid.outer_plan(program.plan))
    return Trade(grid, (request.q_heads, request.kv_heads), inner, strategy)


def _trade_of_groups(
    config: StrategyConfig, program: RingProgram, request: Request, devices: Devices
) -> Trade:
    """Return the trade of groups of ranks.

    Raises:
        UnsupportedError: The ranks make no such groups, or a bias or ``outer`` cannot go with them.
    """
    ranks, outer = program.plan.cp_size, config.outer
    if config.ulysses_size is None and not devices.in_one_process:
        raise UnsupportedError(
            f"strategy {config.name!r} groups the devices of a host, and these are of several processes, "
            f"or of a mesh without devices. Instead: say how many devices split heads, by ulysses_size"
        )
    grid = rank_grid(
        ranks, request.q_heads, program.plan.q_layout.name, outer=outer,
        ulysses_size=config.ulysses_size,
    )  # fmt: skip
    trade = _trade(grid, program, request, "ring" if grid.outer_size == 1 else outer)
    reasons = [
        *shared_bias_refusals(request, grid.ulysses_size),
        *(f"outer={outer!r}: {x}" for x in _INNER[trade.strategy].refusals(trade.program, request)),
    ]
    if reasons:
        raise UnsupportedError(
            f"strategy {config.name!r}: {'; '.join(reasons)}. Instead: use outer='ring', or "
            f"strategy='ring'"
        )
    return trade


def _automatic_refusals(
    program: RingProgram, request: Request, devices: Devices
) -> tuple[str, ...]:
    """Return why ``auto`` does not trade heads."""
    if program.plan.cp_size == 1:
        return ("on one device nothing travels",)
    if devices.platform != "gpu":
        return (f"it was not measured on {devices.platform}",)
    if not devices.in_one_process:
        return ("between processes, which may be on other hosts, no kernel hides its transfers",)
    return trade_automatic_refusals(program.plan, request)


ULYSSES = Strategy(
    "ulysses",
    _traded_forward,
    _traded_backward,
    lambda program, request: trade_refusals(program.plan, request),
    RING.key_lengths,
    launches=RING.launches,
    sent=_traded_sent,
    figures=_figures,
    automatic_refusals=_automatic_refusals,
    trade=_trade_of_all,
    adds_sinks=True,
)
# The same exchanges within groups of ranks, and another inner call.
HYBRID = ULYSSES._replace(name="hybrid", refusals=lambda *_: (), trade=_trade_of_groups)
