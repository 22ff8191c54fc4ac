"""Ulysses: ranks exchange tokens for heads, and each attends to the whole sequence with its own.

Four all-to-all exchanges, as in DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): of Q, K
and V from tokens to heads and of the output back, and the same of the gradients. In between a call
of one rank runs, for ``H / P`` query and ``K / P`` key heads, over all tokens in natural order; so
every layout will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ring_core import Plan, Request
from ring_core.base.arguments import not_none
from ring_torch.buffers import BufferSpec
from ring_torch.call import Call, Saved, Shapes, Strategy, StrategySpec, attend
from ring_torch.capture import capture_safe_cache
from ring_torch.comm.handshake import agree
from ring_torch.comm.ranks import Ranks, exchange
from ring_torch.records import AttentionState, BackwardInputs, Grads, Inputs
from ring_torch.transports.api import Refusals, Traffic


@dataclass(frozen=True)
class Ulysses(Strategy):
    """All tokens of some heads, by a call of one rank.

    What a forward saves is what that call computed with, and its results.
    """

    inner: Call
    name: str = "ulysses"
    depends_on_kernel = True
    adds_sinks = True

    def forward(self, call: Call, inputs: Inputs) -> tuple[AttentionState, Saved]:
        """The state in the inputs' dtype, rounded before it travels."""
        agree(call.ring, call.number, call.seed, call.forward_signature, call.device)
        q, k, v = self._to_heads(call, [inputs.q, inputs.k, inputs.v], [False, True, True])
        (out, lse), _ = attend(self.inner, _of_heads(call.ring, inputs, q, k, v))
        out = out.to(call.dtype)
        state = self._to_tokens(call, [out, lse.transpose(1, 2)], [False, False])
        saved = (q, k, v, out, lse) if call.needs_grad else ()
        return AttentionState(state[0], state[1].transpose(1, 2).contiguous()), saved

    def backward(self, call: Call, inputs: Inputs, upstream: BackwardInputs, saved: Saved) -> Grads:
        """The gradients in the inputs' dtype: each is whole before it travels."""
        agree(call.ring, call.number, call.seed, call.backward_signature, call.device)
        q, k, v, out, lse = saved
        sent = [upstream.dout]
        if upstream.delta is not None:
            sent.append(upstream.delta.transpose(1, 2))
        dout, *rest = self._to_heads(call, sent, [False] * len(sent))
        delta = rest[0].transpose(1, 2).contiguous() if rest else None
        found = self.inner.strategy.backward(
            self.inner, _of_heads(call.ring, inputs, q, k, v),
            BackwardInputs(dout, out, lse, delta), (),
        )  # fmt: skip
        grads = [x.to(call.dtype) for x in (found.dq, found.dk, found.dv)]
        dq, dk, dv = self._to_tokens(call, grads, [False, True, True])
        return Grads(dq, dk, dv, None)

    def saved_shapes(self, call: Call, inputs: Inputs, *, plan_known: bool) -> Shapes:
        """All tokens of this rank's heads, whatever the plan."""
        del plan_known
        if not call.needs_grad:
            return []
        size = call.ring.size
        shapes = [
            (x.shape[0], size * x.shape[1], x.shape[2] // size, x.shape[3])
            for x in (inputs.q, inputs.k, inputs.v)
        ]
        batch, length, heads, _ = shapes[0]
        shapes.append((batch, length, heads, shapes[2][3]))  # the output's
        return [*((x, call.dtype) for x in shapes), ((batch, heads, length), call.acc_dtype)]

    def traffic(self, call: Call, inputs: Inputs, *, forward: bool, saved: bool) -> Traffic:
        """Parts of heads of all tokens there, and of results back; packed as they are sent."""
        del saved
        parts, (q, k, v) = call.ring.size, inputs[:3]
        batch, length, heads, _ = q.shape
        qkv = [
            ((batch, x.shape[1], x.shape[2] // parts, x.shape[3]), call.dtype) for x in (q, k, v)
        ]
        out = ((batch, length, heads // parts, v.shape[3]), call.dtype)
        row = ((batch, length, heads // parts), call.acc_dtype)
        delta = [row] if call.kernel.needs_delta else []
        messages = (qkv, [out, row]) if forward else ([out, *delta], qkv)
        size = (parts - 1) * sum(BufferSpec.of(*each).size for each in messages)
        return Traffic(size, size)

    def visible_pairs(self, call: Call) -> float:
        """Return those of all tokens for its heads: as many as any other rank computes."""
        return float(call.program.work().sum(axis=0).mean())

    def _to_heads(
        self, call: Call, tensors: Sequence[torch.Tensor], keys: Sequence[bool]
    ) -> list[torch.Tensor]:
        """``[B, T_local, H, ...]`` of all heads as ``[B, T, H / P, ...]`` of all tokens.

        ``keys`` says which lie as keys do; tokens come in natural order.
        """
        parts = [list(x.chunk(call.ring.size, dim=2)) for x in tensors]
        found = [torch.cat(came, dim=1) for came in exchange(call.ring, parts, call.device)]
        orders = [_orders(call.plan, which, call.device).natural for which in keys]
        return [x if at is None else x[:, at] for x, at in zip(found, orders, strict=True)]

    def _to_tokens(
        self, call: Call, tensors: Sequence[torch.Tensor], keys: Sequence[bool]
    ) -> list[torch.Tensor]:
        """The inverse of :meth:`_to_heads`."""
        orders = [_orders(call.plan, which, call.device).by_rank for which in keys]
        moved = [x if at is None else x[:, at] for x, at in zip(tensors, orders, strict=True)]
        parts = [list(x.chunk(call.ring.size, dim=1)) for x in moved]
        return [torch.cat(came, dim=2) for came in exchange(call.ring, parts, call.device)]


def _of_heads(
    ring: Ranks, inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Inputs:
    """The inputs of the inner call, with the sinks and slopes of this rank's heads."""
    sinks, slopes = inputs.sinks, inputs.slopes
    if sinks is not None:
        sinks = sinks.chunk(ring.size, dim=0)[ring.rank]
    if slopes is not None:
        slopes = slopes.chunk(ring.size, dim=-1)[ring.rank]
    return Inputs(q, k, v, None, None, sinks, None, slopes)


class Orders(NamedTuple):
    """Indices of tokens; ``None`` leaves them where they are.

    Attributes:
        by_rank: Of tokens in natural order: those of rank 0, then those of rank 1, ...
        natural: The inverse.
    """

    by_rank: torch.Tensor | None
    natural: torch.Tensor | None


@capture_safe_cache(maxsize=64)
def _orders(plan: Plan, keys: bool, device: torch.device) -> Orders:
    """Of a plan's queries, or keys."""
    positions = plan.k_positions if keys else plan.positions
    found = np.concatenate([positions(rank) for rank in range(plan.cp_size)])
    if (np.diff(found) == 1).all():
        return Orders(None, None)
    return Orders(*(torch.as_tensor(x, device=device) for x in (found, np.argsort(found))))


def _refusals(plan: Plan, request: Request) -> Refusals:
    """Return the counts of heads that ranks do not divide, and options that it has not got yet."""
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
    "ulysses", lambda given: Ulysses(not_none(given.inner)), _refusals, splits_heads=True
)
