"""The backward kernels: probabilities are computed again from the final ``lse`` over all keys.

Dao, arXiv 2307.08691. One kernel loops over the keys for dQ, another over the queries for dK and
dV, which takes seven matrix products per block; or the second adds to dQ as well, which takes five,
but in an order that differs from run to run. The gradient of a bias has a kernel of its own.
"""

# The arguments and values of kernels have no types in Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ring_core.triton.scores import (
    EXACT,
    Options,
    Strides,
    add_product,
    bias_columns,
    dropout_factor,
    exp_of_scores,
    has_nan,
    has_nonfinite,
    indexed_blocks,
    inner_blocks,
    interval,
    load_bias,
    load_gradient,
    load_keys,
    load_queries,
    load_values,
    modified_scores,
    of_head,
    swizzled_block_and_head,
    visible_cells,
)


@triton.jit
def is_of_other_launch(any_shift, bias_shift):
    """Return True if a backward with a bias is the work of its other launch.

    Subtracting a shift from each row of the bias takes a quarter of the backward's time, and rows
    seldom have one. Whether any has is known on the GPU alone, in ``any_shift``, int32 ``[1]``. So
    the kernel is launched twice, with ``bias_shift`` and without, and one of the two computes.
    """
    if any_shift is None:
        is_other: tl.constexpr = False
    elif bias_shift is None:
        is_other = tl.load(any_shift) != 0
    else:
        is_other = tl.load(any_shift) == 0
    return is_other


@triton.jit
def bwd_dq(
    q, k, v, dout, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta, dq, block_index,
    counts, block_index_batch, items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias,
    bias_batch, bias_head, bias_row, bias_shift, bias_shift_batch, bias_shift_head, any_shift, slopes,
    slopes_batch, dropout, q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head,
    lse_batch, lse_head, dq_batch, dq_head, q_len, k_len, heads, group, heads_per_swizzle,
    consts: tl.constexpr, nan_safe: tl.constexpr,
):  # fmt: skip
    """Add to ``dq [B, H, T, D]``, or write it, for one block of queries of one head.

    Blocks come in the order of ``fwd``, which explains the other arguments. ``dout`` is
    ``[B, H, T, DV]``; ``lse`` and ``delta = rowsum(dout * out) - dlse`` are ``[B, H, T]`` with the
    same strides. A block whose dQ has NaN is computed again with the smaller blocks of
    ``nan_safe``, which read only keys that a query sees. ``any_shift`` is explained in
    :func:`is_of_other_launch`.
    """
    if is_of_other_launch(any_shift, bias_shift):
        return
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, bias_shift, bias_shift_batch, bias_shift_head, slopes, slopes_batch, dropout,
        q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        dq_batch, dq_head, None, None, None, None,
    )  # fmt: skip
    blocks = (q_len + consts.BLOCK_Q - 1) // consts.BLOCK_Q
    swizzled, flat = swizzled_block_and_head(blocks, heads_per_swizzle)
    block = blocks - 1 - swizzled
    start = block * consts.BLOCK_Q
    acc = bwd_loop_over_k(
        x, strides, consts, q, k, v, dout, lse, delta, block_index, counts, block_index_batch,
        block, flat, heads, group, start, NAN_SAFE=False,
    )  # fmt: skip
    if has_nan(acc):  # the NaN may come from keys that some rows do not see
        for begin in range(start, tl.minimum(start + consts.BLOCK_Q, q_len), nan_safe.BLOCK_Q):
            part = bwd_loop_over_k(
                x, strides, nan_safe, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta,
                block_index, counts, block_index_batch, block, flat, heads, group, begin,
                NAN_SAFE=True,
            )  # fmt: skip
            add_query_rows(dq, part, strides, flat, heads, begin, q_len, nan_safe)
    else:
        add_query_rows(dq, acc, strides, flat, heads, start, q_len, consts)


