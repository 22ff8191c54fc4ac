"""Numpy executor that runs all ranks from ``program.table`` alone, with statically sized slices.

This is what a traced SPMD program can do: a rank is an index into arrays, and sizes are those of
the largest rank. Slices of smaller items start where they fit and the mask drops what they do not
own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ring_core import Layout, RingProgram, merge
from ring_core.programs.ring import TABLE_COLUMNS

Floats = npt.NDArray[np.float64]
COLUMN = {name: n for n, name in enumerate(TABLE_COLUMNS)}


class Local(NamedTuple):
    """Local shards, stacked over ranks: ``[P, B, T_local, heads, dim]``."""

    q: Floats
    k: Floats
    v: Floats
    dout: Floats


class Block(NamedTuple):
    """Work of one rank in one step, in slices of static size."""

    q_at: npt.NDArray[np.int64]
    k_at: npt.NDArray[np.int64]
    visible: npt.NDArray[np.bool_]


def execute(
    program: RingProgram, q: Floats, k: Floats, v: Floats, dout: Floats, scale: float
) -> tuple[Floats, ...]:
    """Return ``(out, lse, dq, dk, dv)`` of global arrays, for a mask without other options."""
    plan = program.plan
    ranks = range(plan.cp_size)
    q, dout = (_padded(x, plan.q_layout) for x in (q, dout))
    k, v = (_padded(x, plan.k_layout) for x in (k, v))
    q_pos = np.stack([plan.positions(r) for r in ranks])
    k_pos = np.stack([plan.k_positions(r) for r in ranks])
    local = Local(
        *(
            np.stack([x[:, positions[r]] for r in ranks])
            for x, positions in ((q, q_pos), (k, k_pos), (v, k_pos), (dout, q_pos))
        )
    )
    out = np.zeros((*local.q.shape[:-1], v.shape[-1]))
    lse = np.full((*local.q.shape[:2], local.q.shape[3], local.q.shape[2]), -np.inf)

    kv = local.k, local.v
    for stage in program.forward:
        arriving = _permute(kv, stage.kv_hop)
        for r, block, kv_rank, out_rank in _blocks(
            program, stage.step, q_pos + plan.q_offset, k_pos
        ):
            keys = (local.k[r], local.v[r]) if kv_rank == r else (kv[0][r], kv[1][r])
            partial = _forward(local.q[out_rank], *keys, block, scale)
            rows = np.ix_(range(q.shape[0]), block.q_at)
            heads_first = out[out_rank][rows].swapaxes(1, 2)
            merged, lse[out_rank][:, :, block.q_at] = merge(
                heads_first, lse[out_rank][:, :, block.q_at], *partial
            )
            out[out_rank][rows] = merged.swapaxes(1, 2)
        kv = arriving

    delta = (local.dout * out).sum(-1).swapaxes(2, 3)
    dq = np.zeros_like(local.q)
    own_grads = np.zeros_like(local.k), np.zeros_like(local.v)
    arrived: Any = None
    for stage in program.backward:
        is_own = program.steps[stage.step].shift == 0
        arriving = _permute(kv, stage.kv_hop)
        step_grads = own_grads if is_own else (np.zeros_like(local.k), np.zeros_like(local.v))
        for r, block, kv_rank, out_rank in _blocks(
            program, stage.step, q_pos + plan.q_offset, k_pos
        ):
            keys, grads = (
                ((local.k[r], local.v[r]), own_grads)
                if kv_rank == r
                else ((kv[0][r], kv[1][r]), step_grads)
            )
            upstream = local.dout[out_rank], lse[out_rank], delta[out_rank]
            item_grads = _backward(local.q[out_rank], *keys, *upstream, block, scale)
            for total, positions, grad in zip(
                (dq[out_rank], grads[0][r], grads[1][r]),
                (block.q_at, block.k_at, block.k_at),
                item_grads,
                strict=True,
            ):
                total[:, positions] += grad
        if arrived is not None:
            step_grads = step_grads[0] + arrived[0], step_grads[1] + arrived[1]
        arrived = _permute(step_grads, stage.grad_hop)
        own_grads = step_grads if is_own else own_grads
        kv = arriving
    return tuple(
        _whole(x, layout, axis)
        for x, layout, axis in (
            (out, plan.q_layout, 1),
            (lse, plan.q_layout, 2),
            (dq, plan.q_layout, 1),
            (own_grads[0], plan.k_layout, 1),
            (own_grads[1], plan.k_layout, 1),
        )
    )


def _blocks(program: RingProgram, step: int, q_pos: Any, k_pos: Any) -> Any:
    """Yield ``(rank, block, kv_rank, out_rank)`` for every row of a step's table."""
    plan, table = program.plan, program.table(step)
    starts, stops = (
        table[..., [COLUMN["q_start"], COLUMN["k_start"]]],
        table[..., [COLUMN["q_stop"], COLUMN["k_stop"]]],
    )
    q_size, k_size = (
        (stops - starts).max(axis=(0, 1)).tolist()
    )  # static: the same for all ranks and rows
    if not q_size or not k_size:
        return  # no rank sees anything
    for r in range(plan.cp_size):
        for row in table[r].tolist():
            value = dict(zip(TABLE_COLUMNS, row, strict=True))
            q_at = min(value["q_start"], q_pos.shape[1] - q_size) + np.arange(q_size)
            k_at = min(value["k_start"], k_pos.shape[1] - k_size) + np.arange(k_size)
            distance = (q_at - value["q_start"])[:, None] - (k_at - value["k_start"])
            visible = (distance >= value["lo"]) & (distance <= value["hi"])
            visible &= ((q_at >= value["q_start"]) & (q_at < value["q_stop"]))[:, None]
            visible &= (k_at >= value["k_start"]) & (k_at < value["k_stop"])
            q_here, k_here = q_pos[value["q_rank"], q_at], k_pos[value["kv_rank"], k_at]
            if value["doc_stop"] > value["doc_start"] and plan.boundaries is not None:
                cells = (
                    np.searchsorted(plan.boundaries, x, side="right") for x in (q_here, k_here)
                )
                q_cell, k_cell = cells
                visible &= q_cell[:, None] == k_cell
            if plan.blocks is not None:
                visible &= plan.mask.dense(q_here, k_here)
            yield r, Block(q_at, k_at, visible), value["kv_rank"], value["out_rank"]


