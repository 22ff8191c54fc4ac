"""Simulated ranks: their shards, their accumulators, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Floats
from ring_core.layouts.layout import Layout
from ring_core.plan.item import WorkItem
from ring_core.plan.plan import Plan
from ring_core.reference import item_kernel
from ring_core.reference.dense import bias_shift, visible_pairs, with_padding
from ring_core.reference.inputs import Inputs
from ring_core.reference.item_kernel import Precision, QueryRows, Side


class Message(NamedTuple):
    """The keys and values of one rank, on their way round the ring."""

    owner: int
    k: Floats
    v: Floats
    side: Side

    def keys_of(self, item: WorkItem) -> tuple[Floats, Floats, Side]:
        """Return the keys and values of an item, with their indices and segment ids."""
        part = item.k_slice
        return self.k[:, part], self.v[:, part], self.side.take(part)


class Grad(NamedTuple):
    """The dK/dV of one rank's keys, which travel one stage behind the K/V they belong to."""

    owner: int
    dk: Floats
    dv: Floats


@dataclass
class Rank:
    """The tensors that one rank holds. ``out`` and ``lse`` are merged in place."""

    q: Floats
    rows: QueryRows
    own: Message
    out: Floats
    lse: Floats
    dout: Floats | None = None
    delta: Floats | None = None
    dq: Floats | None = None
    dbias: Floats | None = None

    def queries_of(self, item: WorkItem) -> tuple[Floats, QueryRows]:
        """Return the query rows of an item, with their positions, bias and slopes."""
        return self.q[:, item.q_slice], self.rows.take(item.q_slice)


def ranks_of(plan: Plan, inputs: Inputs, precision: Precision) -> list[Rank]:
    """Give every rank its shards, rounded, and results that hold nothing yet."""
    # Padding holds NaN, which would show in the results if anything saw it.
    q_layout, k_layout = plan.q_layout, plan.k_layout
    q, k, v = (
        _padded(item_kernel.round_to(x, precision), layout, axis=1, fill=np.nan)
        for x, layout in ((inputs.q, q_layout), (inputs.k, k_layout), (inputs.v, k_layout))
    )
    bias_rows, slopes = (
        None if x is None else item_kernel.round_to(x, precision)
        for x in (inputs.bias, inputs.slopes)
    )
    q_ids, k_ids = (
        None if x is None else _padded(x, layout, axis=1, fill=0)
        for x, layout in ((inputs.q_ids, q_layout), (inputs.k_ids, k_layout))
    )
    rounded = inputs._replace(bias=bias_rows)
    shift = bias_shift(rounded, visible_pairs(rounded, plan.mask))
    bias_rows, shift = (
        None if x is None else _padded(x, q_layout, axis=2, fill=0) for x in (bias_rows, shift)
    )
    ranks = []
    for r in range(plan.cp_size):
        queries, keys = plan.positions(r), plan.k_positions(r)
        q_side = Side(queries, plan.q_positions(r), None if q_ids is None else q_ids[:, queries])
        k_side = Side(keys, keys, None if k_ids is None else k_ids[:, keys])
        bias, row_shift = (None if x is None else x[:, :, queries] for x in (bias_rows, shift))
        rows = QueryRows(q_side, bias, row_shift, slopes)
        batch, _, heads, _ = q.shape
        # The identity of merging: no output, and a softmax denominator of 0.
        out = np.zeros((batch, queries.size, heads, v.shape[3]), q.dtype)
        lse = np.full((batch, heads, queries.size), -np.inf, q.dtype)
        own = Message(r, k[:, keys], v[:, keys], k_side)
        ranks.append(Rank(q[:, queries], rows, own, out, lse))
    return ranks


def start_backward(
    plan: Plan,
    ranks: list[Rank],
    dout: Floats,
    dlse: Floats | None,
    precision: Precision,
) -> None:
    """Compute ``delta = rowsum(dout * out) - dlse`` once, from the final output; zero dQ."""
    dout = _padded(dout, plan.q_layout, axis=1, fill=0)
    dlse = None if dlse is None else _padded(dlse, plan.q_layout, axis=2, fill=0)
    for r, rank in enumerate(ranks):
        queries = plan.positions(r)
        rank.dout = item_kernel.round_to(dout[:, queries], precision)
        # With the final output, so a block of keys needs no partial result of another in the
        # backward.
        rank.delta = (rank.dout * rank.out).sum(axis=-1).swapaxes(1, 2)
        if dlse is not None:
            rank.delta = rank.delta - dlse.astype(rank.delta.dtype)[:, :, queries]
        rank.dq = np.zeros_like(rank.q)
        rank.dbias = None if rank.rows.bias is None else np.zeros_like(rank.rows.bias)


def zero_grad(message: Message) -> Grad:
    """Return zero gradients of some keys and values."""
    return Grad(message.owner, np.zeros_like(message.k), np.zeros_like(message.v))


def _padded(x: npt.NDArray[Any], layout: Layout, *, axis: int, fill: float) -> npt.NDArray[Any]:
    """Return a global array with the padding of a layout behind its tokens."""
    return with_padding(x, axis, layout.padded_len - layout.seq_len, fill)


def join_shards(layout: Layout, parts: Sequence[Floats], axis: int) -> Floats:
    """Put the ranks' local arrays back into one global array, along ``axis``, without padding."""
    order = np.concatenate([layout.positions(r) for r in range(len(parts))])
    # Padding has the largest positions, so it is cut off behind.
    tokens = np.argsort(order)[: layout.seq_len]
    return np.take(np.concatenate(parts, axis=axis), tokens, axis=axis)
