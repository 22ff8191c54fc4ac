"""Run a plan of heads in one process, rank by rank in numpy, messages and all.

Each simulated rank gets the tokens that others would send it, attends to all of them with its own
heads, and sends results and gradients back; so it shows that a :class:`ring_core.HeadPlan` is right
before any device runs it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core.base.arguments import Floats, Ints, check_kind, not_none
from ring_core.layouts.layout import Layout
from ring_core.plan.plan import Plan
from ring_core.programs.heads import PADDING, HeadPlan, Heads
from ring_core.reference.dense import Grads, dense_backward, dense_forward
from ring_core.reference.inputs import Inputs, SegmentIds, check_inputs
from ring_core.reference.simulator import Simulation


def run_heads(
    plan: Plan,
    heads: HeadPlan,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    dout: npt.ArrayLike | None = None,
    dlse: npt.ArrayLike | None = None,
    segment_ids: SegmentIds | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
) -> Simulation:
    """Let the ranks of a plan trade tokens for heads, on global arrays, in float64.

    >>> import numpy as np
    >>> from ring_core import Mask, head_plan, make_plan, reference
    >>> from ring_core.reference.heads import run_heads
    >>> q, k, v = (np.random.default_rng(0).standard_normal((1, 8, n, 4)) for n in (5, 1, 1))
    >>> plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2, layout="zigzag")
    >>> results = run_heads(plan, head_plan(5, 1, 2), q, k, v)
    >>> bool(np.allclose(results.out, reference.attention(q, k, v, causal=True)[0]))
    True

    Args:
        plan: The plan, for its mask and its layouts.
        heads: The heads of each rank.
        q, k, v: Global arrays ``[B, T, heads, head_dim]``, without padding.
        dout: ``[B, T_q, H, Dv]``; given, the backward runs too.
        dlse: ``[B, H, T_q]``, the gradient that reaches ``lse``; unused without ``dout``.
        segment_ids, softmax_scale, softcap, sinks, bias, alibi_slopes, dropout_p, dropout_seed: As
            in :func:`ring_core.reference.attention`.

    Returns:
        Global ``out`` and ``lse``; with ``dout`` also the gradients of q, k, v, sinks and bias.
    """
    check_kind("plan", plan, Plan)
    check_kind("heads", heads, HeadPlan)
    inputs = check_inputs(q, k, v, segment_ids, sinks, bias, alibi_slopes)
    upstream = None if dout is None else inputs.upstream(dout, dlse)
    queries = _Trade(plan.q_layout, heads.q_filled, heads.q_slots[:, None])
    keys = _Trade(plan.k_layout, heads.kv_filled, heads.kv_slots)
    outs, lses, grads = [], [], []
    for rank in range(plan.cp_size):
        # What all ranks send becomes this rank's heads of the whole sequence ...
        own = _of_rank(inputs, queries, keys, rank)
        dense = dense_forward(
            own.q, own.k, own.v, None, False, plan.mask,
            None if own.q_ids is None or own.k_ids is None else (own.q_ids, own.k_ids),
            softmax_scale, softcap, own.sinks, own.bias, own.slopes, dropout_p, dropout_seed,
            heads.q_filled[rank],
        )  # fmt: skip
        outs.append(dense.out)
        lses.append(_tokens_first(dense.lse))
        if upstream is not None:
            # ... and gradients that reach padding are 0, so that padding gives none.
            own_dout, own_dlse = (
                None if x is None else queries.to_heads(x, rank)
                for x in (upstream[0], None if upstream[1] is None else _tokens_first(upstream[1]))
            )
            for x in (own_dout, own_dlse):
                if x is not None:
                    x[:, :, heads.q[rank] == PADDING] = 0
            grads.append(dense_backward(
                dense, not_none(own_dout), None if own_dlse is None else _heads_first(own_dlse)[..., 0]
            ))  # fmt: skip
    # Results and gradients go back to the ranks that hold their tokens.
    out, lse = queries.to_tokens(outs), _heads_first(queries.to_tokens(lses))[..., 0]
    if not grads:
        return Simulation(out, lse)
    dq, dk, dv = (
        trade.to_tokens([getattr(x, name) for x in grads])
        for trade, name in ((queries, "dq"), (keys, "dk"), (keys, "dv"))
    )
    return Simulation(out, lse, dq, dk, dv, *_parameter_grads(inputs, grads, queries))


class _Trade(NamedTuple):
    """An exchange of tokens for heads, of queries or of keys.

    Attributes:
        layout: The layout of the tokens.
        heads: Heads of each rank, ``[ranks, n]``; in padding's places are other heads, whose
            results no slot names.
        slots: Places of the copies of each head among those of all ranks, ``[H, copies]``.
    """

    layout: Layout
    heads: Heads
    slots: Heads

    def to_heads(self, x: Floats, rank: int) -> Floats:
        """Return all tokens of a rank's heads, in natural order, of ``x [B, T, H, D]``."""
        messages = [x[:, tokens][:, :, self.heads[rank]] for tokens in self._tokens()]
        return self._in_order(messages)

    def to_tokens(self, results: list[Floats]) -> Floats:
        """Return the global array ``[B, T, H, D]`` of ranks' results; copies are summed."""
        shards = []
        for tokens in self._tokens():
            places = np.concatenate([x[:, tokens] for x in results], axis=2)
            shards.append(places[:, :, self.slots].sum(axis=3))
        return self._in_order(shards)

    def _in_order(self, parts: list[Floats]) -> Floats:
        """Join the ranks' tokens, in the order of positions."""
        return np.concatenate(parts, axis=1)[:, np.argsort(np.concatenate(self._tokens()))]

    def _tokens(self) -> list[Ints]:
        """Return the positions that each rank holds."""
        return [self.layout.positions(rank) for rank in range(len(self.heads))]


def _of_rank(inputs: Inputs, queries: _Trade, keys: _Trade, rank: int) -> Inputs:
    """Return the inputs of a rank that attends to all tokens with its heads."""
    own, bias = queries.heads[rank], inputs.bias
    if bias is not None and bias.shape[1] > 1:
        bias = _heads_first(queries.to_heads(_tokens_first(bias), rank))
    return inputs._replace(
        q=queries.to_heads(inputs.q, rank),
        k=keys.to_heads(inputs.k, rank),
        v=keys.to_heads(inputs.v, rank),
        sinks=None if inputs.sinks is None else inputs.sinks[own],
        bias=bias,
        slopes=None if inputs.slopes is None else inputs.slopes[:, own],
    )


def _parameter_grads(
    inputs: Inputs, grads: list[Grads], queries: _Trade
) -> tuple[Floats | None, Floats | None]:
    """Return the gradients of sinks and bias, from those that ranks have for their heads."""
    dsinks = dbias = None
    if inputs.sinks is not None:
        dsinks = np.concatenate([not_none(x.dsinks) for x in grads])[queries.slots[:, 0]]
    if inputs.bias is not None:
        parts = [not_none(x.dbias) for x in grads]
        if inputs.bias.shape[1] == 1:
            dbias = np.sum(parts, axis=0)
        else:
            dbias = _heads_first(queries.to_tokens([_tokens_first(x) for x in parts]))
    return dsinks, dbias


def _tokens_first(x: Floats) -> Floats:
    """Return ``x [B, H, T]`` or ``[B, H, T, D]`` as ``[B, T, H, 1 or D]``."""
    return x.reshape(*x.shape[:3], -1).swapaxes(1, 2)


def _heads_first(x: Floats) -> Floats:
    """Return ``x [B, T, H, D]`` as ``[B, H, T, D]``."""
    return x.swapaxes(1, 2)
