"""The forward kernel: merge what queries see into what they had seen before.

Flash attention (Dao, arXiv 2307.08691) with its running softmax in base 2.
"""

# What a kernel works on has no type in Python.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ring_core.triton.scores import (
    EXACT,
    LN2,
    LOG2E,
    Options,
    Strides,
    add_product,
    bent,
    has_nan,
    inner_blocks,
    interval,
    kept,
    listed_blocks,
    load_bias,
    load_keys,
    load_queries,
    load_values,
    of_head,
    turn_and_head,
    visible_cells,
)
from ring_core.triton.tile_sizes import FLAGS_TOGETHER as _FLAGS_TOGETHER

FLAGS_TOGETHER = tl.constexpr(_FLAGS_TOGETHER)


@triton.jit
def attend(
    q, k, v, q_pointer, k_pointer, v_pointer, before, out, lse, visits, counts, visits_batch, items,
    cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head, bias_row,
    slopes, slopes_batch, dropout, q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch,
    out_head, lse_batch, lse_head, q_len, k_len, heads, group, together, only, only_across,
    only_many, facts: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; the last blocks come first, as causal ones are longest.

    ``q [B, H, T, D]``, ``k [B, K, S, D]``, ``v [B, K, S, DV]``; ``q_pointer``, ``k_pointer`` and
    ``v_pointer`` are the same, pointers where those are descriptors. ``out [B, H, T, DV]`` and
    ``lse [B, H, T]`` are read and written; with ``before``, like ``out``, that is read and ``out``
    only written. ``visits [1 or B, I, J]`` lists the blocks of keys that each block of queries
    visits, those that need their mask first, ``counts [1 or B, I, 2]`` says how many of either
    kind; without a list they follow from the items.

    ``only [B * H, only_across]``, ``only_many`` in all, if given, says which blocks to do.

    Masked weights are 0, and ``0 * nan`` is ``nan``: if there are NaN in the result, they may come
    from values that nobody sees, and the block is done again as ``careful`` says.
    """
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, slopes, slopes_batch, dropout, q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        None, None, None, None, None, None,
    )  # fmt: skip
    if before is None:
        before = out
    if only is not None:
        first = tl.program_id(0) * FLAGS_TOGETHER
        stop = tl.minimum(first + FLAGS_TOGETHER, only_many)
        flags = first + tl.arange(0, FLAGS_TOGETHER)
        if tl.max(tl.load(only + flags, mask=flags < stop, other=0), 0) > 0:
            for n in range(first, stop):
                if tl.load(only + n) > 0:
                    block, flat = n % only_across, n // only_across
                    attend_with_care(
                        x, strides, careful, q_pointer, k_pointer, v_pointer, before, out, lse,
                        visits, counts, visits_batch, block, flat, heads, group,
                        block * facts.BLOCK_Q, facts.BLOCK_Q,
                    )  # fmt: skip
    else:
        blocks = (q_len + facts.BLOCK_Q - 1) // facts.BLOCK_Q
        turn, flat = turn_and_head(blocks, together)
        block = blocks - 1 - turn
        start = block * facts.BLOCK_Q
        top, total, acc = sweep(
            x, strides, facts, q, k, v, visits, counts, visits_batch, block, flat, heads, group,
            start, CAREFUL=False,
        )  # fmt: skip
        if has_nan(acc):
            attend_with_care(
                x, strides, careful, q_pointer, k_pointer, v_pointer, before, out, lse, visits,
                counts, visits_batch, block, flat, heads, group, start, facts.BLOCK_Q,
            )  # fmt: skip
        else:
            finish(before, out, lse, top, total, acc, strides, flat, heads, start, q_len, facts)


@triton.jit
def attend_with_care(
    x, strides, careful, q, k, v, before, out, lse, visits, counts, visits_batch, block, flat,
    heads, group, start, size,
):  # fmt: skip
    """A block of queries in smaller ones, reading only what is seen."""
    for begin in range(start, tl.minimum(start + size, x.q_len), careful.BLOCK_Q):
        top, total, part = sweep(
            x, strides, careful, q, k, v, visits, counts, visits_batch, block, flat, heads, group,
            begin, CAREFUL=True,
        )  # fmt: skip
        finish(before, out, lse, top, total, part, strides, flat, heads, begin, x.q_len, careful)


@triton.jit
def sweep(
    x, strides, facts, q, k, v, visits, counts, visits_batch, block, flat, heads, group, row_start,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """All that a block of queries sees: ``top [q]``, ``total [q]`` of the softmax, ``acc``."""
    rows = row_start + tl.arange(0, facts.BLOCK_Q)
    batch, head = flat // heads, flat % heads
    kv_head = flat // group
    q = of_head(q, batch, head, strides.q_batch, strides.q_head, facts.TMA)
    k = of_head(k, batch, head // group, strides.k_batch, strides.k_head, facts.TMA)
    v = of_head(v, batch, head // group, strides.v_batch, strides.v_head, facts.TMA)
    queries = load_queries(q, flat, row_start, x.q_len, facts)
    top = tl.full((facts.BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((facts.BLOCK_Q,), tl.float32)
    acc = tl.zeros((facts.BLOCK_Q, facts.PADDED_V), tl.float32)
    for n in range(1 if facts.LISTED else facts.ITEMS):
        if facts.LISTED:
            across = (x.k_len + facts.BLOCK_K - 1) // facts.BLOCK_K
            listed, full_start, whole = listed_blocks(
                visits, counts, visits_batch, batch, block, across
            )
            first, stop = rows, rows
            start, full_stop, end = 0, full_start + whole, full_start + whole
        else:
            listed = visits
            first, stop = interval(x, n, rows, x.k_len, ROWS=True)
            start, full_start, full_stop, end = inner_blocks(
                first, stop, rows < x.q_len, facts.BLOCK_K, facts
            )
        if not facts.ALL_PARTIAL:
            for i in range(full_start, full_stop):
                j = tl.load(listed + i) if facts.LISTED else i
                top, total, acc = merge_block(
                    x, facts, queries, k, v, top, total, acc, batch, head, kv_head, row_start,
                    j * facts.BLOCK_K, first, stop, MASKED=False, CAREFUL=False,
                )  # fmt: skip
        for i in range(start, end - full_stop + full_start):
            if facts.LISTED:
                j = tl.load(listed + i)
            else:
                j = tl.where(i < full_start, i, i - full_start + full_stop)
            top, total, acc = merge_block(
                x, facts, queries, k, v, top, total, acc, batch, head, kv_head, row_start,
                j * facts.BLOCK_K, first, stop, MASKED=True, CAREFUL=CAREFUL,
            )  # fmt: skip
    return top, total, acc


@triton.jit
def merge_block(
    x, facts, queries, k, v, top, total, acc, batch, head, kv_head, row_start, start, first, stop,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The step of the running softmax for the block of keys at ``start``."""
    keys = load_keys(k, kv_head, start, x.k_len, facts)
    products = tl.dot(queries, keys.T, input_precision=EXACT)
    row = (row_start + tl.arange(0, facts.BLOCK_Q))[:, None]
    col = (start + tl.arange(0, facts.BLOCK_K))[None, :]
    visible, shift = None, None
    if x.bias is not None:
        shift = load_bias(x, facts, batch, head, row, col)
    if not MASKED and facts.SOFTCAP is None and x.slopes is None and facts.SCALE > 0:
        scale = facts.SCALE * LOG2E
        new_top = tl.maximum(top, tl.max(products, 1) * scale)
        weights = tl.exp2(products * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
    else:
        scores, _ = bent(x, facts, products, shift, batch, head, row, col)
        if MASKED:
            visible = visible_cells(
                x, facts, batch, row_start, start, row, col, row, col, first[:, None],
                stop[:, None], shift, ROWS=True,
            )  # fmt: skip
            scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(weights, 1)
    if facts.DROPPED is not None:
        weights *= kept(x, facts, batch, head, row_start, start, row, col, ROWS=True)
    values = load_values(v, kv_head, start, x.k_len, facts)
    acc = add_product(acc * shrink[:, None], weights, visible, values, CAREFUL)
    return new_top, total, acc


@triton.jit
def finish(before, out, lse, top, total, acc, strides, flat, heads, start, q_len, facts):
    """Merge with what was there, ``(before, lse)`` with the natural logarithm, and write it."""
    rows, dims = start + tl.arange(0, facts.BLOCK_Q), tl.arange(0, facts.PADDED_V)
    batch, head = flat // heads, flat % heads
    before = of_head(before, batch, head, strides.out_batch, strides.out_head, TMA=False)
    out = of_head(out, batch, head, strides.out_batch, strides.out_head, TMA=False)
    lse = of_head(lse, batch, head, strides.lse_batch, strides.lse_head, TMA=False)
    at = rows.to(tl.int64)[:, None] * facts.OUT_STEP + dims[None, :]
    real = rows < q_len
    inside = real[:, None] & (dims < facts.DV)[None, :]
    part = tl.where(total == 0, -float("inf"), (top + tl.log2(total)) * LN2)
    inverse = 1.0 / tl.where(total == 0, 1.0, total)
    if facts.FRESH:
        result, merged = acc * inverse[:, None], part
    else:
        old = tl.load(lse + rows, mask=real, other=-float("inf"))
        high = tl.maximum(old, part)
        high = tl.where(high == -float("inf"), 0.0, high)
        merged = high + tl.log(tl.exp(old - high) + tl.exp(part - high))
        safe = tl.where(merged == -float("inf"), 0.0, merged)
        known = inside & (old > -float("inf"))[:, None]
        result = acc * (tl.exp(part - safe) * inverse)[:, None]
        result += tl.load(before + at, mask=known, other=0.0) * tl.exp(old - safe)[:, None]
    tl.store(out + at, result, mask=inside)
    tl.store(lse + rows, merged, mask=real)
