"""Run a ring's program in one process, rank by rank in numpy, messages and all.

Each simulated rank holds what a real one would hold, and K/V and dK/dV move as messages, so it
shows that a plan and its program are right before any device runs them. Offloaded queries are not
moved: a helper reads those of the rank it helps, and adds the results to that rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from ring_core import checks
from ring_core.base.arguments import Floats, check_choice, check_kind, not_none, numbers_as_python
from ring_core.base.merge import finalize, merge
from ring_core.plan.item import WorkItem
from ring_core.programs.ring import RingProgram
from ring_core.reference import item_kernel
from ring_core.reference.inputs import Inputs, SegmentIds, check_inputs
from ring_core.reference.item_kernel import Params, Precision
from ring_core.reference.simulated_ranks import (
    Grad,
    Message,
    Rank,
    join_shards,
    ranks_of,
    start_backward,
    zero_grad,
)


@dataclass(frozen=True)
class Simulation:
    """Global results of a run; gradients are ``None`` without ``dout``, or without the argument."""

    out: Floats
    lse: Floats
    dq: Floats | None = None
    dk: Floats | None = None
    dv: Floats | None = None
    dsinks: Floats | None = None
    dbias: Floats | None = None


@numbers_as_python
def simulate(
    program: RingProgram,
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
    precision: Precision = "float64",
) -> tuple[Floats, ...]:
    """Run a ring's program rank by rank on global arrays.

    >>> import numpy as np
    >>> from ring_core import Mask, make_plan, reference, ring_program
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))
    >>> plan = make_plan(Mask(causal=True), seq_len=8, cp_size=2, layout="zigzag")
    >>> out, lse = reference.simulate(ring_program(plan), q, k, v)
    >>> bool(np.allclose(out, reference.attention(q, k, v, causal=True)[0]))
    True

    Args:
        program: The program; the mask of its plan is the call's mask.
        q, k, v: Global arrays ``[B, T, heads, head_dim]``.
        dout: ``[B, T_q, H, Dv]``; given, the backward runs too.
        dlse: ``[B, H, T_q]``, the gradient that reaches ``lse``.
        segment_ids, softmax_scale, softcap, sinks, bias, alibi_slopes, dropout_p, dropout_seed: As
            in :func:`ring_core.reference.attention`.
        precision: ``bfloat16`` and ``float16`` round inputs, probabilities and results, and
            accumulate in float32.

    Returns:
        ``(out, lse)``, or ``(out, lse, dq, dk, dv)`` when ``dout`` is given. :func:`run` returns
        the gradients of sinks and bias too.

    Raises:
        ValueError: An argument is malformed, lengths are not those of the plan, or ``dlse`` comes
            without ``dout``.
    """
    result = run(
        program, q, k, v, dout=dout, dlse=dlse, segment_ids=segment_ids, softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks, bias=bias, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        precision=precision,
    )  # fmt: skip
    if dout is None:
        return result.out, result.lse
    return result.out, result.lse, *map(not_none, (result.dq, result.dk, result.dv))


@numbers_as_python
def run(
    program: RingProgram,
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
    precision: Precision = "float64",
) -> Simulation:
    """Run a ring's program as :func:`simulate` does, and return every result by name."""
    check_kind("program", program, RingProgram)
    plan = program.plan
    inputs = check_inputs(q, k, v, segment_ids, sinks, bias, alibi_slopes)
    sizes = inputs.sizes
    if (sizes.q_len, sizes.k_len) != (plan.seq_len, plan.kv_seq_len):
        raise ValueError(
            f"the plan is for {plan.seq_len} queries and {plan.kv_seq_len} keys, got q of {sizes.q_len} and k and v of "
            f"{sizes.k_len}"
        )
    check_choice("precision", precision, get_args(Precision))
    checks.check_dropout(dropout_p, dropout_seed)
    checks.check_seed(dropout_seed)
    if dlse is not None and dout is None:
        raise ValueError("dlse was given without dout; pass zeros where out has no gradient")
    upstream = None if dout is None else inputs.upstream(dout, dlse)
    params = Params(
        plan.mask,
        checks.check_scale(softmax_scale, sizes.head_dim),
        checks.check_softcap(softcap),
        float(dropout_p),
        dropout_seed,
        precision,
    )
    # Overflows and numbers that are not finite show in the results, as in those of the oracle.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _results(program, inputs, params, upstream)


def _results(
    program: RingProgram, inputs: Inputs, params: Params,
    upstream: tuple[Floats, Floats | None] | None,
) -> Simulation:  # fmt: skip
    """Run the forward pass, with ``upstream`` the backward, and put the ranks' results together."""
    plan, precision = program.plan, params.precision
    ranks = ranks_of(plan, inputs, precision)
    folded = None if inputs.sinks is None else item_kernel.round_to(inputs.sinks, precision)

    last = _forward(program, ranks, params)
    for rank in ranks:
        rank.out, rank.lse = finalize(rank.out, rank.lse, folded)
    out = item_kernel.round_to(
        join_shards(plan.q_layout, [rank.out for rank in ranks], axis=1), precision
    )
    shifts = [rank.rows.bias_shift for rank in ranks]
    lse = join_shards(
        plan.q_layout,
        # The shift of a bias was taken off the scores: put it back.
        [x.lse if shift is None else x.lse + shift for x, shift in zip(ranks, shifts, strict=True)],
        axis=2,
    )
    if upstream is None:
        return Simulation(out, lse)

    start_backward(plan, ranks, *upstream, precision)
    own_grads = _backward(program, ranks, params, last)
    dq, dk, dv = (
        item_kernel.round_to(join_shards(layout, parts, axis=1), precision)
        for layout, parts in (
            (plan.q_layout, [not_none(rank.dq) for rank in ranks]),
            (plan.k_layout, [grad.dk for grad in own_grads]),
            (plan.k_layout, [grad.dv for grad in own_grads]),
        )
    )
    dbias = None
    if inputs.bias is not None:
        dbias = join_shards(plan.q_layout, [not_none(rank.dbias) for rank in ranks], axis=2)
    dsinks = None if folded is None else _sink_grads(ranks, folded)
    return Simulation(out, lse, dq, dk, dv, dsinks, dbias)


