"""The backward kernels: probabilities are computed again from the global ``lse``.

Dao, arXiv 2307.08691. One kernel goes along the keys for dQ, another along the queries for dK and
dV, seven products of matrices per block; or the second adds to dQ as well, five products, in an
order that differs from run to run. The gradient of a bias takes a kernel of its own.
"""

# What a kernel works on has no type in Python.
# ruff: noqa: ANN001, ANN201, N803
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
    bent,
    bias_columns,
    has_nan,
    inner_blocks,
    interval,
    is_odd,
    kept,
    listed_blocks,
    load_bias,
    load_gradient,
    load_keys,
    load_queries,
    load_values,
    of_head,
    turn_and_head,
    visible_cells,
)


@triton.jit
def add_to_queries(
    q, k, v, dout, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta, dq, visits, counts,
    visits_batch, items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch,
    bias_head, bias_row, slopes, slopes_batch, dropout, q_batch, q_head, k_batch, k_head, v_batch,
    v_head, out_batch, out_head, lse_batch, lse_head, dq_batch, dq_head, q_len, k_len, heads, group,
    together, facts: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Add to ``dq [B, H, T, D]`` of one block of queries of one head; as ``attend`` goes.

    ``dout [B, H, T, DV]``; ``lse`` and ``delta`` are ``[B, H, T]``, alike in memory.
    """
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, slopes, slopes_batch, dropout, q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        dq_batch, dq_head, None, None, None, None,
    )  # fmt: skip
    blocks = (q_len + facts.BLOCK_Q - 1) // facts.BLOCK_Q
    turn, flat = turn_and_head(blocks, together)
    block = blocks - 1 - turn
    start = block * facts.BLOCK_Q
    acc = sweep_keys(
        x, strides, facts, q, k, v, dout, lse, delta, visits, counts, visits_batch, block, flat,
        heads, group, start, CAREFUL=False,
    )  # fmt: skip
    if has_nan(acc):  # perhaps of keys that some rows do not see
        for begin in range(start, tl.minimum(start + facts.BLOCK_Q, q_len), careful.BLOCK_Q):
            part = sweep_keys(
                x, strides, careful, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta,
                visits, counts, visits_batch, block, flat, heads, group, begin, CAREFUL=True,
            )  # fmt: skip
            add_query_rows(dq, part, strides, flat, heads, begin, q_len, careful)
    else:
        add_query_rows(dq, acc, strides, flat, heads, start, q_len, facts)


@triton.jit
def sweep_keys(
    x, strides, facts, q, k, v, dout, lse, delta, visits, counts, visits_batch, block, flat, heads,
    group, row_start, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, without the scale."""
    rows = row_start + tl.arange(0, facts.BLOCK_Q)
    batch, head = flat // heads, flat % heads
    kv_head = flat // group
    q = of_head(q, batch, head, strides.q_batch, strides.q_head, facts.TMA)
    dout = of_head(dout, batch, head, strides.out_batch, strides.out_head, facts.TMA)
    k = of_head(k, batch, head // group, strides.k_batch, strides.k_head, facts.TMA)
    v = of_head(v, batch, head // group, strides.v_batch, strides.v_head, facts.TMA)
    queries = load_queries(q, flat, row_start, x.q_len, facts)
    gradient = load_gradient(dout, flat, row_start, x.q_len, facts)
    mass, slant = load_numbers(lse, delta, strides, batch, head, rows, x.q_len)
    acc = tl.zeros((facts.BLOCK_Q, facts.PADDED), tl.float32)
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
                acc = add_block_to_queries(
                    x, facts, queries, k, v, gradient, mass, slant, acc, batch, head, kv_head,
                    row_start, j * facts.BLOCK_K, first, stop, MASKED=False, CAREFUL=False,
                )  # fmt: skip
        for i in range(start, end - full_stop + full_start):
            if facts.LISTED:
                j = tl.load(listed + i)
            else:
                j = tl.where(i < full_start, i, i - full_start + full_stop)
            acc = add_block_to_queries(
                x, facts, queries, k, v, gradient, mass, slant, acc, batch, head, kv_head,
                row_start, j * facts.BLOCK_K, first, stop, MASKED=True, CAREFUL=CAREFUL,
            )  # fmt: skip
    return acc


@triton.jit
def add_block_to_queries(
    x, facts, queries, k, v, gradient, mass, slant, acc, batch, head, kv_head, row_start, start,
    first, stop, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What the block of keys at ``start`` adds."""
    keys = load_keys(k, kv_head, start, x.k_len, facts)
    values = load_values(v, kv_head, start, x.k_len, facts)
    row = (row_start + tl.arange(0, facts.BLOCK_Q))[:, None]
    col = (start + tl.arange(0, facts.BLOCK_K))[None, :]
    products = tl.dot(queries, keys.T, input_precision=EXACT)
    dweights = tl.dot(gradient, values.T, input_precision=EXACT)
    visible, shift = None, None
    if x.bias is not None:
        shift = load_bias(x, facts, batch, head, row, col)
    if MASKED:
        visible = visible_cells(
            x, facts, batch, row_start, start, row, col, row, col, first[:, None], stop[:, None],
            shift, ROWS=True,
        )  # fmt: skip
    _, _, dproducts = slopes_of(
        x, facts, products, dweights, shift, mass[:, None], slant[:, None], batch, head, row_start,
        start, row, col, visible, MASKED, ROWS=True,
    )  # fmt: skip
    return add_product(acc, dproducts, visible, keys, CAREFUL)


@triton.jit
def add_to_keys(
    q, k, v, dout, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta, dq, dk, dv, visits,
    counts, visits_batch, items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias,
    bias_batch, bias_head, bias_row, slopes, slopes_batch, dropout, q_batch, q_head, k_batch,
    k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head, dq_batch, dq_head, dk_batch,
    dk_head, dv_batch, dv_head, q_len, k_len, heads, group, together, only, only_across,
    facts: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Add to ``dk [B, K, S, D]`` and ``dv [B, K, S, DV]`` of one block of keys of one head.

    Causal ones shrink. With ``facts.BESIDE`` there is no ``dv``: it lies behind ``dk``. With
    ``facts.FUSED`` this adds to ``dq [B, H, T, D]`` as well, block by block. What was added cannot
    be done again, so keys that are not finite are found before. ``only [B * K, only_across]``, if
    given, says for which blocks this is to be done: 1, for dK and dV, 2, for dQ as well.
    """
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, slopes, slopes_batch, dropout, q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        dq_batch, dq_head, dk_batch, dk_head, dv_batch, dv_head,
    )  # fmt: skip
    if facts.BESIDE:
        dv = dk + facts.D
    blocks = (k_len + facts.BLOCK_K - 1) // facts.BLOCK_K
    block, flat = turn_and_head(blocks, together)
    if only is not None:
        left_out = tl.load(only + flat * only_across + block)
        if left_out == 1:
            add_with_care(
                x, strides, facts, careful, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta,
                dq, dk, dv, visits, counts, visits_batch, block, flat, heads, group, ADD=False,
            )  # fmt: skip
        elif left_out == 2:
            add_with_care(
                x, strides, facts, careful, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta,
                dq, dk, dv, visits, counts, visits_batch, block, flat, heads, group, ADD=True,
            )  # fmt: skip
    elif facts.FUSED:
        if is_odd(load_keys(k, flat, block * facts.BLOCK_K, k_len, facts)):
            add_with_care(
                x, strides, facts, careful, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta,
                dq, dk, dv, visits, counts, visits_batch, block, flat, heads, group, ADD=True,
            )  # fmt: skip
        else:
            add_unless_odd(
                x, strides, facts, careful, q, k, v, dout, q_pointer, k_pointer, v_pointer,
                dout_pointer, lse, delta, dq, dk, dv, visits, counts, visits_batch, block, flat,
                heads, group,
            )  # fmt: skip
    else:
        add_unless_odd(
            x, strides, facts, careful, q, k, v, dout, q_pointer, k_pointer, v_pointer,
            dout_pointer, lse, delta, dq, dk, dv, visits, counts, visits_batch, block, flat, heads,
            group,
        )  # fmt: skip


@triton.jit
def add_unless_odd(
    x, strides, facts, careful, q, k, v, dout, q_pointer, k_pointer, v_pointer, dout_pointer, lse,
    delta, dq, dk, dv, visits, counts, visits_batch, block, flat, heads, group,
):  # fmt: skip
    """Add what a block of keys gets; with care if there are NaN, which it may not have seen."""
    start = block * facts.BLOCK_K
    k_part, v_part = sweep_queries(
        x, strides, facts, q, k, v, dout, lse, delta, dq, visits, counts, visits_batch, block, flat,
        heads, group, start, ADD=facts.FUSED, CAREFUL=False,
    )  # fmt: skip
    if has_nan(k_part) | has_nan(v_part):
        add_with_care(
            x, strides, facts, careful, q_pointer, k_pointer, v_pointer, dout_pointer, lse, delta,
            dq, dk, dv, visits, counts, visits_batch, block, flat, heads, group, ADD=False,
        )  # fmt: skip
    else:
        add_key_rows(dk, dv, k_part, v_part, strides, flat, heads // group, start, x.k_len, facts)


@triton.jit
def add_with_care(
    x, strides, facts, careful, q, k, v, dout, lse, delta, dq, dk, dv, visits, counts, visits_batch,
    block, flat, heads, group, ADD: tl.constexpr,
):  # fmt: skip
    """Add what a block of keys gets, in smaller blocks, reading only what is seen."""
    start = block * facts.BLOCK_K
    for begin in range(start, tl.minimum(start + facts.BLOCK_K, x.k_len), careful.BLOCK_K):
        k_part, v_part = sweep_queries(
            x, strides, careful, q, k, v, dout, lse, delta, dq, visits, counts, visits_batch, block,
            flat, heads, group, begin, ADD, CAREFUL=True,
        )  # fmt: skip
        add_key_rows(dk, dv, k_part, v_part, strides, flat, heads // group, begin, x.k_len, careful)


@triton.jit
def sweep_queries(
    x, strides, facts, q, k, v, dout, lse, delta, dq, visits, counts, visits_batch, block, flat,
    heads, group, col_start, ADD: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys, that of the keys without the scale, and of its values."""
    cols = col_start + tl.arange(0, facts.BLOCK_K)
    kv_heads = heads // group
    batch = flat // kv_heads
    k = of_head(k, batch, flat % kv_heads, strides.k_batch, strides.k_head, facts.TMA)
    v = of_head(v, batch, flat % kv_heads, strides.v_batch, strides.v_head, facts.TMA)
    keys = load_keys(k, flat, col_start, x.k_len, facts)
    values = load_values(v, flat, col_start, x.k_len, facts)
    dk = tl.zeros((facts.BLOCK_K, facts.PADDED), tl.float32)
    dv = tl.zeros((facts.BLOCK_K, facts.PADDED_V), tl.float32)
    for member in tl.range(0, group, disable_licm=True):  # what is hoisted takes registers
        head = (flat % kv_heads) * group + member
        for n in range(1 if facts.LISTED else facts.ITEMS):
            if facts.LISTED:
                across = (x.q_len + facts.BLOCK_Q - 1) // facts.BLOCK_Q
                listed, full_start, whole = listed_blocks(
                    visits, counts, visits_batch, batch, block, across
                )
                first, stop = cols, cols
                start, full_stop, end = 0, full_start + whole, full_start + whole
            else:
                listed = visits
                first, stop = interval(x, n, cols, x.q_len, ROWS=False)
                start, full_start, full_stop, end = inner_blocks(
                    first, stop, cols < x.k_len, facts.BLOCK_Q, facts
                )
            if not facts.ALL_PARTIAL:
                for i in range(full_start, full_stop):
                    j = tl.load(listed + i) if facts.LISTED else i
                    dk, dv = add_block_to_keys(
                        x, strides, facts, q, keys, values, dout, lse, delta, dq, dk, dv, batch,
                        head, heads, col_start, j * facts.BLOCK_Q, first, stop, ADD, MASKED=False,
                        CAREFUL=False,
                    )  # fmt: skip
            for i in range(start, end - full_stop + full_start):
                if facts.LISTED:
                    j = tl.load(listed + i)
                else:
                    j = tl.where(i < full_start, i, i - full_start + full_stop)
                dk, dv = add_block_to_keys(
                    x, strides, facts, q, keys, values, dout, lse, delta, dq, dk, dv, batch, head,
                    heads, col_start, j * facts.BLOCK_Q, first, stop, ADD, MASKED=True, CAREFUL=CAREFUL,
                )  # fmt: skip
    return dk, dv


@triton.jit
def add_block_to_keys(
    x, strides, facts, q, keys, values, dout, lse, delta, dq, dk, dv, batch, head, heads, col_start,
    start, first, stop, ADD: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What the block of queries at ``start`` adds; its scores lie transposed, ``[k, q]``."""
    flat = batch * heads + head
    rows = start + tl.arange(0, facts.BLOCK_Q)
    row, col = rows[None, :], (col_start + tl.arange(0, facts.BLOCK_K))[:, None]
    q = of_head(q, batch, head, strides.q_batch, strides.q_head, facts.TMA)
    dout = of_head(dout, batch, head, strides.out_batch, strides.out_head, facts.TMA)
    queries = load_queries(q, flat, start, x.q_len, facts)
    gradient = load_gradient(dout, flat, start, x.q_len, facts)
    mass, slant = load_numbers(lse, delta, strides, batch, head, rows, x.q_len)
    visible, shift = None, None
    if x.bias is not None:
        shift = load_bias(x, facts, batch, head, row, col)
    if MASKED:
        visible = visible_cells(
            x, facts, batch, start, col_start, row, col, col, row, first[:, None], stop[:, None],
            shift, ROWS=False,
        )  # fmt: skip
    # Of each query there are two numbers per column here, many registers: where that can be, they
    # go where the products are summed.
    block: tl.constexpr = [facts.BLOCK_K, facts.BLOCK_Q]
    if facts.SOFTCAP is None and facts.SCALE != 0:
        above = tl.broadcast_to((mass * (-1.0 / (facts.SCALE * LOG2E)))[None, :], block)
        products = tl.dot(keys, queries.T, above, input_precision=EXACT)
        mass = tl.zeros_like(mass)
    else:
        products = tl.dot(keys, queries.T, input_precision=EXACT)
    if facts.DROPPED is None:
        above = tl.broadcast_to(-slant[None, :], block)
        dweights = tl.dot(values, gradient.T, above, input_precision=EXACT)
        slant = tl.zeros_like(slant)
    else:
        dweights = tl.dot(values, gradient.T, input_precision=EXACT)
    weights, _, dproducts = slopes_of(
        x, facts, products, dweights, shift, mass[None, :], slant[None, :], batch, head, start,
        col_start, row, col, visible, MASKED, ROWS=False,
    )  # fmt: skip
    dv = add_product(dv, weights, visible, gradient, CAREFUL)
    dk = add_product(dk, dproducts, visible, queries, CAREFUL)
    if ADD:
        part = tl.zeros((facts.BLOCK_Q, facts.PADDED), tl.float32)
        shown = visible
        if CAREFUL:
            shown = tl.trans(visible)
        part = add_product(part, dproducts.T, shown, keys, CAREFUL) * facts.SCALE
        dims = tl.arange(0, facts.PADDED)
        dq = of_head(dq, batch, head, strides.dq_batch, strides.dq_head, TMA=False)
        place = rows.to(tl.int64)[:, None] * facts.DQ_STEP + dims[None, :]
        inside = (rows < x.q_len)[:, None] & (dims < facts.D)[None, :]
        tl.atomic_add(dq + place, part, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit
def add_to_bias(
    q, k_pointer, v_pointer, dout, lse, delta, dbias, dbias_batch, dbias_head, dbias_row,
    shared_batch, shared_heads, bias_heads, items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles,
    bits, bias, bias_batch, bias_head, bias_row, slopes, slopes_batch, dropout, q_batch, q_head,
    k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head, q_len, k_len, heads,
    group, facts: tl.constexpr,
):  # fmt: skip
    """Add to one block of ``dbias``, like ``bias``, for all batch rows and heads that share it."""
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        bias_row, slopes, slopes_batch, dropout, q_len, k_len,
    )  # fmt: skip
    strides = Strides(
        q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, lse_batch, lse_head,
        None, None, None, None, None, None,
    )  # fmt: skip
    which = tl.program_id(2)
    q_start, k_start = tl.program_id(1) * facts.BLOCK_Q, tl.program_id(0) * facts.BLOCK_K
    rows = q_start + tl.arange(0, facts.BLOCK_Q)
    row, col = rows[:, None], (k_start + tl.arange(0, facts.BLOCK_K))[None, :]
    acc = tl.zeros((facts.BLOCK_Q, facts.BLOCK_K), tl.float32)
    for n in range(shared_batch * shared_heads):
        batch = (which // bias_heads) * shared_batch + n // shared_heads
        head = (which % bias_heads) * shared_heads + n % shared_heads
        flat = batch * heads + head
        k_at_head = of_head(k_pointer, batch, head // group, k_batch, k_head, TMA=False)
        v_at_head = of_head(v_pointer, batch, head // group, v_batch, v_head, TMA=False)
        q_at_head = of_head(q, batch, head, q_batch, q_head, TMA=False)
        dout_at_head = of_head(dout, batch, head, out_batch, out_head, TMA=False)
        keys = load_keys(k_at_head, flat // group, k_start, k_len, facts)
        values = load_values(v_at_head, flat // group, k_start, k_len, facts)
        queries = load_queries(q_at_head, flat, q_start, q_len, facts)
        gradient = load_gradient(dout_at_head, flat, q_start, q_len, facts)
        mass, slant = load_numbers(lse, delta, strides, batch, head, rows, q_len)
        products = tl.dot(queries, keys.T, input_precision=EXACT)
        dweights = tl.dot(gradient, values.T, input_precision=EXACT)
        shift = load_bias(x, facts, batch, head, row, col)
        visible = visible_cells(
            x, facts, batch, q_start, k_start, row, col, row, col, row, row, shift, ROWS=True
        )
        _, dlogits, _ = slopes_of(
            x, facts, products, dweights, shift, mass[:, None], slant[:, None], batch, head, q_start,
            k_start, row, col, visible, MASKED=True, ROWS=True,
        )  # fmt: skip
        acc += dlogits
    first = of_head(
        dbias, which // bias_heads, which % bias_heads, dbias_batch, dbias_head, TMA=False
    )
    place = first + row.to(tl.int64) * dbias_row + bias_columns(x, facts, col)
    inside = (row < q_len) & (col < k_len)
    tl.store(place, acc + tl.load(place, mask=inside), mask=inside)


@triton.jit
def slopes_of(
    x, facts, products, dweights, shift, mass, slant, batch, head, row_start, col_start, rows, cols,
    visible, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Slopes of the loss at one block of scores.

    ``mass`` is ``lse`` in base 2 and ``slant`` is delta, as they broadcast.

    Returns:
        What multiplied V (probabilities, less what dropout took), the slopes at the logits, and
        those at the products of queries and keys but for the scale.
    """
    scores, bend = bent(x, facts, products, shift, batch, head, rows, cols)
    weights = tl.exp2(scores - mass)
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    through = weights
    if facts.DROPPED is not None:
        keep = kept(x, facts, batch, head, row_start, col_start, rows, cols, ROWS)
        dweights *= keep
        through = weights * keep
    dlogits = weights * (dweights - slant)
    if MASKED:
        dlogits = tl.where(visible, dlogits, 0.0)
    dproducts = dlogits
    if facts.SOFTCAP is not None:
        dproducts = dlogits * bend
        if MASKED:
            dproducts = tl.where(visible, dproducts, 0.0)
    return through, dlogits, dproducts


@triton.jit
def load_numbers(lse, delta, strides, batch, head, rows, q_len):
    """``lse`` in base 2, ``inf`` for rows that saw nothing, so that they weigh nothing; delta."""
    lse = of_head(lse, batch, head, strides.lse_batch, strides.lse_head, TMA=False)
    delta = of_head(delta, batch, head, strides.lse_batch, strides.lse_head, TMA=False)
    mass = tl.load(lse + rows, mask=rows < q_len, other=-float("inf")) * LOG2E
    mass = tl.where(mass == -float("inf"), float("inf"), mass)
    return mass, tl.load(delta + rows, mask=rows < q_len, other=0.0)


@triton.jit
def add_query_rows(dq, part, strides, flat, heads, start, q_len, facts):
    """Add the gradient of a block of queries, or write it."""
    rows = start + tl.arange(0, facts.BLOCK_Q)
    dq = of_head(dq, flat // heads, flat % heads, strides.dq_batch, strides.dq_head, TMA=False)
    add_rows(dq, part * facts.SCALE, rows, q_len, facts.D, facts.PADDED, facts.DQ_STEP, facts.FRESH)


@triton.jit
def add_key_rows(dk, dv, k_part, v_part, strides, flat, kv_heads, start, k_len, facts):
    """Add the gradients of a block of keys and of its values, or write them."""
    cols = start + tl.arange(0, facts.BLOCK_K)
    batch, head = flat // kv_heads, flat % kv_heads
    dk = of_head(dk, batch, head, strides.dk_batch, strides.dk_head, TMA=False)
    dv = of_head(dv, batch, head, strides.dv_batch, strides.dv_head, TMA=False)
    add_rows(
        dk, k_part * facts.SCALE, cols, k_len, facts.D, facts.PADDED, facts.DK_STEP, facts.FRESH
    )
    add_rows(dv, v_part, cols, k_len, facts.DV, facts.PADDED_V, facts.DV_STEP, facts.FRESH)


@triton.jit
def add_rows(
    into, part, rows, length, DIM: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    """Add a block to rows of one head, or write it."""
    dims = tl.arange(0, PADDED)
    place = rows.to(tl.int64)[:, None] * STEP + dims[None, :]
    inside = (rows < length)[:, None] & (dims < DIM)[None, :]
    if not FRESH:
        part += tl.load(into + place, mask=inside)
    tl.store(into + place, part, mask=inside)
