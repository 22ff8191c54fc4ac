"""Strategy ``ulysses``: ranks trade tokens for heads; each attends to all tokens with its heads.

Two all-to-all exchanges a pass, as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509):
in the forward Q, K and V go from tokens to heads and the output goes back; in the backward dout
goes from tokens to heads, and dQ, dK and dV go back. Segment ids and a bias, with its shift and
gradient, take exchanges of their own. In between, a call of one rank runs over all tokens in order,
so every layout will do. A :class:`ring_core.HeadPlan` says which heads a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ring_core import HeadPlan, Plan, head_plan
from ring_core.base.arguments import not_none
from ring_core.choose.trading import trade_automatic_refusals, trade_refusals
from ring_core.programs.grid import RankGrid
from ring_core.programs.heads import PADDING
from ring_core.viz.text import imbalance_line
from ring_torch.buffers import HeadBuffer, HeadCarrier, Shapes
from ring_torch.call import Call, Saved, Strategy, StrategySpec, Traffic, attend
from ring_torch.capture import capture_safe_cache
from ring_torch.comm.ranks import Ranks
from ring_torch.records import AttentionState, BackwardInputs, Grads, Inputs
from ring_torch.strategies.head_layouts import ExchangeLayouts, head_exchanges

_META = torch.device("meta")


@dataclass(frozen=True)
class Ulysses(Strategy):
    """Strategy ``ulysses``: an inner call of one rank computes all tokens of this rank's heads.

    The forward saves the inputs and results of that inner call, and what it saves itself, so the
    backward exchanges only dout, delta and gradients.
    """

    inner: Call
    heads: HeadPlan
    grid: RankGrid
    members: Ranks | None = None  # ranks that trade tokens for heads; all if ``None``
    name: str = "ulysses"
    # Index tables of the exchanges, once a pass has run. `check_graph` keeps this strategy, and so
    # these, for CUDA graphs that read them.
    tables: list[Tables] = field(default_factory=list, compare=False)
    depends_on_kernel = True
    adds_sinks = True

    @classmethod
    def of(cls, call: Call, inner: Call | None, grid: RankGrid | None) -> Self:
        """Make the strategy of a rank from its inner call and the grid of the ranks."""
        request, ranks, grid, members = call.request, call.ranks, not_none(grid), None
        heads = head_plan(request.q_heads, request.kv_heads, grid.ulysses_size)
        if grid.outer_size > 1:
            # Messages of the trade name the ranks of the group, so several groups trade at once.
            members = ranks.part(grid.inner_ranks(ranks.rank))
        return cls(not_none(inner), heads, grid, members)

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)``; ``out`` is rounded to the inputs' dtype before it travels."""
        layouts = exchanges_of(call, inputs, self.heads)
        # The peers are found to make the same call before any of their tensors is used.
        carry = call.open_heads(call.forward_signature, layouts.most_bytes, self.members)
        tables = self.tables[0] if self.tables else self._make_tables(call)
        # Ranks trade tokens for heads. Nothing else is in flight: each exchange has buffers of its
        # own, and what follows on the stream waits for it ...
        q, k, v = carry.to_heads(
            layouts.qkv, tables.placed(*inputs[:3]), (tables.rows, tables.columns, tables.columns)
        )
        inner_inputs = tables.of_heads(inputs)._replace(q=q, k=k, v=v)
        if inputs.q_ids is not None or inputs.bias is not None:
            inner_inputs = _with_options(carry, layouts, tables, inputs, inner_inputs)
        # ... each attends to the whole sequence with its own heads, waiting for nobody ...
        (out, lse), inner_saved = attend(self._inner(call, tables), inner_inputs)
        out = out.to(call.dtype)
        # ... and results go back to the ranks that hold their tokens.
        own_out, own_lse = carry.to_tokens(
            layouts.results, (out, lse.transpose(1, 2).unsqueeze(-1)), (tables.rows, tables.rows)
        )
        saved: Saved = []
        if call.needs_grad:
            traded = inner_inputs._replace(sinks=None, alibi_slopes=None)
            # The backward needs them by heads again, and trading them once more would cost as much
            # as the forward.
            saved = [*[x for x in traded if x is not None], out, lse, *inner_saved]
        if tables.q_slots is not None:
            # Results of places without a head are dropped here, after the exchange: messages have
            # equal sizes.
            own_out, own_lse = (x.index_select(2, tables.q_slots) for x in (own_out, own_lse))
        return AttentionState(own_out, own_lse.squeeze(-1).transpose(1, 2)), saved

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """Return the gradients, in the inputs' dtype or wider.

        Where they are whole, as no other rank adds to them, they are rounded before they travel.
        """
        layouts = exchanges_of(call, inputs, self.heads)
        carry = call.open_heads(call.backward_signature, layouts.most_bytes, self.members)
        tables = self.tables[0] if self.tables else self._make_tables(call)
        # What the forward has exchanged and saved comes in the order of the inputs' fields.
        has_ids, has_bias = inputs.q_ids is not None, inputs.bias is not None
        is_there = {
            "q": True, "k": True, "v": True, "q_ids": has_ids, "k_ids": has_ids, "bias": has_bias,
            "bias_shift": call.params.shifts_bias,
        }  # fmt: skip
        traded: Any = {name: saved.pop(0) for name, is_saved in is_there.items() if is_saved}
        out, lse = saved.pop(0), saved.pop(0)  # what is left is the inner call's
        inner_inputs = tables.of_heads(inputs)._replace(**traded)
        sent = [upstream.dout]
        if upstream.delta is not None:
            sent.append(upstream.delta.transpose(1, 2).unsqueeze(-1))
        if tables.q is not None:  # padding gets zeros, so that it adds to no gradient
            sent = [
                x.index_select(2, tables.q).index_fill_(2, not_none(tables.padding), 0)
                for x in sent
            ]
        # dout and delta go from tokens to heads; the others stayed since the forward ...
        dout, *deltas = carry.to_heads(layouts.upstream, sent, [tables.rows] * len(sent))
        delta = deltas[0].squeeze(-1).transpose(1, 2) if deltas else None
        # ... the backward of all tokens runs for this rank's heads ...
        inner = self._inner(call, tables)
        grads = inner.strategy.backward(
            inner, inner_inputs, BackwardInputs(dout, out, lse, delta), saved
        )
        # Their memory is free while gradients travel.
        del dout, deltas, delta, out, lse, traded, inner_inputs
        # ... and gradients go back to the ranks that hold their tokens.
        sent = [x.to(part.dtype) for x, part in zip(grads[:3], layouts.grads.parts, strict=True)]
        orders = tables.rows, tables.columns, tables.columns
        dq, dk, dv = carry.to_tokens(layouts.grads, sent, orders)
        # Copies of a K/V head were differentiated on different ranks: here their parts are summed.
        dq, dk, dv = tables.without_padding(dq, dk, dv)
        dbias = grads.dbias
        if dbias is not None:
            # A bias that heads share gets a part from each rank's heads: the parts travel wide, and
            # are summed at home.
            layout = not_none(layouts.bias_grad)
            sent = [dbias.to(layout.parts[0].dtype).transpose(1, 2)]
            (dbias,) = carry.to_tokens(layout, sent, (tables.rows,))
            if not_none(inputs.bias).shape[1] == 1:
                dbias = dbias.sum(dim=2, keepdim=True)
            elif tables.q_slots is not None:
                dbias = dbias.index_select(2, tables.q_slots)
            dbias = dbias.transpose(1, 2)
        return Grads(dq, dk, dv, dbias)

    def _make_tables(self, call: Call) -> Tables:
        """Make the index tables of the call's device, for all passes to come."""
        self.tables.append(
            tables_of(call.plan, self.grid, self.heads, call.ranks.rank, call.device)
        )
        return self.tables[0]

    def _inner(self, call: Call, tables: Tables) -> Call:
        """Return the inner call, with what dropout depends on: the seed, and the rank's heads."""
        if call.params.dropout_p == 0:
            return self.inner
        return self.inner._replace(seed=call.seed, dropout_heads=tables.heads)

    def _inside(self, call: Call, inputs: Inputs) -> tuple[Inputs, list[Tensor]]:
        """Return the inner call's inputs and results by their shapes: tensors without numbers.

        Sizes may be a compiler's symbols, of which message layouts could not be kept.
        """
        (ranks, q_places), kv_places = self.heads.q.shape, self.heads.kv.shape[1]
        empty = partial(torch.empty, device=_META)
        q, k, v = (
            empty((x.shape[0], ranks * x.shape[1], places, x.shape[3]), dtype=x.dtype)
            for x, places in zip(inputs[:3], (q_places, kv_places, kv_places), strict=True)
        )
        q_ids, k_ids = (
            None if x is None else empty((x.shape[0], ranks * x.shape[1]), dtype=x.dtype)
            for x in inputs[3:5]
        )
        bias = shift = None
        if inputs.bias is not None:
            batch, heads, rows, keys = inputs.bias.shape
            places = (1 if heads == 1 else q_places), ranks * rows
            bias = empty((batch, *places, keys), dtype=inputs.bias.dtype)
            if call.params.shifts_bias:
                shared = batch if q_ids is None else q.shape[0]
                shift = empty((shared, *places), dtype=call.acc_dtype)
        return Inputs(q, k, v, q_ids, k_ids, None, bias, None, shift), [
            empty((*q.shape[:3], v.shape[3]), dtype=call.dtype),
            empty((q.shape[0], q_places, q.shape[1]), dtype=call.acc_dtype),
        ]

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """Return the shapes of the inner call's inputs and results, and of what it saves."""
        if not call.needs_grad:
            return []
        inside, results = self._inside(call, inputs)
        own = [(tuple(x.shape), x.dtype) for x in (*inside, *results) if x is not None]
        return own + self.inner.strategy.saved_shapes(self.inner, inside, plan_known=plan_known)

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, **_: bool) -> Traffic:
        """Count the bytes of a pass's exchanges, with their padding, and of the inner call."""
        exchanges = exchanges_of(call, inputs, self.heads).of_pass(forward=forward)
        size = sum((x.ranks - 1) * x.message.size for x in exchanges)
        strategy, (inside, _results) = self.inner.strategy, self._inside(call, inputs)
        saved = bool(strategy.saved_shapes(self.inner, inside, plan_known=True))
        inner = strategy.traffic(self.inner, inside, forward=forward, saved=saved)
        # A rank's own trade and its part of the inner call follow each other: their bytes add up.
        return Traffic(size + inner.sent, size + inner.received)

    def figures(self, call: Call, inputs: Inputs) -> list[str]:
        """Return how even the work is, and how many exchanges of heads a pass has."""
        exchanges = exchanges_of(call, inputs, self.heads)
        return [imbalance_line(self.inner.program), exchanges.figure(backward=call.needs_grad)]

    def visible_pairs(self, _call: Call) -> float:
        """Return the inner call's pairs for a rank's heads, with padding, per head of the call."""
        heads: float = self.heads.q.shape[1] / len(self.heads.q_slots)
        return self.inner.strategy.visible_pairs(self.inner) * heads

    def notes(self, call: Call) -> tuple[str, ...]:
        """Return how heads are padded and copied, if they are, and why ``auto`` takes the trade."""
        texts = [self.heads.describe()]
        if self.grid.outer_size == 1 and not trade_automatic_refusals(call.plan, call.request):
            texts.append("trading heads moves at most 55 % of the bytes of a gather")
        return tuple(text for text in texts if text)