def _forward(program: RingProgram, ranks: list[Rank], params: Params) -> list[Message]:
    """Run the forward program, and return the K/V that each rank holds at the end."""
    held = [rank.own for rank in ranks]
    for stage in program.forward:
        # Every rank sends the K/V it holds, and keeps reading them while they travel.
        arriving = _hop(held, stage.kv_hop)
        for r, rank in enumerate(ranks):
            for item in program.items(r, stage.step):
                # Items that help another rank have its queries, and this rank's own keys.
                kv = rank.own if item.kv_rank == r else held[r]
                assert kv.owner == item.kv_rank
                q, rows = ranks[item.q_rank].queries_of(item)
                k, v, columns = kv.keys_of(item)
                # K/V are only read here: they may be in flight to the next rank at the same time.
                out, lse = item_kernel.forward(q, k, v, rows, columns, item, params)
                # Merging is exact in any order, so helpers may deliver at any time before the pass
                # ends.
                _merge_into(ranks[item.out_rank], item.q_slice, out, lse)
        # The K/V that were read are not needed any more; the next step reads those that arrived.
        held = arriving
    return held


def _backward(
    program: RingProgram, ranks: list[Rank], params: Params, held: list[Message]
) -> list[Grad]:
    """Run the backward program, and return the dK/dV of each rank's own keys."""
    arrived: list[Grad] | None = None
    own_grads = [zero_grad(rank.own) for rank in ranks]
    for stage in program.backward:
        own_block = program.steps[stage.step].shift == 0
        # K/V go back the way they came. A rank reads `held` while it sends it: no one overwrites it
        # before the stage ends.
        arriving = _hop(held, stage.kv_hop)
        # dK/dV of the K/V at hand go into fresh zeros; those of own keys stay at home.
        step_grads = own_grads if own_block else [zero_grad(message) for message in held]
        for r, rank in enumerate(ranks):
            for item in program.items(r, stage.step):
                kv, grad = (
                    (rank.own, own_grads[r]) if item.kv_rank == r else (held[r], step_grads[r])
                )
                assert kv.owner == grad.owner == item.kv_rank
                _item_backward(ranks[item.out_rank], kv, grad, item, params)
        # The sums of earlier stages for the same keys have arrived, from the rank that held them
        # before. Only the additions need them, so they may arrive while the kernels run.
        if arrived is not None:
            for grad, earlier in zip(step_grads, arrived, strict=True):
                assert grad.owner == earlier.owner
                grad.dk[:] += earlier.dk
                grad.dv[:] += earlier.dv
        # The sums follow the K/V to the next rank. The last stage is the own block: they are home.
        arrived = _hop(step_grads, stage.grad_hop)
        held = arriving
    return own_grads


def _item_backward(rank: Rank, kv: Message, grad: Grad, item: WorkItem, params: Params) -> None:
    """Add an item's gradients to the dQ of the rank with the queries, and to ``grad``."""
    (q, rows), (k, v, columns) = rank.queries_of(item), kv.keys_of(item)
    dout, lse = not_none(rank.dout)[:, item.q_slice], rank.lse[:, :, item.q_slice]
    delta = not_none(rank.delta)[:, :, item.q_slice]
    dq, dk, dv, dlogits = item_kernel.backward(
        dout, q, k, v, lse, delta, rows, columns, item, params
    )
    # dQ stays with its rank; dK/dV are added to sums that travel.
    not_none(rank.dq)[:, item.q_slice] += dq
    grad.dk[:, item.k_slice] += dk
    grad.dv[:, item.k_slice] += dv
    if rank.dbias is not None:
        axes = tuple(axis for axis in (0, 1) if rank.dbias.shape[axis] == 1)
        rank.dbias[:, :, item.q_slice, columns.indices] += dlogits.sum(axis=axes, keepdims=True)


def _merge_into(rank: Rank, rows: slice, out: Floats, lse: Floats) -> None:
    """Merge a partial result into some of a rank's query rows."""
    heads_first = rank.out[:, rows].swapaxes(1, 2)
    # Rows of different items may be the same: what is there is the softmax over the keys seen so
    # far.
    merged, rank.lse[:, :, rows] = merge(heads_first, rank.lse[:, :, rows], out.swapaxes(1, 2), lse)
    rank.out[:, rows] = merged.swapaxes(1, 2)


def _hop[T](held: list[T], hop: int | None) -> list[T]:
    """Let every rank send to the rank ``hop`` ahead; return what each has received."""
    return held if hop is None else [held[(r - hop) % len(held)] for r in range(len(held))]


def _sink_grads(ranks: list[Rank], sinks: Floats) -> Floats:
    """Sum the ranks' parts of the gradient of sinks: ``dsink = -sum(exp(sink - lse) * delta)``."""
    total = np.zeros(sinks.shape, sinks.dtype)
    for rank in ranks:
        # lse includes the sinks: where it is -inf, they are, too, and their share is 0.
        safe = np.where(np.isneginf(rank.lse), 0, rank.lse)
        share = np.exp(sinks.reshape(len(sinks), -1)[None, :, None, :] - safe[..., None])
        total -= (share * not_none(rank.delta)[..., None]).sum(axis=(0, 2)).reshape(sinks.shape)
    return total