def _forward(q: Floats, k: Floats, v: Floats, block: Block, scale: float) -> tuple[Floats, Floats]:
    logits = _logits(q, k, block, scale)
    top = logits.max(axis=-1)
    weights = np.exp(logits - np.where(np.isneginf(top), 0, top)[..., None])
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(total > 0, np.where(np.isneginf(top), 0, top) + np.log(total), -np.inf)
        out = weights @ _heads(v, block.k_at, q) / total[..., None]
    return out, lse


def _backward(
    q: Floats,
    k: Floats,
    v: Floats,
    dout: Floats,
    lse: Floats,
    delta: Floats,
    block: Block,
    scale: float,
) -> tuple[Floats, ...]:
    logits = _logits(q, k, block, scale)
    lse, delta = lse[:, :, block.q_at, None], delta[:, :, block.q_at, None]
    probs = np.where(block.visible, np.exp(logits - np.where(np.isneginf(lse), 0, lse)), 0)
    do = dout[:, block.q_at].swapaxes(1, 2)
    scores = probs * (do @ _heads(v, block.k_at, q).swapaxes(-1, -2) - delta) * scale
    dq = scores @ _heads(k, block.k_at, q)
    dk, dv = scores.swapaxes(-1, -2) @ q[:, block.q_at].swapaxes(1, 2), probs.swapaxes(-1, -2) @ do
    group = q.shape[2] // k.shape[2]
    fold = [
        x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2).swapaxes(1, 2) for x in (dk, dv)
    ]
    return dq.swapaxes(1, 2), *fold


def _logits(q: Floats, k: Floats, block: Block, scale: float) -> Floats:
    scores = scale * (q[:, block.q_at].swapaxes(1, 2) @ _heads(k, block.k_at, q).swapaxes(-1, -2))
    return np.where(block.visible, scores, -np.inf)


def _heads(x: Floats, rows: npt.NDArray[np.int64], q: Floats) -> Floats:
    return x[:, rows].swapaxes(1, 2).repeat(q.shape[2] // x.shape[2], axis=1)


def _permute(kv: tuple[Floats, Floats], hop: int | None) -> tuple[Floats, Floats]:
    return kv if hop is None else (np.roll(kv[0], hop, axis=0), np.roll(kv[1], hop, axis=0))


def _padded(x: Floats, layout: Layout) -> Floats:
    return np.pad(x, ((0, 0), (0, layout.padded_len - layout.seq_len), (0, 0), (0, 0)))


def _whole(x: Floats, layout: Layout, axis: int) -> Floats:
    joined = np.concatenate(list(x), axis=axis)
    order = np.concatenate([layout.positions(r) for r in range(layout.cp_size)])
    return np.take(joined, np.argsort(order)[: layout.seq_len], axis=axis)
