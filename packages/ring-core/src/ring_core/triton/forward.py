"""The forward kernel: flash attention that merges its result into an earlier one.

Dao, arXiv 2307.08691. Scores and the running softmax's maximum are times ``Constexprs.UNIT``.
"""

# The arguments and values of kernels have no types in Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ring_core.triton.scores import (
    EXACT,
    LOG2E,
    Options,
    Strides,
    add_product,
    dropout_factor,
    exp_of_scores,
    has_nan,
    indexed_blocks,
    inner_blocks,
    interval,
    load_bias,
    load_keys,
    load_queries,
    load_values,
    modified_scores,
    of_head,
    swizzled_block_and_head,
    visible_cells,
)
from ring_core.triton.tile_configs import FLAGS_TOGETHER as _FLAGS_TOGETHER

FLAGS_TOGETHER = tl.constexpr(_FLAGS_TOGETHER)


@triton.jit
def fwd(
    q, k, v, q_pointer, k_pointer, v_pointer, before, out, lse, block_index, counts,
    block_index_batch, items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias,
    bias_batch, bias_head, bias_row, bias_shift, bias_shift_batch, bias_shift_head, slopes,
    slopes_batch, dropout, q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head,
    lse_batch, lse_head, q_len, k_len, heads, group, heads_per_swizzle, only, only_per_head,
    only_many, consts: tl.constexpr, nan_safe: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one head, and merge it into ``out`` and ``lse``.

    The last blocks come first, as they have most work under a causal mask.

    Args:
        q, k, v: ``[B, H, T, D]``, ``[B, K, S, D]``, ``[B, K, S, DV]``: pointers or descriptors.
        q_pointer, k_pointer, v_pointer: Pointers to the same.
        before: ``[B, H, T, DV]`` like ``out``: the earlier output; by default that is in ``out``.
        out, lse: ``[B, H, T, DV]`` and ``[B, H, T]``: the merged result; ``lse`` holds the earlier
            one.
        block_index: ``[1 or B, I, J]``, blocks of keys that each block of queries visits, those
            that need their mask first; without it they follow from the items.
        counts: ``[1 or B, I, 2]``, how many of either kind.
        only: ``[B * H, only_per_head]``, ``only_many`` in all: flags of the blocks to compute,
            NaN-safe; by default all.
        consts, nan_safe: Constants, and those of blocks that are computed again: masked weights are
            0, and ``0 * nan`` is ``nan``, so NaN in a result may come from values that no query
            sees.
    """
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, bias_shift, bias_shift_batch, bias_shift_head, slopes, slopes_batch, dropout,
        q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        None, None, None, None, None, None,
    )  # fmt: skip
    if before is None:
        before = out
    if only is not None:
        # Few blocks are flagged. A thread block looks at some flags at once, and mostly is done.
        first = tl.program_id(0) * FLAGS_TOGETHER
        stop = tl.minimum(first + FLAGS_TOGETHER, only_many)
        flags = first + tl.arange(0, FLAGS_TOGETHER)
        if tl.max(tl.load(only + flags, mask=flags < stop, other=0), 0) > 0:
            for n in range(first, stop):
                if tl.load(only + n) > 0:
                    block, flat = n % only_per_head, n // only_per_head
                    fwd_nan_safe(
                        x, strides, nan_safe, q_pointer, k_pointer, v_pointer, before, out, lse,
                        block_index, counts, block_index_batch, block, flat, heads, group,
                        block * consts.BLOCK_Q, consts.BLOCK_Q,
                    )  # fmt: skip
    else:
        blocks = (q_len + consts.BLOCK_Q - 1) // consts.BLOCK_Q
        # The last block of queries has most keys under a causal mask: it starts first.
        swizzled, flat = swizzled_block_and_head(blocks, heads_per_swizzle)
        block = blocks - 1 - swizzled
        start = block * consts.BLOCK_Q
        top, total, acc = fwd_loop_over_k(
            x, strides, consts, q, k, v, block_index, counts, block_index_batch, block, flat, heads,
            group, start, NAN_SAFE=False,
        )  # fmt: skip
        # Hidden weights are 0, and 0 * NaN is NaN: the block may be spoilt by values that no row
        # sees. It was not stored yet, so it is simply computed again. Every thread block decides
        # that for itself.
        if has_nan(acc):
            fwd_nan_safe(
                x, strides, nan_safe, q_pointer, k_pointer, v_pointer, before, out, lse,
                block_index, counts, block_index_batch, block, flat, heads, group, start,
                consts.BLOCK_Q,
            )  # fmt: skip
        else:
            finish(before, out, lse, top, total, acc, strides, flat, heads, start, q_len, consts)


@triton.jit
def fwd_nan_safe(
    x, strides, nan_safe, q, k, v, before, out, lse, block_index, counts, block_index_batch, block,
    flat, heads, group, start, size,
):  # fmt: skip
    """Compute a block of queries in smaller ones, without reading values that no query sees."""
    # Nothing of the block is in memory yet: each smaller one is computed whole, and stored once.
    for begin in range(start, tl.minimum(start + size, x.q_len), nan_safe.BLOCK_Q):
        top, total, part = fwd_loop_over_k(
            x, strides, nan_safe, q, k, v, block_index, counts, block_index_batch, block, flat,
            heads, group, begin, NAN_SAFE=True,
        )  # fmt: skip
        finish(before, out, lse, top, total, part, strides, flat, heads, begin, x.q_len, nan_safe)


@triton.jit
def fwd_loop_over_k(
    x, strides, consts, q, k, v, block_index, counts, block_index_batch, block, flat, heads, group,
    row_start, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Attend from a block of queries to all keys it sees.

    Returns:
        The running softmax: largest score ``top [q]``, times ``UNIT``, denominator ``total [q]``,
        and ``acc [q, PADDED_V]``, the weighted sum of values not yet divided by it.
    """
    rows = row_start + tl.arange(0, consts.BLOCK_Q)
    batch, head = flat // heads, flat % heads
    kv_head = flat // group
    q = of_head(q, batch, head, strides.q_batch, strides.q_head, consts.TMA)
    k = of_head(k, batch, head // group, strides.k_batch, strides.k_head, consts.TMA)
    v = of_head(v, batch, head // group, strides.v_batch, strides.v_head, consts.TMA)
    queries = load_queries(q, flat, row_start, x.q_len, consts)
    # The identity of the running softmax: rescaling by exp(-inf - x) = 0 then does no harm.
    top = tl.full((consts.BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((consts.BLOCK_Q,), tl.float32)
    acc = tl.zeros((consts.BLOCK_Q, consts.PADDED_V), tl.float32)
    # The queries and all sums stay on the chip while blocks of keys stream past. A block index
    # lists the blocks of all items together; without one each item is a range of blocks [start,
    # end), of which [full_start, full_stop) need no mask.
    for n in range(1 if consts.INDEXED else consts.ITEMS):
        if consts.INDEXED:
            # The list is as a range, too: partial blocks [0, full_start), then the full ones.
            num_k_blocks = (x.k_len + consts.BLOCK_K - 1) // consts.BLOCK_K
            block_list, full_start, num_full = indexed_blocks(
                block_index, counts, block_index_batch, batch, block, num_k_blocks
            )
            # Unused: blocks of a list take the intervals of all items in `visible_cells`.
            first, stop = rows, rows
            start, full_stop, end = 0, full_start + num_full, full_start + num_full
        else:
            block_list = block_index
            first, stop = interval(x, n, rows, x.k_len, ROWS=True)
            start, full_start, full_stop, end = inner_blocks(
                first, stop, rows < x.q_len, consts.BLOCK_K, consts
            )
        # Blocks without a mask, in a loop of their own whose body has no comparisons.
        if not consts.ALL_PARTIAL:
            for i in range(full_start, full_stop):
                j = tl.load(block_list + i) if consts.INDEXED else i
                top, total, acc = online_softmax_step(
                    x, consts, queries, k, v, top, total, acc, batch, head, kv_head, row_start,
                    j * consts.BLOCK_K, first, stop, MASKED=False, NAN_SAFE=False,
                )  # fmt: skip
        # Blocks that need a mask lie before and after the full ones. One loop visits both and skips
        # the full ones, so that its body is compiled once.
        for i in range(start, end - full_stop + full_start):
            if consts.INDEXED:
                j = tl.load(block_list + i)
            else:
                j = tl.where(i < full_start, i, i - full_start + full_stop)
            top, total, acc = online_softmax_step(
                x, consts, queries, k, v, top, total, acc, batch, head, kv_head, row_start,
                j * consts.BLOCK_K, first, stop, MASKED=True, NAN_SAFE=NAN_SAFE,
            )  # fmt: skip
    return top, total, acc


@triton.jit
def online_softmax_step(
    x, consts, queries, k, v, top, total, acc, batch, head, kv_head, row_start, start, first, stop,
    MASKED: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Add the block of keys at ``start`` to the running softmax ``(top, total, acc)``."""
    keys = load_keys(k, kv_head, start, x.k_len, consts)
    products = tl.dot(queries, keys.T, input_precision=EXACT)
    row = (row_start + tl.arange(0, consts.BLOCK_Q))[:, None]
    col = (start + tl.arange(0, consts.BLOCK_K))[None, :]
    visible, bias_block = None, None
    if x.bias is not None:
        bias_block = load_bias(x, consts, batch, head, row, col, SKIPS=True)
    # With a positive scale the largest product gives the largest score, so scaling and subtracting
    # are one multiply-add of each score.
    if not MASKED and consts.SOFTCAP is None and x.slopes is None and consts.SCALE > 0:
        scale = consts.SCALE * consts.UNIT
        new_top = tl.maximum(top, tl.max(products, 1) * scale)
        weights = exp_of_scores(products * scale - new_top[:, None], consts)
        rescale = exp_of_scores(top - new_top, consts)
    else:
        scores, _ = modified_scores(x, consts, products, bias_block, batch, head, row, col)
        if MASKED:
            visible = visible_cells(
                x, consts, batch, row_start, start, row, col, row, col, first[:, None],
                stop[:, None], bias_block, ROWS=True,
            )  # fmt: skip
            scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet would subtract -inf from -inf.
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = exp_of_scores(scores - safe[:, None], consts)
        rescale = exp_of_scores(top - safe, consts)
    # Earlier sums are relative to the old largest score: rescale them to the new one.
    total = total * rescale + tl.sum(weights, 1)
    if consts.DROPPED is not None:
        weights *= dropout_factor(x, consts, batch, head, row_start, start, row, col, ROWS=True)
    values = load_values(v, kv_head, start, x.k_len, consts)
    acc = add_product(acc * rescale[:, None], weights, visible, values, NAN_SAFE)
    return new_top, total, acc


@triton.jit
def finish(before, out, lse, top, total, acc, strides, flat, heads, start, q_len, consts):
    """Divide by the softmax's denominator, merge with the earlier ``(before, lse)``, and store.

    With ``OVERWRITE`` nothing is merged: ``before`` and the earlier ``lse`` are not read. In memory
    ``lse`` is a natural logarithm; ``top`` is times ``UNIT``. See :func:`ring_core.merge`.
    """
    rows, dims = start + tl.arange(0, consts.BLOCK_Q), tl.arange(0, consts.PADDED_V)
    batch, head = flat // heads, flat % heads
    before = of_head(before, batch, head, strides.out_batch, strides.out_head, TMA=False)
    out = of_head(out, batch, head, strides.out_batch, strides.out_head, TMA=False)
    lse = of_head(lse, batch, head, strides.lse_batch, strides.lse_head, TMA=False)
    offsets = rows.to(tl.int64)[:, None] * consts.OUT_STEP + dims[None, :]
    real = rows < q_len
    inside = real[:, None] & (dims < consts.DV)[None, :]
    # The lse of this launch's keys alone; -inf says that the row saw none, and weighs 0 in every
    # merge.
    part = tl.where(
        total == 0,
        -float("inf"),
        (top + tl.log2(total) * (consts.UNIT / LOG2E)) * (1 / consts.UNIT),
    )
    factor = 1.0 / tl.where(total == 0, 1.0, total)
    # A launch that is the first to its rows writes them, so nobody has to clear the buffers.
    if consts.OVERWRITE:
        result, merged = acc * factor[:, None], part
    else:
        # No other thread block has these rows of this head, so they may be read and written again.
        old = tl.load(lse + rows, mask=real, other=-float("inf"))
        high = tl.maximum(old, part)
        high = tl.where(high == -float("inf"), 0.0, high)
        merged = high + tl.log(tl.exp(old - high) + tl.exp(part - high))
        safe = tl.where(merged == -float("inf"), 0.0, merged)
        # Where the earlier lse is -inf the earlier output may be garbage, and is not read.
        known = inside & (old > -float("inf"))[:, None]
        result = acc * (tl.exp(part - safe) * factor)[:, None]
        result += tl.load(before + offsets, mask=known, other=0.0) * tl.exp(old - safe)[:, None]
    tl.store(out + offsets, result, mask=inside)
    # Kernels on a stream run one after the other: the next launch reads this lse as the earlier
    # one.
    tl.store(lse + rows, merged, mask=real)
