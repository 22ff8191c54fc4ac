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
    dropout_keep,
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
    """One block of queries of one head; the last blocks come first, as causal ones are longest.

    ``q [B, H, T, D]``, ``k [B, K, S, D]``, ``v [B, K, S, DV]``; ``q_pointer``, ``k_pointer`` and
    ``v_pointer`` are the same, pointers where those are descriptors. ``out [B, H, T, DV]`` and
    ``lse [B, H, T]`` are read and written; with ``before``, like ``out``, that is read and ``out``
    only written. ``block_index [1 or B, I, J]`` lists the blocks of keys that each block of queries
    visits, those that need their mask first, ``counts [1 or B, I, 2]`` says how many of either
    kind; without a list they follow from the items.

    ``only [B * H, only_per_head]``, ``only_many`` in all, if given, says which blocks to do.

    Masked weights are 0, and ``0 * nan`` is ``nan``: if there are NaN in the result, they may come
    from values that nobody sees, and the block is done again as ``nan_safe`` says.
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
        swizzled, flat = swizzled_block_and_head(blocks, heads_per_swizzle)
        block = blocks - 1 - swizzled
        start = block * consts.BLOCK_Q
        top, total, acc = loop_over_k(
            x, strides, consts, q, k, v, block_index, counts, block_index_batch, block, flat, heads,
            group, start, NAN_SAFE=False,
        )  # fmt: skip
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
    """A block of queries in smaller ones, reading only what is seen."""
    for begin in range(start, tl.minimum(start + size, x.q_len), nan_safe.BLOCK_Q):
        top, total, part = loop_over_k(
            x, strides, nan_safe, q, k, v, block_index, counts, block_index_batch, block, flat,
            heads, group, begin, NAN_SAFE=True,
        )  # fmt: skip
        finish(before, out, lse, top, total, part, strides, flat, heads, begin, x.q_len, nan_safe)


@triton.jit
def loop_over_k(
    x, strides, consts, q, k, v, block_index, counts, block_index_batch, block, flat, heads, group,
    row_start, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """All that a block of queries sees: ``top [q]``, ``total [q]`` of the softmax, ``acc``."""
    rows = row_start + tl.arange(0, consts.BLOCK_Q)
    batch, head = flat // heads, flat % heads
    kv_head = flat // group
    q = of_head(q, batch, head, strides.q_batch, strides.q_head, consts.TMA)
    k = of_head(k, batch, head // group, strides.k_batch, strides.k_head, consts.TMA)
    v = of_head(v, batch, head // group, strides.v_batch, strides.v_head, consts.TMA)
    queries = load_queries(q, flat, row_start, x.q_len, consts)
    top = tl.full((consts.BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((consts.BLOCK_Q,), tl.float32)
    acc = tl.zeros((consts.BLOCK_Q, consts.PADDED_V), tl.float32)
    for n in range(1 if consts.INDEXED else consts.ITEMS):
        if consts.INDEXED:
            num_k_blocks = (x.k_len + consts.BLOCK_K - 1) // consts.BLOCK_K
            listed, full_start, whole = indexed_blocks(
                block_index, counts, block_index_batch, batch, block, num_k_blocks
            )
            first, stop = rows, rows
            start, full_stop, end = 0, full_start + whole, full_start + whole
        else:
            listed = block_index
            first, stop = interval(x, n, rows, x.k_len, ROWS=True)
            start, full_start, full_stop, end = inner_blocks(
                first, stop, rows < x.q_len, consts.BLOCK_K, consts
            )
        if not consts.ALL_PARTIAL:
            for i in range(full_start, full_stop):
                j = tl.load(listed + i) if consts.INDEXED else i
                top, total, acc = online_softmax_step(
                    x, consts, queries, k, v, top, total, acc, batch, head, kv_head, row_start,
                    j * consts.BLOCK_K, first, stop, MASKED=False, NAN_SAFE=False,
                )  # fmt: skip
        for i in range(start, end - full_stop + full_start):
            if consts.INDEXED:
                j = tl.load(listed + i)
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
    """The step of the running softmax for the block of keys at ``start``."""
    keys = load_keys(k, kv_head, start, x.k_len, consts)
    products = tl.dot(queries, keys.T, input_precision=EXACT)
    row = (row_start + tl.arange(0, consts.BLOCK_Q))[:, None]
    col = (start + tl.arange(0, consts.BLOCK_K))[None, :]
    visible, added = None, None
    if x.bias is not None:
        added = load_bias(x, consts, batch, head, row, col)
    if not MASKED and consts.SOFTCAP is None and x.slopes is None and consts.SCALE > 0:
        scale = consts.SCALE * LOG2E
        new_top = tl.maximum(top, tl.max(products, 1) * scale)
        weights = tl.exp2(products * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
    else:
        scores, _ = modified_scores(x, consts, products, added, batch, head, row, col)
        if MASKED:
            visible = visible_cells(
                x, consts, batch, row_start, start, row, col, row, col, first[:, None],
                stop[:, None], added, ROWS=True,
            )  # fmt: skip
            scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(weights, 1)
    if consts.DROPPED is not None:
        weights *= dropout_keep(x, consts, batch, head, row_start, start, row, col, ROWS=True)
    values = load_values(v, kv_head, start, x.k_len, consts)
    acc = add_product(acc * shrink[:, None], weights, visible, values, NAN_SAFE)
    return new_top, total, acc


@triton.jit
def finish(before, out, lse, top, total, acc, strides, flat, heads, start, q_len, consts):
    """Merge with what was there, ``(before, lse)`` with the natural logarithm, and write it."""
    rows, dims = start + tl.arange(0, consts.BLOCK_Q), tl.arange(0, consts.PADDED_V)
    batch, head = flat // heads, flat % heads
    before = of_head(before, batch, head, strides.out_batch, strides.out_head, TMA=False)
    out = of_head(out, batch, head, strides.out_batch, strides.out_head, TMA=False)
    lse = of_head(lse, batch, head, strides.lse_batch, strides.lse_head, TMA=False)
    at = rows.to(tl.int64)[:, None] * consts.OUT_STEP + dims[None, :]
    real = rows < q_len
    inside = real[:, None] & (dims < consts.DV)[None, :]
    part = tl.where(total == 0, -float("inf"), (top + tl.log2(total)) * LN2)
    factor = 1.0 / tl.where(total == 0, 1.0, total)
    if consts.FRESH:
        result, merged = acc * factor[:, None], part
    else:
        old = tl.load(lse + rows, mask=real, other=-float("inf"))
        high = tl.maximum(old, part)
        high = tl.where(high == -float("inf"), 0.0, high)
        merged = high + tl.log(tl.exp(old - high) + tl.exp(part - high))
        safe = tl.where(merged == -float("inf"), 0.0, merged)
        known = inside & (old > -float("inf"))[:, None]
        result = acc * (tl.exp(part - safe) * factor)[:, None]
        result += tl.load(before + at, mask=known, other=0.0) * tl.exp(old - safe)[:, None]
    tl.store(out + at, result, mask=inside)
    tl.store(lse + rows, merged, mask=real)