class Tables(NamedTuple):
    """Index tables of a call's exchanges, int64; ``None`` where tensors are in order already.

    Places of heads are numbered over the ranks, each of which has as many of them in a row.

    Attributes:
        rows: Index in natural order of each query of the ranks that trade, rank after rank.
        columns: The same of their keys.
        q: Query head in each place; padding has another head in its place.
        kv: K/V head in each place.
        padding: Places of ``q`` that stand for no head, set with ``q``.
        q_slots: Place of each query head.
        kv_slots: Places of the copies of each K/V head, ``[K, copies]``.
        heads: Query heads in this rank's places.
        own: The same, a slice where they are a range.
    """

    rows: Tensor | None
    columns: Tensor | None
    q: Tensor | None
    kv: Tensor | None
    padding: Tensor | None
    q_slots: Tensor | None
    kv_slots: Tensor | None
    heads: Tensor
    own: Tensor | slice

    def of_heads(self, inputs: Inputs) -> Inputs:
        """Return inputs of the inner call: this rank's sinks and slopes, and nothing exchanged."""
        sinks, slopes = inputs.sinks, inputs.alibi_slopes
        return Inputs(
            inputs.q,
            inputs.k,
            inputs.v,
            None,
            None,
            None if sinks is None else sinks[self.own],
            None,
            None if slopes is None else slopes[..., self.own],
        )

    def placed(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Return Q, K and V ``[B, T_local, heads, D]`` with a head in each place."""
        if self.q is not None:
            q = q.index_select(2, self.q)
        if self.kv is not None:
            k, v = k.index_select(2, self.kv), v.index_select(2, self.kv)
        return q, k, v

    def without_padding(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Return the gradients of the heads from those in all places; copies are summed."""
        if self.q_slots is not None:
            dq = dq.index_select(2, self.q_slots)
        if self.kv_slots is not None:
            dk, dv = (
                x.index_select(2, self.kv_slots.flatten())
                .unflatten(2, self.kv_slots.shape)
                .sum(dim=3)
                for x in (dk, dv)
            )
        return dq, dk, dv


@capture_safe_cache(maxsize=64)
def tables_of(
    plan: Plan, grid: RankGrid, heads: HeadPlan, rank: int, device: torch.device
) -> Tables:
    """Return the index tables of a rank's exchanges."""

    def table(indices: npt.NDArray[Any], *, skip: bool) -> Tensor | None:
        """Return indices on the device, or ``None`` to ``skip`` them."""
        return None if skip else torch.as_tensor(indices.astype(np.int64), device=device)

    tokens = (grid.scatter_indices(layout, rank) for layout in (plan.q_layout, plan.k_layout))
    rows, columns = (table(x, skip=bool((np.diff(x) == 1).all())) for x in tokens)
    q_in_order = heads.q.size == len(heads.q_slots) and bool((np.diff(heads.q_slots) == 1).all())
    kv_in_order = heads.kv.size == len(heads.kv_slots)
    own = heads.q_filled[grid.inner_ranks(rank).index(rank)].astype(np.int64)
    own_heads = torch.as_tensor(own, device=device)
    is_range = bool((np.diff(own) == 1).all())
    return Tables(
        rows,
        columns,
        table(heads.q_filled.ravel(), skip=q_in_order),
        table(heads.kv_filled.ravel(), skip=kv_in_order),
        table(np.flatnonzero(heads.q == PADDING), skip=q_in_order),
        table(heads.q_slots, skip=q_in_order),
        table(heads.kv_slots, skip=kv_in_order),
        own_heads,
        slice(int(own[0]), int(own[-1]) + 1) if is_range else own_heads,
    )


def exchanges_of(call: Call, inputs: Inputs, heads: HeadPlan) -> ExchangeLayouts:
    """Return the message layouts of a call's exchanges; equal calls share them."""
    q, k, v = inputs[:3]
    bias = None
    if inputs.bias is not None:
        bias = inputs.bias.shape, inputs.bias.dtype, call.params.shifts_bias, call.params.bias_grad
    return head_exchanges(
        heads,
        q.shape,
        k.shape,
        v.shape[3],
        call.dtype,
        call.acc_dtype,
        call.kernel.needs_delta,
        inputs.q_ids is not None,
        bias,
    )


def _with_options(
    carry: HeadCarrier,
    layouts: ExchangeLayouts,
    tables: Tables,
    inputs: Inputs,
    inner_inputs: Inputs,
) -> Inputs:
    """Exchange segment ids, a bias and its shift, and return the inner call's inputs with them."""
    ranks = layouts.qkv.ranks
    if layouts.ids is not None:
        # Each rank gets a copy of the ids, as if that were a head of its own.
        q_ids, k_ids = (
            not_none(x)[:, :, None, None].expand(-1, -1, ranks, -1)
            for x in (inputs.q_ids, inputs.k_ids)
        )
        orders = tables.rows, tables.columns
        q_ids, k_ids = carry.to_heads(layouts.ids, (q_ids, k_ids), orders)
        inner_inputs = inner_inputs._replace(q_ids=q_ids[..., 0, 0], k_ids=k_ids[..., 0, 0])
    if layouts.bias is not None:
        bias = _bias_to_heads(carry, layouts.bias, tables, not_none(inputs.bias))
        inner_inputs = inner_inputs._replace(bias=bias)
    if layouts.bias_shift is not None:
        shift = not_none(inputs.bias_shift).unsqueeze(-1)
        shift = _bias_to_heads(carry, layouts.bias_shift, tables, shift)
        inner_inputs = inner_inputs._replace(bias_shift=shift.squeeze(-1))
    return inner_inputs


def _bias_to_heads(carry: HeadCarrier, layout: HeadBuffer, tables: Tables, bias: Tensor) -> Tensor:
    """Exchange ``bias [B, H or 1, T_local, n]``, and return ``[B, H_local or 1, T, n]``."""
    x = bias.transpose(1, 2)
    if bias.shape[1] == 1:
        x = x.expand(-1, -1, layout.ranks, -1)
    elif tables.q is not None:
        x = x.index_select(2, tables.q)
    (received,) = carry.to_heads(layout, (x,), (tables.rows,))
    return received.transpose(1, 2)


ULYSSES = StrategySpec(
    "ulysses", Ulysses.of, trade_refusals, moves_by_any=True,
    grid=lambda ranks, *_: RankGrid(ranks.size, ranks.size),  # all ranks trade
    is_automatic=lambda transport: not transport.sends_messages,  # between GPUs of one host
    unsuited=trade_automatic_refusals,
)  # fmt: skip
