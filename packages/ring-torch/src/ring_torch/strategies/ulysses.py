"""Strategy ``ulysses``: ranks trade tokens for heads; each attends to all tokens with its heads.

Two all-to-all exchanges a pass, as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509):
in the forward Q, K and V go from tokens to heads and the output goes back; in the backward dout
goes from tokens to heads, and dQ, dK and dV go back. In between a call of one rank runs, for
``H / P`` query and ``K / P`` K/V heads, over all tokens in natural order; so every layout will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ring_core import Plan, Request
from ring_core.base.arguments import not_none
from ring_torch.buffers import HeadBuffer, HeadPart
from ring_torch.call import Call, Saved, Shapes, Strategy, StrategySpec, attend
from ring_torch.capture import capture_safe_cache
from ring_torch.comm.head_exchange import to_heads, to_tokens
from ring_torch.comm.ranks import Ranks
from ring_torch.records import AttentionState, BackwardInputs, Grads, Inputs
from ring_torch.transports.api import Refusals, Traffic


@dataclass(frozen=True)
class Ulysses(Strategy):
    """Strategy ``ulysses``: an inner call of one rank computes all tokens of this rank's heads.

    The forward saves q, k, v, out and lse of that inner call, so the backward exchanges only dout,
    delta and gradients.
    """

    inner: Call
    name: str = "ulysses"
    depends_on_kernel = True
    adds_sinks = True

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """Return ``(out, lse)``; ``out`` is rounded to the inputs' dtype before it travels."""
        layouts = exchanges_of(call, inputs)
        carry = call.open_heads(call.forward_signature, layouts.most_bytes)
        rows, columns = _orders(call)
        # Ranks trade tokens for heads. Nothing else is in flight: each exchange has buffers of its
        # own, and what follows on the stream waits for it ...
        q, k, v = to_heads(carry, layouts.qkv, inputs[:3], (rows, columns, columns))
        # ... each attends to the whole sequence with its own heads, waiting for nobody ...
        (out, lse), _ = attend(self.inner, _inner_inputs(call.ranks, inputs, q, k, v))
        out = out.to(call.dtype)
        # ... and results go back to the ranks that hold their tokens.
        sent = out, lse.transpose(1, 2).unsqueeze(-1)
        own_out, own_lse = to_tokens(carry, layouts.results, sent, (rows, rows))
        saved = (q, k, v, out, lse) if call.needs_grad else ()
        return AttentionState(own_out, own_lse.squeeze(-1).transpose(1, 2)), saved

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """Return the gradients in the inputs' dtype.

        They are rounded before they travel: each is whole, as no other rank adds to it.
        """
        layouts = exchanges_of(call, inputs)
        carry = call.open_heads(call.backward_signature, layouts.most_bytes)
        rows, columns = _orders(call)
        q, k, v, out, lse = saved
        sent = [upstream.dout]
        if upstream.delta is not None:
            sent.append(upstream.delta.transpose(1, 2).unsqueeze(-1))
        # dout and delta go from tokens to heads; q, k, v, out and lse stayed since the forward ...
        dout, *deltas = to_heads(carry, layouts.upstream, sent, [rows] * len(sent))
        delta = deltas[0].squeeze(-1).transpose(1, 2) if deltas else None
        # ... the backward of all tokens runs for this rank's heads ...
        grads = self.inner.strategy.backward(
            self.inner, _inner_inputs(call.ranks, inputs, q, k, v),
            BackwardInputs(dout, out, lse, delta), (),
        )  # fmt: skip
        # ... and gradients go back to the ranks that hold their tokens.
        sent = [x.to(call.dtype) for x in (grads.dq, grads.dk, grads.dv)]
        dq, dk, dv = to_tokens(carry, layouts.qkv, sent, (rows, columns, columns))
        return Grads(dq, dk, dv, None)

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """Return the shapes of q, k, v, out and lse of the inner call, whatever the plan."""
        del plan_known
        if not call.needs_grad:
            return []
        size = call.ranks.size
        shapes = [
            (x.shape[0], size * x.shape[1], x.shape[2] // size, x.shape[3])
            for x in (inputs.q, inputs.k, inputs.v)
        ]
        batch, length, heads, _ = shapes[0]
        shapes.append((batch, length, heads, shapes[2][3]))  # the output's
        return [*((x, call.dtype) for x in shapes), ((batch, heads, length), call.acc_dtype)]

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Count the bytes of a pass's two exchanges, with the padding inside their messages."""
        del saved
        layouts = exchanges_of(call, inputs)
        exchanges = (layouts.qkv, layouts.results) if forward else (layouts.upstream, layouts.qkv)
        size = (call.ranks.size - 1) * sum(x.message.size for x in exchanges)
        return Traffic(size, size)

    def visible_pairs(self, call: Call) -> float:
        """Return the (query, key) pairs that a rank computes, per query head of the call.

        A rank computes the pairs of all ranks for ``H / P`` heads. Divided by ``H`` that is the
        mean over ranks.
        """
        return float(call.program.work().sum(axis=0).mean())


class ExchangeLayouts(NamedTuple):
    """Message layouts of the exchanges of a call, two in each pass.

    Attributes:
        qkv: Q, K and V from tokens to heads; and dQ, dK and dV back.
        results: ``out`` and ``lse`` from heads to tokens.
        upstream: ``dout``, and ``delta`` where the kernel takes it, from tokens to heads.
    """

    qkv: HeadBuffer
    results: HeadBuffer
    upstream: HeadBuffer

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest exchange: of the messages from one rank to all."""
        return max([x.ranks * x.message.size for x in self])


def exchanges_of(call: Call, inputs: Inputs) -> ExchangeLayouts:
    """Return the message layouts of a call's exchanges; equal calls share them."""
    q, k, v = inputs.q, inputs.k, inputs.v
    return _exchanges(
        call.ranks.size, q.shape, k.shape, v.shape[3], call.dtype, call.acc_dtype,
        call.kernel.needs_delta,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _exchanges(
    ranks: int, q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_dim: int, dtype: torch.dtype,
    acc_dtype: torch.dtype, needs_delta: bool,
) -> ExchangeLayouts:  # fmt: skip
    """Make the message layouts of a call from the shapes of its tensors; P ranks cut heads."""
    q, k = (
        HeadPart(batch, length, heads // ranks, dim, dtype)
        for batch, length, heads, dim in (q_shape, k_shape)
    )
    out = q._replace(dim=v_dim)
    row = q._replace(dim=1, dtype=acc_dtype, head_major=True)
    return ExchangeLayouts(
        qkv=HeadBuffer.of(ranks, q, k, k._replace(dim=v_dim)),
        results=HeadBuffer.of(ranks, out, row),
        upstream=HeadBuffer.of(ranks, out, *([row] if needs_delta else [])),
    )


def _inner_inputs(
    ring: Ranks, inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Inputs:
    """Return the inputs of the inner call: q, k, v, and this rank's part of sinks and slopes."""
    sinks, slopes = inputs.sinks, inputs.slopes
    if sinks is not None:
        sinks = sinks.chunk(ring.size, dim=0)[ring.rank]
    if slopes is not None:
        slopes = slopes.chunk(ring.size, dim=-1)[ring.rank]
    return Inputs(q, k, v, None, None, sinks, None, slopes)


def _orders(call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the global positions of all queries and of all keys, int64 ``[T]`` in rank order.

    ``None`` stands for natural order.
    """
    return _order(call.plan, False, call.device), _order(call.plan, True, call.device)


@capture_safe_cache(maxsize=64)
def _order(plan: Plan, keys: bool, device: torch.device) -> torch.Tensor | None:
    """Return the global positions of all queries, or of all keys; see :func:`_orders`."""
    positions = plan.k_positions if keys else plan.positions
    by_rank = np.concatenate([positions(rank) for rank in range(plan.cp_size)])
    if (np.diff(by_rank) == 1).all():
        return None
    return torch.as_tensor(by_rank, device=device)


def _refusals(plan: Plan, request: Request) -> Refusals:
    """Return why ranks cannot trade heads: indivisible head counts, and unsupported options."""
    counts = (("q has", request.q_heads), ("k and v have", request.kv_heads))
    options = (
        ("bias", request.bias), ("segment_ids", request.segment_ids), ("dropout_p", request.dropout)
    )  # fmt: skip
    return (
        *(
            f"{name} {count} heads, which {plan.cp_size} ranks do not divide"
            for name, count in counts
            if count % plan.cp_size
        ),
        *(f"it has no {name} yet" for name, is_asked in options if is_asked),
    )


ULYSSES = StrategySpec(
    "ulysses", lambda resolution: Ulysses(not_none(resolution.inner)), _refusals, splits_heads=True
)
