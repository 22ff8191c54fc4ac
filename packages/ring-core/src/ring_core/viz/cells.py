"""Read from a program's tables which rank computes what, at sampled positions."""

from __future__ import annotations

import numpy as np

from ring_core.base.arguments import EMPTY, FULL, TILE, Bools, Ints
from ring_core.layouts.layout import Layout
from ring_core.plan.plan import Plan
from ring_core.programs.ring import RingProgram

NOBODY, WRONG = -1, -2  # stand in for the rank of a cell


def kv_messages(program: RingProgram) -> int:
    """Return the number of K/V messages that each rank sends in the forward pass."""
    return sum(stage.kv_hop is not None for stage in program.forward)


def computing_ranks(program: RingProgram, q: Ints, k: Ints) -> Ints:
    """Return the rank that computes each (query, key) pair, as the program's tables say.

    Args:
        program: The program.
        q, k: Global indices of queries and of keys, int64 ``[n]`` and ``[m]``.

    Returns:
        Ranks, int64 ``[n, m]``: ``NOBODY`` where no rank computes the pair, ``WRONG`` where the
        tables and the mask disagree, or the pair is computed more than once.
    """
    plan = program.plan
    q_rank, q_local = (x[:, None] for x in rank_and_index(plan.q_layout, q))
    k_rank, k_local = (x[None, :] for x in rank_and_index(plan.k_layout, k))
    visible = plan.mask.dense(q + plan.q_offset, k)
    pairs = np.broadcast_arrays(q_rank, q_local, k_rank, k_local, _same_cell(plan, q, k))
    counts, rank = np.zeros(visible.shape, dtype=np.int64), np.full(visible.shape, NOBODY)
    shift, offload_shift = (q_rank - k_rank) % plan.cp_size, (k_rank - q_rank) % plan.cp_size
    for n, step in enumerate(program.steps):
        # Pairs may be computed in this step by the rank of the query, or to help it by the key's.
        own = shift == step.shift
        offloaded = (offload_shift == step.shift) & (step.offload != "none")
        if not (own.any() or offloaded.any()):
            continue
        table = program.table(n).astype(np.int64)
        for computing, cells in ((pairs[0], own), (pairs[2], offloaded)):
            num_rows = _count_rows(table[computing[cells]], *(x[cells, None] for x in pairs))
            counts[cells] += num_rows
            rank[cells] = np.where(num_rows > 0, computing[cells], rank[cells])
    if plan.blocks is not None:  # a table gives the box; the tiles inside it are the plan too
        kinds = plan.blocks.kinds[q_rank, k_rank, q_local // TILE, k_local // TILE]
        counts *= (kinds == FULL) | ((kinds != EMPTY) & visible)
    return np.where((counts > 1) | ((counts > 0) != visible), WRONG, np.where(counts, rank, NOBODY))


def _same_cell(plan: Plan, q: Ints, k: Ints) -> Bools:
    """Return True for each pair inside one document and chunk, bool ``[n, m]``."""
    if plan.boundaries is None:
        return np.ones((q.size, k.size), dtype=bool)
    cells = (np.searchsorted(plan.boundaries, x, side="right") for x in (q + plan.q_offset, k))
    return np.equal.outer(*cells)


def _count_rows(rows: Ints, q_rank: Ints, q: Ints, k_rank: Ints, k: Ints, same_cell: Bools) -> Ints:
    """Count the table rows that show each of ``n`` pairs.

    Args:
        rows: Rows of the rank that may compute each pair, ``[n, R, C]``.
        q_rank, k_rank: Ranks that hold the query and the key of each pair, ``[n, 1]``.
        q, k: Their local indices.
        same_cell: True if they lie in one document and chunk.
    """
    row_q_rank, kv_rank, _, q0, q1, k0, k1, lo, hi, doc_start, doc_stop = np.moveaxis(rows, -1, 0)
    diagonal = (q - q0) - (k - k0)
    shown = (row_q_rank == q_rank) & (kv_rank == k_rank)
    shown &= (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (lo <= diagonal) & (diagonal <= hi)
    shown &= same_cell | (doc_start == doc_stop)
    return np.asarray(shown.sum(axis=1), dtype=np.int64)


def rank_and_index(layout: Layout, index: Ints) -> tuple[Ints, Ints]:
    """Return the rank and the local index of tokens, given their global indices."""
    starts = layout.run_positions(np.arange(layout.cp_size)).reshape(-1)
    order = np.argsort(starts)
    in_stripe = index % layout.stride if layout.stride > 1 else index
    run = order[np.searchsorted(starts[order], in_stripe, side="right") - 1]
    rank, n = np.divmod(run, len(layout.run_starts))
    return rank, np.asarray(layout.run_starts)[n] + (index - starts[run]) // layout.stride


def count_pieces(layout: Layout) -> int:
    """Return the number of contiguous pieces that a layout assigns; for ``striped``, of ranks."""
    return layout.cp_size * len(layout.run_starts)


def _sample_indices(layout: Layout, max_cells: int) -> Ints:
    """Return three token indices in every cell of a picture, ``[cells, 3]``: middle, first, last.

    Where they can, cells lie in one piece each. In a striped layout the one in the middle drifts
    from cell to cell, so that all ranks show.
    """
    pieces = count_pieces(layout)
    cells = min(max_cells // pieces * pieces or max_cells, layout.seq_len)
    edges = np.arange(cells + 1) * layout.seq_len // cells
    start, size = edges[:-1], np.diff(edges)
    shift = np.arange(cells) // np.maximum(1, layout.stride // size) if layout.stride > 1 else 0
    return np.stack([start + (size // 2 + shift) % size, start, edges[1:] - 1], axis=1)


def ranks_of_cells(program: RingProgram, max_cells: int) -> Ints:
    """Return the rank that computes the first visible pair of each cell, ``[q_cells, k_cells]``.

    Of a cell nine pairs are looked at, the one in the middle first. It is ``WRONG`` if any of them
    is, and ``NOBODY`` if none is visible.

    Args:
        program: The program.
        max_cells: The largest number of cells on either side.
    """
    q, k = (_sample_indices(x, max_cells) for x in (program.plan.q_layout, program.plan.k_layout))
    ranks = computing_ranks(program, q.reshape(-1), k.reshape(-1))
    ranks = ranks.reshape(*q.shape, *k.shape).transpose(0, 2, 1, 3).reshape(len(q), len(k), -1)
    first = np.take_along_axis(ranks, (ranks >= 0).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    return np.where((ranks == WRONG).any(axis=-1), WRONG, first)