@triton.jit
def bwd_loop_over_k(
    x, strides, consts, q, k, v, dout, lse, delta, block_index, counts, block_index_batch, block,
    flat, heads, group, row_start, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Return dQ of a block of queries, without the scale, ``[q, PADDED]``; loops as in ``fwd``."""
    rows = row_start + tl.arange(0, consts.BLOCK_Q)
    batch, head = flat // heads, flat % heads
    kv_head = flat // group
    q = of_head(q, batch, head, strides.q_batch, strides.q_head, consts.TMA)
    dout = of_head(dout, batch, head, strides.out_batch, strides.out_head, consts.TMA)
    k = of_head(k, batch, head // group, strides.k_batch, strides.k_head, consts.TMA)
    v = of_head(v, batch, head // group, strides.v_batch, strides.v_head, consts.TMA)
    queries = load_queries(q, flat, row_start, x.q_len, consts)
    gradient = load_gradient(dout, flat, row_start, x.q_len, consts)
    # lse is final, over all keys of all ranks: weights of this block need no other block.
    row_lse, row_delta = load_lse_and_delta(lse, delta, strides, batch, head, rows, x.q_len, consts)
    acc = tl.zeros((consts.BLOCK_Q, consts.PADDED), tl.float32)
    # Q, dO and the sum of dQ stay on the chip while blocks of keys stream past.
    for n in range(1 if consts.INDEXED else consts.ITEMS):
        if consts.INDEXED:
            num_k_blocks = (x.k_len + consts.BLOCK_K - 1) // consts.BLOCK_K
            block_list, full_start, num_full = indexed_blocks(
                block_index, counts, block_index_batch, batch, block, num_k_blocks
            )
            first, stop = rows, rows
            start, full_stop, end = 0, full_start + num_full, full_start + num_full
        else:
            block_list = block_index
            first, stop = interval(x, n, rows, x.k_len, ROWS=True)
            start, full_start, full_stop, end = inner_blocks(
                first, stop, rows < x.q_len, consts.BLOCK_K, consts
            )
        # First the blocks of keys that need no mask, then those before and behind them, masked.
        if not consts.ALL_PARTIAL:
            for i in range(full_start, full_stop):
                j = tl.load(block_list + i) if consts.INDEXED else i
                acc = bwd_dq_block(
                    x, consts, queries, k, v, gradient, row_lse, row_delta, acc, batch, head,
                    kv_head, row_start, j * consts.BLOCK_K, first, stop, MASKED=False,
                    NAN_SAFE=False,
                )  # fmt: skip
        for i in range(start, end - full_stop + full_start):
            if consts.INDEXED:
                j = tl.load(block_list + i)
            else:
                j = tl.where(i < full_start, i, i - full_start + full_stop)
            acc = bwd_dq_block(
                x, consts, queries, k, v, gradient, row_lse, row_delta, acc, batch, head, kv_head,
                row_start, j * consts.BLOCK_K, first, stop, MASKED=True, NAN_SAFE=NAN_SAFE,
            )  # fmt: skip
    return acc


@triton.jit
def bwd_dq_block(
    x, consts, queries, k, v, gradient, row_lse, row_delta, acc, batch, head, kv_head, row_start,
    start, first, stop, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` plus the part of dQ that comes from the block of keys at ``start``."""
    keys = load_keys(k, kv_head, start, x.k_len, consts)
    values = load_values(v, kv_head, start, x.k_len, consts)
    row = (row_start + tl.arange(0, consts.BLOCK_Q))[:, None]
    col = (start + tl.arange(0, consts.BLOCK_K))[None, :]
    # Scores without their scale, and the gradients of the weights, dO V^T: both [q, k].
    products = tl.dot(queries, keys.T, input_precision=EXACT)
    dweights = tl.dot(gradient, values.T, input_precision=EXACT)
    visible, bias_block = None, None
    if x.bias is not None:
        bias_block = load_bias(x, consts, batch, head, row, col, SKIPS=False)
    if MASKED:
        visible = visible_cells(
            x, consts, batch, row_start, start, row, col, row, col, first[:, None], stop[:, None],
            bias_block, ROWS=True,
        )  # fmt: skip
    _, _, dproducts = score_gradients(
        x, consts, products, dweights, bias_block, row_lse[:, None], row_delta[:, None], batch, head,
        row_start, start, row, col, visible, MASKED, ROWS=True,
    )  # fmt: skip
    return add_product(acc, dproducts, visible, keys, NAN_SAFE)


@triton.jit
def bwd_dkv(
    q, k, v, dout, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta, dq, dk, dv,
    block_index, counts, block_index_batch, items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles,
    bits, bias, bias_batch, bias_head, bias_row, bias_shift, bias_shift_batch, bias_shift_head,
    any_shift, slopes, slopes_batch, dropout, q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch,
    out_head, lse_batch, lse_head, dq_batch, dq_head, dk_batch, dk_head, dv_batch, dv_head, q_len,
    k_len, heads, group, heads_per_swizzle, only, only_per_head, consts: tl.constexpr,
    nan_safe: tl.constexpr,
):  # fmt: skip
    """Add to ``dk [B, K, S, D]`` and ``dv [B, K, S, DV]``, or write them, for one block of keys.

    The first blocks of a head come first, as they have most work under a causal mask. With
    ``consts.KV_PACKED`` there is no ``dv``: it lies behind ``dk``. With ``consts.FUSED`` this adds
    to ``dq [B, H, T, D]`` as well, block by block. An addition to dQ cannot be taken back, so the
    kernel looks for keys that are not finite first. ``only [B * K, only_per_head]``, if given,
    selects the blocks to compute, NaN-safe: 0 for none, 1 for dK and dV, 2 for dQ as well.
    """
    if is_of_other_launch(any_shift, bias_shift):
        return
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, bias_shift, bias_shift_batch, bias_shift_head, slopes, slopes_batch, dropout,
        q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        dq_batch, dq_head, dk_batch, dk_head, dv_batch, dv_head,
    )  # fmt: skip
    if consts.KV_PACKED:
        dv = dk + consts.D
    blocks = (k_len + consts.BLOCK_K - 1) // consts.BLOCK_K
    block, flat = swizzled_block_and_head(blocks, heads_per_swizzle)
    if only is not None:
        flag = tl.load(only + flat * only_per_head + block)
        if flag > 0:
            bwd_dkv_nan_safe(
                x, strides, consts, nan_safe, q_pointer, k_pointer, v_pointer, dout_pointer, lse,
                delta, dq, dk, dv, block_index, counts, block_index_batch, block, flat, heads,
                group, ADD=flag == 2,
            )  # fmt: skip
    elif consts.FUSED:
        # dQ is dproducts @ K, with zeros in hidden cells: only keys that are not finite can spoil
        # it. Look at them before anything is added.
        if has_nonfinite(load_keys(k, flat, block * consts.BLOCK_K, k_len, consts)):
            bwd_dkv_nan_safe(
                x, strides, consts, nan_safe, q_pointer, k_pointer, v_pointer, dout_pointer, lse,
                delta, dq, dk, dv, block_index, counts, block_index_batch, block, flat, heads,
                group, ADD=True,
            )  # fmt: skip
        else:
            bwd_dkv_unless_nan(
                x, strides, consts, nan_safe, q, k, v, dout, q_pointer, k_pointer, v_pointer,
                dout_pointer, lse, delta, dq, dk, dv, block_index, counts, block_index_batch, block,
                flat, heads, group,
            )  # fmt: skip
    else:
        bwd_dkv_unless_nan(
            x, strides, consts, nan_safe, q, k, v, dout, q_pointer, k_pointer, v_pointer,
            dout_pointer, lse, delta, dq, dk, dv, block_index, counts, block_index_batch, block,
            flat, heads, group,
        )  # fmt: skip


