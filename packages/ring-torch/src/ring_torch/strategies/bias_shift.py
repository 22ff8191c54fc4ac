"""Shift of each row of a bias: a number subtracted before softmax, which stays the same.

Additive masks hold numbers such as -1e10 or the least of their dtype. Where every key that a row
sees has one, ``lse`` is that number plus the logarithm of a sum, and float32 drops the logarithm:
probabilities computed from it are too large by a factor of up to the number of keys. So kernels add
``bias - shift``. Partial results, merges and the ``lse`` that a backward starts from are of shifted
scores; only the ``lse`` that is returned has the shift added back. The shift has no gradient.

Where ``KernelParams.shifts_bias`` is false there is no shift: with sinks, which compete with the
scores as they are, and for a boolean mask in the form of a bias.
"""

from __future__ import annotations

import operator
from functools import reduce

import torch
from torch import Tensor

from ring_core.base.arguments import not_none
from ring_core.base.merge import UNSHIFTED_BIAS
from ring_torch.buffers import BufferSpec
from ring_torch.call import Call
from ring_torch.comm.exchange import exchange
from ring_torch.comm.handshake import HEADER_BYTES
from ring_torch.kernels.rules import shown
from ring_torch.optional import has_triton
from ring_torch.positions import key_positions, query_positions, visible_spans
from ring_torch.records import Inputs

_BLOCK_BYTES = 64 << 20  # of temporaries


def bias_shift(call: Call, inputs: Inputs) -> Tensor:
    """Return the largest finite bias among the keys each row sees, ``[B or 1, H or 1, T_local]``.

    It is in the accumulators' dtype, and 0 where none of these is finite, as in a row that sees
    nothing, or the largest is within ``UNSHIFTED_BIAS`` of 0. ``B`` and ``H`` are the bias's, but
    with segment ids ``B`` is the batch size: then rows differ by it. With segment ids ranks
    communicate, to get the ids of all keys.

    Raises:
        RankMismatchError: A peer is making another call.
        PeerError: A peer failed, or did not answer within the group's timeout.
    """
    bias, k_ids = not_none(inputs.bias), _all_key_ids(call, inputs)
    predicate = call.plan.mask.predicate
    if bias.is_cuda and call.acc_dtype == torch.float32 and predicate is None and has_triton():
        from ring_torch.memory_ops import bias_shift_on_gpu

        # In torch's own operations these passes take several times as long as the attention.
        spans = visible_spans(call.plan, call.ranks.rank, call.device)
        return bias_shift_on_gpu(bias, *spans, inputs.q_ids, k_ids)
    batch, heads, length, keys = bias.shape
    # Some rows at a time, to bound temporaries: for each element a copy of the bias without what
    # does not count, and about 4 booleans.
    size = keys * heads * (batch if k_ids is None else len(k_ids)) * (bias.element_size() + 4)
    step = max(1, _BLOCK_BYTES // max(1, size))
    tops = []
    # Rows are independent: what a block computed is final.
    for start_row in range(0, length, step):
        i = slice(start_row, start_row + step)
        visible, rows = _visible(call, inputs, k_ids, i), bias[:, :, i]
        counts = rows.isfinite() if visible is None else rows.isfinite() & visible
        tops.append(torch.where(counts, rows, -torch.inf).amax(dim=-1))
    top = torch.cat(tops, dim=2).to(call.acc_dtype)
    is_needed = top.isfinite() & (top.abs() > UNSHIFTED_BIAS)
    return top.masked_fill_(~is_needed, 0.0)


def sent_for_shift(call: Call, inputs: Inputs) -> int:
    """Return the bytes that a rank sends so that every rank has the segment ids of all keys."""
    if not call.params.shifts_bias or inputs.k_ids is None or call.ranks.size == 1:
        return 0
    ids = BufferSpec.of((inputs.k_ids.shape, inputs.k_ids.dtype))
    return HEADER_BYTES + (call.ranks.size - 1) * ids.size


def _all_key_ids(call: Call, inputs: Inputs) -> Tensor | None:
    """Fetch the segment ids of all keys, ``[B, T_kv]`` in natural order; ``None`` without ids."""
    k_ids, ranks = inputs.k_ids, call.ranks
    if k_ids is None:
        return None
    # The strategy checks the call with the peers as well, but later, when it sends K/V.
    call.agree(ranks, call.forward_signature)
    # Nothing of the strategy is in flight yet: its first messages come after this exchange on every
    # rank, so none is taken for another.
    (ids_of_ranks,) = exchange(ranks, [[k_ids] * ranks.size], call.device)
    # Each rank's ids go to the columns of its keys, so that all are in natural order.
    ids = k_ids.new_empty(len(k_ids), call.plan.kv_seq_len)
    for rank, rank_ids in enumerate(ids_of_ranks):
        tokens = int(call.plan.k_layout.num_tokens(rank))  # behind them is padding
        positions = key_positions(call.plan, rank, call.device)[0]
        ids[:, positions[:tokens]] = rank_ids[:, :tokens]
    return ids


def _visible(call: Call, inputs: Inputs, k_ids: Tensor | None, i: slice) -> Tensor | None:
    """Return which keys a block of rows ``i`` sees, booleans ``[B or 1, 1, n, T_kv]``.

    The bias itself is not considered. ``None`` stands for all keys.
    """
    plan, rank, device = call.plan, call.ranks.rank, call.device
    start, stop = visible_spans(plan, rank, device)
    keys = torch.arange(plan.kv_seq_len, dtype=torch.int32, device=device)
    conditions = [] if start is None else [keys >= start[i, None]]
    conditions += [] if stop is None else [keys < stop[i, None]]
    if plan.blocks is not None:
        q_pos = query_positions(plan, rank, device)[1][i]
        conditions.append(shown(plan.blocks, q_pos, keys.long()))
    if k_ids is not None:
        q_ids = not_none(inputs.q_ids)[:, i, None]
        conditions.append((q_ids == k_ids[:, None]) & (q_ids >= 0))
    if not conditions:
        return None
    visible = reduce(operator.and_, conditions)
    return visible[:, None] if visible.ndim == 3 else visible[None, None]
