"""The backward kernels: probabilities are computed again from the global ``lse``.

Dao, arXiv 2307.08691. One kernel goes along the keys for dQ, another along the queries for dK and
dV, seven products of matrices a block; or the second adds to dQ as well, five products, in an order
that differs from run to run. The gradient of a bias takes a kernel of its own. Plain Triton.
"""

# What a kernel works on has no type in Python.
# ruff: noqa: ANN001, ANN202, N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ring_jax_gpu._scores import (
    EXACT,
    LOG2E,
    Options,
    add_product,
    bent,
    has_nan,
    inner_blocks,
    interval,
    is_odd,
    kept,
    listed_blocks,
    load_gradient,
    load_keys,
    load_queries,
    load_values,
    place_of,
    turn_and_head,
    visible_cells,
)


@triton.jit
def add_to_queries(
    q, k, v, dout, q_pointer, kv, dout_pointer, lse, delta, dq, visits, counts, visits_batch, items,
    cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head, slopes,
    slopes_batch, dropout, q_len, k_len, heads, group, together, facts: tl.constexpr,
    careful: tl.constexpr,
):  # fmt: skip
    """Add to ``dq [B * H, T, D]`` of one block of queries of one head; as ``attend`` goes.

    ``dout [B * H, T, DV]``; ``lse`` and ``delta`` are ``[B * H, T]``.
    """
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        slopes, slopes_batch, dropout, q_len, k_len,
    )  # fmt: skip
    blocks = (q_len + facts.BLOCK_Q - 1) // facts.BLOCK_Q
    turn, flat = turn_and_head(blocks, together)
    block = blocks - 1 - turn
    start = block * facts.BLOCK_Q
    acc = sweep_keys(
        x, facts, q, k, v, dout, lse, delta, visits, counts, visits_batch, block, flat, heads, group,
        start, CAREFUL=False,
    )  # fmt: skip
    if has_nan(acc):  # perhaps of keys that some rows do not see
        for begin in range(start, tl.minimum(start + facts.BLOCK_Q, q_len), careful.BLOCK_Q):
            part = sweep_keys(
                x, careful, q_pointer, kv, kv, dout_pointer, lse, delta, visits, counts,
                visits_batch, block, flat, heads, group, begin, CAREFUL=True,
            )  # fmt: skip
            add_query_rows(dq, part, flat, begin, q_len, careful)
    else:
        add_query_rows(dq, acc, flat, start, q_len, facts)