@triton.jit
def bwd_dkv_unless_nan(
    x, strides, consts, nan_safe, q, k, v, dout, q_pointer, k_pointer, v_pointer, dout_pointer, lse,
    delta, dq, dk, dv, block_index, counts, block_index_batch, block, flat, heads, group,
):  # fmt: skip
    """Compute dK and dV of a block of keys, and if they have NaN compute them again, NaN-safe.

    The NaN may come from queries that do not see these keys. dQ is not added to again.
    """
    start = block * consts.BLOCK_K
    k_part, v_part = loop_over_q(
        x, strides, consts, q, k, v, dout, lse, delta, dq, block_index, counts, block_index_batch,
        block, flat, heads, group, start, ADD=consts.FUSED, NAN_SAFE=False,
    )  # fmt: skip
    if has_nan(k_part) | has_nan(v_part):
        bwd_dkv_nan_safe(
            x, strides, consts, nan_safe, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta,
            dq, dk, dv, block_index, counts, block_index_batch, block, flat, heads, group,
            ADD=False,
        )  # fmt: skip
    else:
        add_key_rows(dk, dv, k_part, v_part, strides, flat, heads // group, start, x.k_len, consts)


@triton.jit
def bwd_dkv_nan_safe(
    x, strides, consts, nan_safe, q, k, v, dout, lse, delta, dq, dk, dv, block_index, counts,
    block_index_batch, block, flat, heads, group, ADD,
):  # fmt: skip
    """Compute dK and dV of a block of keys in smaller blocks, and read only what is visible.

    With ``ADD`` also add to dQ.
    """
    start = block * consts.BLOCK_K
    # This thread block alone stores dK and dV of these keys. Additions to dQ are atomic.
    for begin in range(start, tl.minimum(start + consts.BLOCK_K, x.k_len), nan_safe.BLOCK_K):
        k_part, v_part = loop_over_q(
            x, strides, nan_safe, q, k, v, dout, lse, delta, dq, block_index, counts,
            block_index_batch, block, flat, heads, group, begin, ADD, NAN_SAFE=True,
        )  # fmt: skip
        add_key_rows(
            dk, dv, k_part, v_part, strides, flat, heads // group, begin, x.k_len, nan_safe
        )


@triton.jit
def loop_over_q(
    x, strides, consts, q, k, v, dout, lse, delta, dq, block_index, counts, block_index_batch,
    block, flat, heads, group, col_start, ADD, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Return dK (without the scale) and dV of a block of keys; with ``ADD`` also add to dQ."""
    cols = col_start + tl.arange(0, consts.BLOCK_K)
    kv_heads = heads // group
    batch = flat // kv_heads
    k = of_head(k, batch, flat % kv_heads, strides.k_batch, strides.k_head, consts.TMA)
    v = of_head(v, batch, flat % kv_heads, strides.v_batch, strides.v_head, consts.TMA)
    keys = load_keys(k, flat, col_start, x.k_len, consts)
    values = load_values(v, flat, col_start, x.k_len, consts)
    # K, V and both sums stay on the chip while blocks of queries stream past.
    dk = tl.zeros((consts.BLOCK_K, consts.PADDED), tl.float32)
    dv = tl.zeros((consts.BLOCK_K, consts.PADDED_V), tl.float32)
    # All query heads that share this key head add to its gradients. Nothing is hoisted out of the
    # loop (``disable_licm``), as it would take registers.
    for member in tl.range(0, group, disable_licm=True):
        head = (flat % kv_heads) * group + member
        for n in range(1 if consts.INDEXED else consts.ITEMS):
            if consts.INDEXED:
                num_q_blocks = (x.q_len + consts.BLOCK_Q - 1) // consts.BLOCK_Q
                block_list, full_start, num_full = indexed_blocks(
                    block_index, counts, block_index_batch, batch, block, num_q_blocks
                )
                first, stop = cols, cols
                start, full_stop, end = 0, full_start + num_full, full_start + num_full
            else:
                block_list = block_index
                first, stop = interval(x, n, cols, x.q_len, ROWS=False)
                start, full_start, full_stop, end = inner_blocks(
                    first, stop, cols < x.k_len, consts.BLOCK_Q, consts
                )
            # Blocks of queries without a mask, then those with one on both sides, as in `fwd`.
            if not consts.ALL_PARTIAL:
                for i in range(full_start, full_stop):
                    j = tl.load(block_list + i) if consts.INDEXED else i
                    dk, dv = bwd_dkv_block(
                        x, strides, consts, q, keys, values, dout, lse, delta, dq, dk, dv, batch,
                        head, heads, col_start, j * consts.BLOCK_Q, first, stop, ADD, MASKED=False,
                        NAN_SAFE=False,
                    )  # fmt: skip
            for i in range(start, end - full_stop + full_start):
                if consts.INDEXED:
                    j = tl.load(block_list + i)
                else:
                    j = tl.where(i < full_start, i, i - full_start + full_stop)
                dk, dv = bwd_dkv_block(
                    x, strides, consts, q, keys, values, dout, lse, delta, dq, dk, dv, batch, head,
                    heads, col_start, j * consts.BLOCK_Q, first, stop, ADD, MASKED=True,
                    NAN_SAFE=NAN_SAFE,
                )  # fmt: skip
    return dk, dv


@triton.jit
def bwd_dkv_block(
    x, strides, consts, q, keys, values, dout, lse, delta, dq, dk, dv, batch, head, heads,
    col_start, start, first, stop, ADD, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Return ``dk`` and ``dv`` plus the parts that come from the block of queries at ``start``.

    Scores are transposed here, ``[k, q]``, so that both gradients are products with them as they
    lie. With ``ADD`` the block's part of dQ is added in memory, atomically, as other thread blocks
    add to the same rows.
    """
    flat = batch * heads + head
    rows = start + tl.arange(0, consts.BLOCK_Q)
    row, col = rows[None, :], (col_start + tl.arange(0, consts.BLOCK_K))[:, None]
    q = of_head(q, batch, head, strides.q_batch, strides.q_head, consts.TMA)
    dout = of_head(dout, batch, head, strides.out_batch, strides.out_head, consts.TMA)
    queries = load_queries(q, flat, start, x.q_len, consts)
    gradient = load_gradient(dout, flat, start, x.q_len, consts)
    row_lse, row_delta = load_lse_and_delta(lse, delta, strides, batch, head, rows, x.q_len, consts)
    visible, bias_block = None, None
    if x.bias is not None:
        bias_block = load_bias(x, consts, batch, head, row, col, SKIPS=False)
    if MASKED:
        visible = visible_cells(
            x, consts, batch, start, col_start, row, col, col, row, first[:, None], stop[:, None],
            bias_block, ROWS=False,
        )  # fmt: skip
    # lse and delta of the queries are a number for each column here, which takes many registers.
    # Where possible they are instead the values that the accumulators of the products start from.
    # In float32 lse is subtracted after a bias is added, as the forward rounded their sum.
    block: tl.constexpr = [consts.BLOCK_K, consts.BLOCK_Q]
    rounds_sum: tl.constexpr = consts.UNIT == 1 and x.bias is not None
    if consts.SOFTCAP is None and consts.SCALE != 0 and not rounds_sum:
        initial = tl.broadcast_to((row_lse * (-1.0 / (consts.SCALE * consts.UNIT)))[None, :], block)
        products = tl.dot(keys, queries.T, initial, input_precision=EXACT)
        row_lse = tl.zeros_like(row_lse)
    else:
        products = tl.dot(keys, queries.T, input_precision=EXACT)
    if consts.DROPPED is None:
        initial = tl.broadcast_to(-row_delta[None, :], block)
        dweights = tl.dot(values, gradient.T, initial, input_precision=EXACT)
        row_delta = tl.zeros_like(row_delta)
    else:
        dweights = tl.dot(values, gradient.T, input_precision=EXACT)
    # With dropout `weights` are those after it, as V was multiplied with them in the forward;
    # dproducts come from those before.
    weights, _, dproducts = score_gradients(
        x, consts, products, dweights, bias_block, row_lse[None, :], row_delta[None, :], batch, head,
        start, col_start, row, col, visible, MASKED, ROWS=False,
    )  # fmt: skip
    dv = add_product(dv, weights, visible, gradient, NAN_SAFE)
    # The scale of dK is applied once, when the sum is stored.
    dk = add_product(dk, dproducts, visible, queries, NAN_SAFE)
    # Thread blocks of other keys add to the same rows of dQ at the same time.
    if ADD:
        part = tl.zeros((consts.BLOCK_Q, consts.PADDED), tl.float32)
        shown = visible
        if NAN_SAFE:
            shown = tl.trans(visible)
        part = add_product(part, dproducts.T, shown, keys, NAN_SAFE) * consts.SCALE
        dims = tl.arange(0, consts.PADDED)
        dq = of_head(dq, batch, head, strides.dq_batch, strides.dq_head, TMA=False)
        offsets = rows.to(tl.int64)[:, None] * consts.DQ_STEP + dims[None, :]
        inside = (rows < x.q_len)[:, None] & (dims < consts.D)[None, :]
        tl.atomic_add(dq + offsets, part, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit
def bwd_dbias(
    q, k_pointer, v_pointer, dout, lse, delta, dbias, dbias_batch, dbias_head, dbias_row,
    shared_batch, shared_heads, bias_heads, items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles,
    bits, bias, bias_batch, bias_head, bias_row, bias_shift, bias_shift_batch, bias_shift_head,
    any_shift, slopes, slopes_batch, dropout, q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch,
    out_head, lse_batch, lse_head, q_len, k_len, heads, group, consts: tl.constexpr,
):  # fmt: skip
    """Add to one block of ``dbias``, which has the shape of ``bias``.

    The sum is over the ``shared_batch`` batch rows and ``shared_heads`` heads that this block of
    the bias is broadcast to.
    """
    if is_of_other_launch(any_shift, bias_shift):
        return
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, bias_shift, bias_shift_batch, bias_shift_head, slopes, slopes_batch, dropout,
        q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        None, None, None, None, None, None,
    )  # fmt: skip
    bias_flat = tl.program_id(2)  # the bias's own batch row and head
    q_start, k_start = tl.program_id(1) * consts.BLOCK_Q, tl.program_id(0) * consts.BLOCK_K
    rows = q_start + tl.arange(0, consts.BLOCK_Q)
    row, col = rows[:, None], (k_start + tl.arange(0, consts.BLOCK_K))[None, :]
    acc = tl.zeros((consts.BLOCK_Q, consts.BLOCK_K), tl.float32)
    # One block of dbias stays on the chip while the batch rows and heads that share it come by; no
    # other thread block adds to it.
    for n in range(shared_batch * shared_heads):
        batch = (bias_flat // bias_heads) * shared_batch + n // shared_heads
        head = (bias_flat % bias_heads) * shared_heads + n % shared_heads
        flat = batch * heads + head
        k_at_head = of_head(k_pointer, batch, head // group, k_batch, k_head, TMA=False)
        v_at_head = of_head(v_pointer, batch, head // group, v_batch, v_head, TMA=False)
        q_at_head = of_head(q, batch, head, q_batch, q_head, TMA=False)
        dout_at_head = of_head(dout, batch, head, out_batch, out_head, TMA=False)
        keys = load_keys(k_at_head, flat // group, k_start, k_len, consts)
        values = load_values(v_at_head, flat // group, k_start, k_len, consts)
        queries = load_queries(q_at_head, flat, q_start, q_len, consts)
        gradient = load_gradient(dout_at_head, flat, q_start, q_len, consts)
        row_lse, row_delta = load_lse_and_delta(
            lse, delta, strides, batch, head, rows, q_len, consts
        )
        products = tl.dot(queries, keys.T, input_precision=EXACT)
        dweights = tl.dot(gradient, values.T, input_precision=EXACT)
        bias_block = load_bias(x, consts, batch, head, row, col, SKIPS=False)
        visible = visible_cells(
            x, consts, batch, q_start, k_start, row, col, row, col, row, row, bias_block, ROWS=True
        )
        _, dlogits, _ = score_gradients(
            x, consts, products, dweights, bias_block, row_lse[:, None], row_delta[:, None], batch,
            head, q_start, k_start, row, col, visible, MASKED=True, ROWS=True,
        )  # fmt: skip
        acc += dlogits
    first = of_head(
        dbias, bias_flat // bias_heads, bias_flat % bias_heads, dbias_batch, dbias_head, TMA=False
    )
    pointers = first + row.to(tl.int64) * dbias_row + bias_columns(x, consts, col)
    inside = (row < q_len) & (col < k_len)
    # Items and ranks' steps come one launch after the other, and each adds its own cells.
    tl.store(pointers, acc + tl.load(pointers, mask=inside), mask=inside)


@triton.jit
def score_gradients(
    x, consts, products, dweights, bias_block, row_lse, row_delta, batch, head, row_start, col_start,
    rows, cols, visible, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients at one block of scores.

    Args:
        x, consts, batch, head, row_start, col_start, rows, cols, ROWS: As in ``visible_cells``.
        products: Products of queries and keys. The caller may have subtracted ``lse`` from them, in
            their scale, and then gives 0 for ``row_lse``; not with a softcap.
        dweights: Products of ``dout`` and values: the gradients at the softmax weights. The caller
            may have subtracted delta, and then gives 0 for ``row_delta``; not with dropout.
        bias_block: The block's bias, or ``None``.
        row_lse, row_delta: ``lse`` times ``UNIT``, and delta, as they broadcast.
        visible: The block's mask, read if ``MASKED``.

    Returns:
        The weights that multiply V (probabilities after dropout), the gradients at the logits, and
        those at the products of queries and keys but for the scale.
    """
    # Scores were not kept: they are computed again, and P = exp(S - lse) of them.
    scores, cap_slope = modified_scores(x, consts, products, bias_block, batch, head, rows, cols)
    weights = exp_of_scores(scores - row_lse, consts)
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    kept = weights
    if consts.DROPPED is not None:
        factor = dropout_factor(x, consts, batch, head, row_start, col_start, rows, cols, ROWS)
        dweights *= factor
        kept = weights * factor
    # dS = P * (dP - delta), with delta = rowsum(dO * O) - dlse for the whole row.
    dlogits = weights * (dweights - row_delta)
    if MASKED:
        dlogits = tl.where(visible, dlogits, 0.0)
    dproducts = dlogits
    if consts.SOFTCAP is not None:
        dproducts = dlogits * cap_slope
        if MASKED:
            dproducts = tl.where(visible, dproducts, 0.0)
    return kept, dlogits, dproducts


@triton.jit
def load_lse_and_delta(lse, delta, strides, batch, head, rows, q_len, consts):
    """Load ``lse`` times ``UNIT`` and delta of some rows.

    Fully masked rows, whose ``lse`` is ``-inf``, have ``inf`` here, so that their weights are 0.
    """
    lse = of_head(lse, batch, head, strides.lse_batch, strides.lse_head, TMA=False)
    delta = of_head(delta, batch, head, strides.lse_batch, strides.lse_head, TMA=False)
    row_lse = tl.load(lse + rows, mask=rows < q_len, other=-float("inf")) * consts.UNIT
    # exp(score - inf) is 0 without a comparison in the loops.
    row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse)
    return row_lse, tl.load(delta + rows, mask=rows < q_len, other=0.0)


@triton.jit
def add_query_rows(dq, part, strides, flat, heads, start, q_len, consts):
    """Add dQ of a block of queries to memory, with the scale, or write it (``OVERWRITE``)."""
    rows = start + tl.arange(0, consts.BLOCK_Q)
    dq = of_head(dq, flat // heads, flat % heads, strides.dq_batch, strides.dq_head, TMA=False)
    add_rows(
        dq, part * consts.SCALE, rows, q_len, consts.D, consts.PADDED, consts.DQ_STEP,
        consts.OVERWRITE,
    )  # fmt: skip


@triton.jit
def add_key_rows(dk, dv, k_part, v_part, strides, flat, kv_heads, start, k_len, consts):
    """Add dK (scaled) and dV of a block of keys to memory, or write them (``OVERWRITE``)."""
    cols = start + tl.arange(0, consts.BLOCK_K)
    batch, head = flat // kv_heads, flat % kv_heads
    dk = of_head(dk, batch, head, strides.dk_batch, strides.dk_head, TMA=False)
    dv = of_head(dv, batch, head, strides.dv_batch, strides.dv_head, TMA=False)
    add_rows(
        dk, k_part * consts.SCALE, cols, k_len, consts.D, consts.PADDED, consts.DK_STEP,
        consts.OVERWRITE,
    )  # fmt: skip
    add_rows(dv, v_part, cols, k_len, consts.DV, consts.PADDED_V, consts.DV_STEP, consts.OVERWRITE)


@triton.jit
def add_rows(
    into, part, rows, length, DIM: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
    OVERWRITE: tl.constexpr,
):  # fmt: skip
    """Add a block to rows of one head in memory, or write it (``OVERWRITE``)."""
    dims = tl.arange(0, PADDED)
    offsets = rows.to(tl.int64)[:, None] * STEP + dims[None, :]
    inside = (rows < length)[:, None] & (dims < DIM)[None, :]
    # One thread block has these rows in a launch, and launches that add to them run one after the
    # other: no addition is lost.
    if not OVERWRITE:
        part += tl.load(into + offsets, mask=inside)
    tl.store(into + offsets, part, mask=inside)