@triton.jit
def sweep_keys(
    x, facts, q, k, v, dout, lse, delta, visits, counts, visits_batch, block, flat, heads, group,
    row_start, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries, without the scale."""
    rows = row_start + tl.arange(0, facts.BLOCK_Q)
    queries = load_queries(q, flat, row_start, x.q_len, facts)
    gradient = load_gradient(dout, flat, row_start, x.q_len, facts)
    mass, slant = load_numbers(lse, delta, flat, rows, x.q_len)
    batch, head = flat // heads, flat % heads
    kv_head = flat // group
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
                    x, facts, queries, k, v, gradient, mass, slant, acc, batch, head, kv_head, rows,
                    j * facts.BLOCK_K, first, stop, MASKED=False, CAREFUL=False,
                )  # fmt: skip
        for i in range(start, end - full_stop + full_start):
            if facts.LISTED:
                j = tl.load(listed + i)
            else:
                j = tl.where(i < full_start, i, i - full_start + full_stop)
            acc = add_block_to_queries(
                x, facts, queries, k, v, gradient, mass, slant, acc, batch, head, kv_head, rows,
                j * facts.BLOCK_K, first, stop, MASKED=True, CAREFUL=CAREFUL,
            )  # fmt: skip
    return acc


@triton.jit
def add_block_to_queries(
    x, facts, queries, k, v, gradient, mass, slant, acc, batch, head, kv_head, rows, start, first,
    stop, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What the block of keys at ``start`` adds."""
    keys = load_keys(k, kv_head, start, x.k_len, facts)
    values = load_values(v, kv_head, start, x.k_len, facts)
    row, col = rows[:, None], (start + tl.arange(0, facts.BLOCK_K))[None, :]
    products = tl.dot(queries, keys.T, input_precision=EXACT)
    dweights = tl.dot(gradient, values.T, input_precision=EXACT)
    visible = None
    if MASKED:
        visible = visible_cells(
            x, facts, batch, head, row, col, row, col, first[:, None], stop[:, None], ROWS=True
        )
    _, _, dproducts = slopes_of(
        x, facts, products, dweights, mass[:, None], slant[:, None], batch, head, row, col, visible,
        MASKED,
    )  # fmt: skip
    return add_product(acc, dproducts, visible, keys, CAREFUL)


@triton.jit
def add_to_keys(
    q, k, v, dout, q_pointer, kv, dout_pointer, lse, delta, dq, dkv, visits, counts, visits_batch,
    items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
    slopes, slopes_batch, dropout, q_len, k_len, heads, group, together, only, only_across,
    facts: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Add to ``dkv [B * K, S, D + DV]`` of one block of keys of one head; causal ones shrink.

    With ``facts.FUSED`` also to ``dq [B * H, T, D]``, block by block. What was added cannot be done
    again, so keys that are not finite are found before. ``only [B * K, only_across]``, if given,
    says for which blocks this is to be done: 1, for dK and dV, 2, for dQ as well.
    """
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        slopes, slopes_batch, dropout, q_len, k_len,
    )  # fmt: skip
    blocks = (k_len + facts.BLOCK_K - 1) // facts.BLOCK_K
    block, flat = turn_and_head(blocks, together)
    if only is not None:
        left_out = tl.load(only + flat * only_across + block)
        if left_out == 1:
            add_with_care(
                x, facts, careful, q_pointer, kv, dout_pointer, lse, delta, dq, dkv, visits, counts,
                visits_batch, block, flat, heads, group, ADD=False,
            )  # fmt: skip
        elif left_out == 2:
            add_with_care(
                x, facts, careful, q_pointer, kv, dout_pointer, lse, delta, dq, dkv, visits, counts,
                visits_batch, block, flat, heads, group, ADD=True,
            )  # fmt: skip
    elif facts.FUSED:
        if is_odd(load_keys(k, flat, block * facts.BLOCK_K, k_len, facts)):
            add_with_care(
                x, facts, careful, q_pointer, kv, dout_pointer, lse, delta, dq, dkv, visits, counts,
                visits_batch, block, flat, heads, group, ADD=True,
            )  # fmt: skip
        else:
            add_unless_odd(
                x, facts, careful, q, k, v, dout, q_pointer, kv, dout_pointer, lse, delta, dq,
                dkv, visits, counts, visits_batch, block, flat, heads, group,
            )  # fmt: skip
    else:
        add_unless_odd(
            x, facts, careful, q, k, v, dout, q_pointer, kv, dout_pointer, lse, delta, dq, dkv,
            visits, counts, visits_batch, block, flat, heads, group,
        )  # fmt: skip


@triton.jit
def add_unless_odd(
    x, facts, careful, q, k, v, dout, q_pointer, kv, dout_pointer, lse, delta, dq, dkv, visits,
    counts, visits_batch, block, flat, heads, group,
):  # fmt: skip
    """Add what a block of keys gets; with care if there are NaN, which it may not have seen."""
    start = block * facts.BLOCK_K
    dk, dv = sweep_queries(
        x, facts, q, k, v, dout, lse, delta, dq, visits, counts, visits_batch, block, flat, heads,
        group, start, ADD=facts.FUSED, CAREFUL=False,
    )  # fmt: skip
    if has_nan(dk) | has_nan(dv):
        add_with_care(
            x, facts, careful, q_pointer, kv, dout_pointer, lse, delta, dq, dkv, visits, counts,
            visits_batch, block, flat, heads, group, ADD=False,
        )  # fmt: skip
    else:
        add_key_rows(dkv, dk, dv, flat, start, x.k_len, facts)


@triton.jit
def add_with_care(
    x, facts, careful, q, kv, dout, lse, delta, dq, dkv, visits, counts, visits_batch, block, flat,
    heads, group, ADD: tl.constexpr,
):  # fmt: skip
    """Add what a block of keys gets, in smaller blocks, reading only what is seen."""
    start = block * facts.BLOCK_K
    for begin in range(start, tl.minimum(start + facts.BLOCK_K, x.k_len), careful.BLOCK_K):
        dk, dv = sweep_queries(
            x, careful, q, kv, kv, dout, lse, delta, dq, visits, counts, visits_batch, block, flat,
            heads, group, begin, ADD, CAREFUL=True,
        )  # fmt: skip
        add_key_rows(dkv, dk, dv, flat, begin, x.k_len, careful)


@triton.jit
def sweep_queries(
    x, facts, q, k, v, dout, lse, delta, dq, visits, counts, visits_batch, block, flat, heads, group,
    col_start, ADD: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys, that of the keys without the scale, and of its values."""
    cols = col_start + tl.arange(0, facts.BLOCK_K)
    keys = load_keys(k, flat, col_start, x.k_len, facts)
    values = load_values(v, flat, col_start, x.k_len, facts)
    kv_heads = heads // group
    batch = flat // kv_heads
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
                        x, facts, q, keys, values, dout, lse, delta, dq, dk, dv, batch, head, heads,
                        cols, j * facts.BLOCK_Q, first, stop, ADD, MASKED=False, CAREFUL=False,
                    )  # fmt: skip
            for i in range(start, end - full_stop + full_start):
                if facts.LISTED:
                    j = tl.load(listed + i)
                else:
                    j = tl.where(i < full_start, i, i - full_start + full_stop)
                dk, dv = add_block_to_keys(
                    x, facts, q, keys, values, dout, lse, delta, dq, dk, dv, batch, head, heads,
                    cols, j * facts.BLOCK_Q, first, stop, ADD, MASKED=True, CAREFUL=CAREFUL,
                )  # fmt: skip
    return dk, dv


@triton.jit
def add_block_to_keys(
    x, facts, q, keys, values, dout, lse, delta, dq, dk, dv, batch, head, heads, cols, start, first,
    stop, ADD: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """What the block of queries at ``start`` adds; its scores lie transposed, ``[k, q]``."""
    flat = batch * heads + head
    rows = start + tl.arange(0, facts.BLOCK_Q)
    row, col = rows[None, :], cols[:, None]
    queries = load_queries(q, flat, start, x.q_len, facts)
    gradient = load_gradient(dout, flat, start, x.q_len, facts)
    mass, slant = load_numbers(lse, delta, flat, rows, x.q_len)
    visible = None
    if MASKED:
        visible = visible_cells(
            x, facts, batch, head, row, col, col, row, first[:, None], stop[:, None], ROWS=False
        )
    # Of each query there are two numbers a column here, many registers: where that can be, they go
    # where the products are summed.
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
        x, facts, products, dweights, mass[None, :], slant[None, :], batch, head, row, col, visible,
        MASKED,
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
        place = place_of(flat, rows, x.q_len, facts.Q_HEADS)[:, None] * facts.D + dims[None, :]
        inside = (rows < x.q_len)[:, None] & (dims < facts.D)[None, :]
        tl.atomic_add(dq + place, part, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit
def add_to_bias(
    q, kv, dout, lse, delta, dbias, shared_batch, shared_heads, bias_heads, items, cells, q_ids,
    k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head, slopes, slopes_batch,
    dropout, q_len, k_len, heads, group, facts: tl.constexpr,
):  # fmt: skip
    """Add to one block of ``dbias``, like ``bias``, for all batch rows and heads that share it."""
    x = Options(
        items, cells, q_ids, k_ids, q_at, k_at, q_index, tiles, bits, bias, bias_batch, bias_head,
        slopes, slopes_batch, dropout, q_len, k_len,
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
        keys = load_keys(kv, flat // group, k_start, k_len, facts)
        values = load_values(kv, flat // group, k_start, k_len, facts)
        queries = load_queries(q, flat, q_start, q_len, facts)
        gradient = load_gradient(dout, flat, q_start, q_len, facts)
        mass, slant = load_numbers(lse, delta, flat, rows, q_len)
        products = tl.dot(queries, keys.T, input_precision=EXACT)
        dweights = tl.dot(gradient, values.T, input_precision=EXACT)
        visible = visible_cells(x, facts, batch, head, row, col, row, col, row, row, ROWS=True)
        _, dlogits, _ = slopes_of(
            x, facts, products, dweights, mass[:, None], slant[:, None], batch, head, row, col,
            visible, MASKED=True,
        )  # fmt: skip
        acc += dlogits
    first = dbias + which.to(tl.int64) * q_len * k_len
    place = first + row.to(tl.int64) * k_len + col
    inside = (row < q_len) & (col < k_len)
    tl.store(place, acc + tl.load(place, mask=inside), mask=inside)


@triton.jit
def slopes_of(
    x, facts, products, dweights, mass, slant, batch, head, rows, cols, visible,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Slopes of the loss at one block of scores.

    ``mass`` is ``lse`` in base 2 and ``slant`` is delta, as they broadcast.

    Returns:
        What multiplied V (probabilities, less what dropout took), the slopes at the logits, and
        those at the products of queries and keys but for the scale.
    """
    scores, bend = bent(x, facts, products, batch, head, rows, cols)
    weights = tl.exp2(scores - mass)
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    through = weights
    if facts.DROPPED is not None:
        keep = kept(x, facts, batch, head, rows, cols)
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
def load_numbers(lse, delta, flat, rows, q_len):
    """``lse`` in base 2, ``inf`` for rows that saw nothing, so that they weigh nothing; delta."""
    place, real = flat.to(tl.int64) * q_len + rows, rows < q_len
    mass = tl.load(lse + place, mask=real, other=-float("inf")) * LOG2E
    mass = tl.where(mass == -float("inf"), float("inf"), mass)
    return mass, tl.load(delta + place, mask=real, other=0.0)


@triton.jit
def add_query_rows(dq, part, flat, start, q_len, facts):
    """Add the gradient of a block of queries."""
    rows = start + tl.arange(0, facts.BLOCK_Q)
    add_rows(
        dq, part * facts.SCALE, flat, rows, q_len, facts.D, facts.PADDED, 0, facts.D,
        facts.Q_HEADS, FRESH=False,
    )  # fmt: skip


@triton.jit
def add_key_rows(dkv, dk, dv, flat, start, k_len, facts):
    """Add the gradients of a block of keys and of its values, which lie side by side."""
    cols = start + tl.arange(0, facts.BLOCK_K)
    dims: tl.constexpr = facts.D + facts.DV
    add_rows(
        dkv, dk * facts.SCALE, flat, cols, k_len, facts.D, facts.PADDED, 0, dims, facts.KV_HEADS,
        facts.FRESH,
    )  # fmt: skip
    add_rows(
        dkv, dv, flat, cols, k_len, facts.DV, facts.PADDED_V, facts.D, dims, facts.KV_HEADS,
        facts.FRESH,
    )  # fmt: skip


@triton.jit
def add_rows(
    into, part, head, rows, length, DIM: tl.constexpr, PADDED: tl.constexpr, AT: tl.constexpr,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Add a block to rows of ``[heads, length, STRIDE]``, dims ``AT`` and on, or write it."""
    dims = tl.arange(0, PADDED)
    place = place_of(head, rows, length, HEADS)[:, None] * STRIDE + AT + dims[None, :]
    inside = (rows < length)[:, None] & (dims < DIM)[None, :]
    if not FRESH:
        part += tl.load(into + place, mask=inside)
    tl.store(into + place, part, mask=inside)
