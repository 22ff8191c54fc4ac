"""The warp-specialised backward kernel for Hopper: dQ, dK and dV in one kernel.

A program (thread block) has a block of keys, a tile, and visits the queries that see it, with five
matrix products a block of queries. It adds to dQ in memory, in an order that differs from run to
run. A producer warp fetches and two groups of warps compute, as in ``forward``. Like that it is
written in Gluon and imports no JAX.

If the work items of all ranks are rectangles whose queries see all their keys, the tiles of a last
round may be split (as in Stream-K, Osama et al., arXiv 2301.03598): one program does the first
queries of each, and programs without a tile, the helpers, do the others, of several tiles. Nearly
all programs then visit the same queries at the same time, which the L2 cache needs. The parts'
dK/dV are added up in memory, and the program that finishes a tile last writes the sum.
"""


# The arguments and values of kernels have no types in Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ring_jax_gpu.hopper.common import (
    Bands,
    Sizes,
    columns_of,
    of_batch_row,
    seen_by,
    swizzled_block_and_head,
    visited,
)
from ring_jax_gpu.hopper.dropout import (
    CALLS,
    kept_of_calls,
    kept_scores,
    packed_calls,
    seed_of,
)
from ring_jax_gpu.hopper.scores import (
    Options,
    capped,
    keep_rate,
    positions_of,
    slope_of,
    unit_of,
)
from ring_jax_gpu.hopper.stream_k import StreamKBackward

KEYS = gl.constexpr(128)  # keys per block, shared by two groups of warps
_INF = gl.constexpr(float("inf"))
# Positions of the fields in a row of ``stream_k``.
FIRST, BUSY, SPLIT, OWN, HELPERS, Q_FIRST, Q_MANY = (
    gl.constexpr(StreamKBackward._fields.index(name))
    for name in ("first", "busy", "split", "own", "helpers", "q_first", "q_many")
)


@gluon.jit
def bwd_hopper(
    q, k, v, dout, neg_lse, neg_delta, dq, items, cells, cells_batch, slopes, slopes_batch, q_at,
    k_at, dropout, q_index, k_groups, stream_k, marks, parts, dk, dv, flags, q_len, k_len, batch, heads, group,
    heads_per_swizzle, consts: gl.constexpr,
):  # fmt: skip
    """Add the gradients of blocks of 128 keys of one head to ``dq``, ``dk`` and ``dv``.

    - ``q``, ``dout``: descriptors of ``[2, B * T / 2, H * D]``, even tokens and odd ones; ``T`` is
      padded to an even number. Blocks hold queries in this order, too: see ``in_order``.
    - ``dq``: descriptor of ``[B * T, H * D]``, float32, in the order of the tokens.
    - ``k``, ``v``: descriptors of ``[B * S, K * D]``, or both of ``[B * S, K * 2 D]``, where values
      lie beside their keys.
    - ``neg_lse``, ``neg_delta``: descriptors of ``[B * H * T]``, each head padded to whole blocks,
      which hold even tokens first, too: ``-lse / scale``, ``-inf`` for queries that see nothing,
      and ``-delta``. Products of Q and K, which are not scaled yet, and of dO and V start from
      these; but with a soft cap the former are ``(cap - lse) log2(e)``, to be added
      to exponents.
    - ``items``, ``cells``, ``cells_batch``: the bounds of the work items and the documents, see
      ``Bands``.
    - ``slopes`` to ``k_groups``: see ``Options``.
    - ``dk``, ``dv``: ``[B, S, K, D]``; or ``dk`` is ``[B, S, K, 2 D]`` and there is no ``dv``.
    - ``flags [B * K, blocks]``: set to 1 where dK and dV are left out because of NaN, and to 2
      where dQ is left out, too, because of keys that are not finite. ``run`` launches a plain
      Triton kernel for these blocks afterwards.
    - ``stream_k``: the fields of a ``StreamKBackward``, with ``consts.STREAM_K``; then
      ``parts [split, 2, 128, D]``, sums of parts of split tiles, and ``marks [split]``, counters of
      finished parts, are zeros at first.
    """
    stages: gl.constexpr = consts.STAGES
    k_tile = gl.allocate_shared_memory(k.dtype, [KEYS, consts.D], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [KEYS, consts.D], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [stages, 2, consts.BLOCK // 2, consts.D], q.layout)
    g_tiles = gl.allocate_shared_memory(
        q.dtype, [stages, 2, consts.BLOCK // 2, consts.D], dout.layout
    )
    m_tiles = gl.allocate_shared_memory(gl.float32, [stages, consts.BLOCK], neg_lse.layout)
    d_tiles = gl.allocate_shared_memory(gl.float32, [stages, consts.BLOCK], neg_delta.layout)
    s_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    s_tile = gl.allocate_shared_memory(q.dtype, [KEYS, consts.BLOCK], s_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, consts.BLOCK, consts.D], dq.layout)
    # The producer waits for `free` before it overwrites a tile, the consumers for `full` before
    # they read it. dO and delta have barriers of their own, as they are free before the queries.
    kv_full, kv_free = mbarrier.allocate_mbarrier(), mbarrier.allocate_mbarrier()
    q_full, q_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    g_full, g_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_free, count=1)
    for n in gl.static_range(stages):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_free.index(n), count=1)
        mbarrier.init(g_full.index(n), count=1)
        mbarrier.init(g_free.index(n), count=1)
    tiles = (k_tile, v_tile, q_tiles, g_tiles, m_tiles, d_tiles)
    bars = (kv_full, kv_free, q_full, q_free, g_full, g_free)
    bands = Bands(items, cells, k_len if cells is not None else None, cells_batch)
    options = Options(slopes, slopes_batch, q_at, k_at, dropout, q_index, k_groups)
    sizes = Sizes(q_len, k_len, batch, heads, group, heads_per_swizzle, stream_k)
    outputs = (dk, dk if consts.KV_PACKED else dv, flags, marks, parts)
    gl.warp_specialize(
        [
            (
                bwd_consumer,
                (tiles, s_tile, dq_tiles, dq, bars, bands, options, outputs, sizes, consts),
            ),
            (bwd_producer, (q, k, v, dout, neg_lse, neg_delta, tiles, bars, bands, sizes, consts)),
        ],
        [1],
        [24],
    )


@gluon.jit
def work_of(sizes, consts: gl.constexpr):
    """Return this program's work as ``(tile, pieces, begin, end, skipped, length)``.

    It computes pieces of ``pieces`` consecutive tiles, from ``tile`` on. Of each tile ``length``
    blocks of queries count, over all heads of the group, after the first ``skipped``. Numbered
    through all these tiles, the program does blocks ``[begin, end)``.
    """
    tile, pieces = gl.program_id(0), 1
    begin, skipped = 0, 0
    length = sizes.group * ((sizes.q_len + consts.BLOCK - 1) // consts.BLOCK)
    end = length
    if consts.STREAM_K:
        whole, split, own, helpers = stream_k_of(sizes)
        length = sizes.group * gl.load(sizes.stream_k + Q_MANY)
        split_index = tile - whole
        tiles = (sizes.k_len + KEYS - 1) // KEYS * sizes.batch * (sizes.heads // sizes.group)
        if split_index >= split + helpers:  # a tile of keys that no query sees
            tile -= helpers
            pieces = gl.where(tile < tiles, 1, 0)
        elif split_index >= split:  # a helper: the rests of all split tiles are divided evenly
            skipped = own
            length -= own
            begin = (split_index - split) * split * length // helpers
            end = (split_index - split + 1) * split * length // helpers
            tile = whole + begin // length
            end -= begin // length * length
            begin = begin % length
            pieces = (end + length - 1) // length
        else:
            end = gl.where(split_index >= 0, own, length)
    return tile, pieces, begin, end, skipped, length


@gluon.jit
def piece_of(n, tile, begin, end, skipped, length, sizes, consts: gl.constexpr):
    """Return piece ``n`` of a program's work as ``(block, flat, part, part_stop)``.

    That is the block of keys, the K/V head over all batch rows, and the range of blocks of queries.
    """
    part = skipped + gl.maximum(begin - n * length, 0)
    part_stop = skipped + gl.minimum(end - n * length, length)
    block, flat = keys_of(tile + n, sizes, consts)
    return block, flat, part, part_stop


@gluon.jit
def stream_k_of(sizes):
    """Return ``(whole, split, own, helpers)``: the number of tiles not split, and the schedule."""
    split = gl.load(sizes.stream_k + SPLIT)
    whole = gl.load(sizes.stream_k + BUSY) * sizes.batch * (sizes.heads // sizes.group) - split
    return whole, split, gl.load(sizes.stream_k + OWN), gl.load(sizes.stream_k + HELPERS)


@gluon.jit
def keys_of(tile, sizes, consts: gl.constexpr):
    """Return the block of keys of a tile, and its K/V head; keys that are seen come first."""
    blocks = (sizes.k_len + KEYS - 1) // KEYS
    if consts.STREAM_K:
        first, busy = gl.load(sizes.stream_k + FIRST), gl.load(sizes.stream_k + BUSY)
        seen = busy * sizes.batch * (sizes.heads // sizes.group)
        if tile < seen:
            block, flat = swizzled_block_and_head(tile, busy, sizes.heads_per_swizzle)
            block += first
        else:
            block, flat = swizzled_block_and_head(
                tile - seen, blocks - busy, sizes.heads_per_swizzle
            )
            block += gl.where(block >= first, busy, 0)
    else:
        block, flat = swizzled_block_and_head(tile, blocks, sizes.heads_per_swizzle)
    return block, flat


@gluon.jit
def seen_in_part(
    bands, item, start, part, part_stop, member, sizes, consts: gl.constexpr,
):  # fmt: skip
    """Return :func:`visited` within blocks of queries ``[part, part_stop)``, for one query head.

    They see the tile of keys that begins at ``start``. Blocks are numbered through all heads of the
    group, of which ``member`` is one.
    """
    stop = gl.minimum(start + KEYS, sizes.k_len)
    low, whole_low, whole_high, high = visited(
        bands, item, start, stop, consts.BLOCK, ROWS_OUTSIDE=False
    )
    # A tile that reaches beyond the keys holds those of the next batch row: all of it needs a mask.
    whole_high = gl.where(start + KEYS > stop, whole_low, whole_high)
    if consts.STREAM_K:
        before = member * gl.load(sizes.stream_k + Q_MANY) - gl.load(sizes.stream_k + Q_FIRST)
        low = gl.maximum(low, part - before)
        high = gl.maximum(gl.minimum(high, part_stop - before), low)
        whole_low = gl.minimum(gl.maximum(whole_low, low), high)
        whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def turn_of(block, whole_low, whole_high, consts: gl.constexpr):
    """Return how many of a tile's whole blocks it visits last, instead of first.

    Where all tiles see the same queries, each begins a tile's length behind the one before it. The
    programs that run at once then add to dQ of different queries, and still read the same ones from
    the L2 cache. A causal mask does that by itself.
    """
    turn = 0
    if consts.STREAM_K:
        turn = block * (KEYS // consts.BLOCK) % gl.maximum(whole_high - whole_low, 1)
    return turn


@gluon.jit
def turned(n, low, high, turn):
    """Return the ``n``-th block of ``[low, high)``, of which the first ``turn`` come last."""
    block = low + n + turn
    return gl.where(block < high, block, block - (high - low))


@gluon.jit
def nth_block(n, low, whole_low, whole_high, high, turn):
    """Return the ``n``-th block of ``[low, high)``: first those that need a mask, then the others.

    ``turn`` is that of :func:`turned`, for the others.
    """
    partial = low + n + gl.where(low + n < whole_low, 0, whole_high - whole_low)
    return gl.where(partial < high, partial, turned(partial - high, whole_low, whole_high, turn))


@gluon.jit
def bwd_producer(
    q, k, v, dout, neg_lse, neg_delta, tiles, bars, bands, sizes, consts: gl.constexpr
):
    """Run the producer warp: fetch a block of keys and values, then the queries that see it."""
    k_tile, v_tile, q_tiles, g_tiles, m_tiles, d_tiles = tiles
    kv_full, kv_free, q_full, q_free, g_full, g_free = bars
    kv_heads = sizes.heads // sizes.group
    padded = (sizes.q_len + consts.BLOCK - 1) // consts.BLOCK * consts.BLOCK
    tile, pieces, begin, end, skipped, length = work_of(sizes, consts)
    # Blocks of queries are numbered through all pieces by `count`, here and by the consumers, so
    # that both find a block's slot and phase. The producer is ahead by as many as there are slots.
    count = 0
    for n in range(pieces):
        block, flat, part, part_stop = piece_of(n, tile, begin, end, skipped, length, sizes, consts)
        b, kv_head = flat // kv_heads, flat % kv_heads
        row_bands = of_batch_row(bands, b)
        start = block * KEYS
        of_keys, of_values = columns_of(kv_head, consts)
        # The consumers are done with the piece before: its keys and values may be overwritten.
        mbarrier.wait(kv_free, (n & 1) ^ 1)
        mbarrier.expect(kv_full, k.nbytes_per_cta + v.nbytes_per_cta)
        tma.async_load(k, [b * sizes.k_len + start, of_keys], kv_full, k_tile)
        tma.async_load(v, [b * sizes.k_len + start, of_values], kv_full, v_tile)
        for member in range(sizes.group):
            head = kv_head * sizes.group + member
            for item in range(consts.ITEMS):
                low, whole_low, whole_high, high = seen_in_part(
                    row_bands, item, start, part, part_stop, member, sizes, consts
                )
                turn = turn_of(block, whole_low, whole_high, consts)
                for i in range(high - low):
                    row = nth_block(i, low, whole_low, whole_high, high, turn) * consts.BLOCK
                    slot = count % consts.STAGES
                    phase = ((count // consts.STAGES) & 1) ^ 1
                    # Queries and lse of this slot have been used: fetch the next ones over them ...
                    mbarrier.wait(q_free.index(slot), phase)
                    mbarrier.expect(q_full.index(slot), q.nbytes_per_cta + neg_lse.nbytes_per_cta)
                    number, column = (b * sizes.heads + head) * padded + row, head * consts.D
                    pair = b * ((sizes.q_len + 1) // 2) + row // 2
                    tma.async_load(q, [0, pair, column], q_full.index(slot), q_tiles.index(slot))
                    tma.async_load(neg_lse, [number], q_full.index(slot), m_tiles.index(slot))
                    # ... and the same for dO and delta, which are free earlier.
                    mbarrier.wait(g_free.index(slot), phase)
                    mbarrier.expect(
                        g_full.index(slot), dout.nbytes_per_cta + neg_delta.nbytes_per_cta
                    )
                    tma.async_load(
                        dout,
                        [0, pair, column],
                        g_full.index(slot),
                        g_tiles.index(slot),
                    )
                    tma.async_load(neg_delta, [number], g_full.index(slot), d_tiles.index(slot))
                    count += 1


@gluon.jit
def bwd_consumer(
    tiles, s_tile, dq_tiles, dq, bars, bands, options, outputs, sizes, consts: gl.constexpr,
):  # fmt: skip
    """Run the consumer warps: compute dK and dV of each piece, and add to dQ in memory."""
    k_tile, v_tile, q_tiles, g_tiles, m_tiles, d_tiles = tiles
    kv_full, kv_free, q_full, q_free, g_full, g_free = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, consts.D, 16])
    kv_heads = sizes.heads // sizes.group
    tile, pieces, begin, end, skipped, length = work_of(sizes, consts)
    count = 0
    for n in range(pieces):
        block, flat, part, part_stop = piece_of(n, tile, begin, end, skipped, length, sizes, consts)
        b, kv_head = flat // kv_heads, flat % kv_heads
        row_bands = of_batch_row(bands, b)
        start = block * KEYS
        cols = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, s_layout))
        dk = gl.zeros([KEYS, consts.D], gl.float32, layout=o_layout)
        dv = gl.zeros([KEYS, consts.D], gl.float32, layout=o_layout)
        # Keys and values stay in shared memory until the piece is done; queries stream past. They
        # have one slot, so the n-th piece has the parity n & 1.
        mbarrier.wait(kv_full, n & 1)
        nonfinite = has_nonfinite(k_tile, consts)
        k_at = positions_of(options.k_at, cols, sizes.k_len, consts)
        groups = start // 4 + gl.arange(0, KEYS // 4, layout=gl.SliceLayout(1, CALLS))
        if consts.DROPPED is not None:
            groups = gl.load(options.k_groups + groups, mask=groups * 4 < sizes.k_len, other=0)
        # dK and dV stay in registers over all query heads of the group.
        for member in range(sizes.group):
            head = kv_head * sizes.group + member
            slope = slope_of(options, b * sizes.heads + head, sizes.heads, consts)
            seed = seed_of(options.dropout, b, head, consts)
            for item in range(consts.ITEMS):
                low, whole_low, whole_high, high = seen_in_part(
                    row_bands, item, start, part, part_stop, member, sizes, consts
                )
                first, stop = seen_by(row_bands, item, cols, ROWS_OUTSIDE=False)
                of_keys = (options, slope, k_at, seed, groups, sizes.q_len, first, stop)
                partial = high - low - (whole_high - whole_low)
                for i in range(partial):
                    row = nth_block(i, low, whole_low, whole_high, high, 0) * consts.BLOCK
                    dk, dv = add_grads_of_block(
                        tiles, s_tile, dq_tiles, dq, bars, count, dk, dv, nonfinite, row,
                        b * sizes.q_len, head, of_keys, True, consts,
                    )  # fmt: skip
                    count += 1
                turn = turn_of(block, whole_low, whole_high, consts)
                for i in range(whole_high - whole_low):
                    row = turned(i, whole_low, whole_high, turn) * consts.BLOCK
                    dk, dv = add_grads_of_block(
                        tiles, s_tile, dq_tiles, dq, bars, count, dk, dv, nonfinite, row,
                        b * sizes.q_len, head, of_keys, False, consts,
                    )  # fmt: skip
                    count += 1
        # The producer may fetch the next piece's keys and values.
        mbarrier.arrive(kv_free, count=1)
        is_whole = True
        # Other programs add to a split tile, too; the one that is last stores the sums.
        if consts.STREAM_K:
            whole, split, own, helpers = stream_k_of(sizes)
            if (tile + n >= whole) & (tile + n < whole + split):
                dk, dv, is_whole = add_part(outputs, tile + n, dk, dv, sizes, o_layout, consts)
        if is_whole:
            store_key_grads(outputs, block, flat, nonfinite, dk, dv, sizes, o_layout, consts)
    tma.store_wait(0)


@gluon.jit
def parts_of(split_index, sizes):
    """Return the number of programs that compute a split tile: its first part's, and helpers."""
    whole, split, own, helpers = stream_k_of(sizes)
    rest = sizes.group * gl.load(sizes.stream_k + Q_MANY) - own
    # The helper of a block of queries is the last one that begins no later.
    first = ((split_index * rest + 1) * helpers - 1) // (split * rest)
    last = ((split_index + 1) * rest * helpers - 1) // (split * rest)
    return last - first + 2


@gluon.jit
def add_part(outputs, tile, dk, dv, sizes, layout: gl.constexpr, consts: gl.constexpr):
    """Add dK and dV of a part of a split tile to the sums in memory, and count the part.

    Returns ``(dk, dv, True)`` with the sums to the program that counts the last part.
    """
    _, _, _, marks, parts = outputs
    whole, split, own, helpers = stream_k_of(sizes)
    split_index = tile - whole
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, consts.D, layout=gl.SliceLayout(0, layout))
    sums = parts + split_index * (2 * KEYS * consts.D) + rows[:, None] * consts.D + dims[None, :]
    gl.atomic_add(sums, dk, sem="relaxed")
    gl.atomic_add(sums + KEYS * consts.D, dv, sem="relaxed")
    # All warps have added before the part counts; the count orders it before the last one's loads.
    gl.barrier()
    is_last = gl.atomic_add(marks + split_index, 1) == parts_of(split_index, sizes) - 1
    if is_last:
        dk = gl.load(sums)
        dv = gl.load(sums + KEYS * consts.D)
    return dk, dv, is_last


@gluon.jit
def store_key_grads(
    outputs, block, flat, nonfinite, dk, dv, sizes, layout: gl.constexpr, consts: gl.constexpr
):
    """Write dK and dV of a block of keys, or only set its flag if there is NaN."""
    to_k, to_v, flags, _, _ = outputs
    blocks = (sizes.k_len + KEYS - 1) // KEYS
    kv_heads = sizes.heads // sizes.group
    b, kv_head = flat // kv_heads, flat % kv_heads
    is_nan = gl.where((dk != dk) | (dv != dv), 1, 0)  # noqa: PLR0124 - true for NaN alone
    left_out = gl.where(nonfinite > 0, 2, gl.max(gl.max(is_nan, 1), 0))
    gl.store(flags + flat * blocks + block, left_out)
    if left_out == 0:
        rows = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
        dims = gl.arange(0, consts.D, layout=gl.SliceLayout(0, layout))
        real = (rows < sizes.k_len)[:, None]
        of_keys, of_values = columns_of(kv_head, consts)
        step: gl.constexpr = 2 * consts.D if consts.KV_PACKED else consts.D
        offsets = ((b * sizes.k_len + rows).to(gl.int64) * (kv_heads * step))[:, None] + dims[
            None, :
        ]
        new_k, new_v = dk * consts.SCALE, dv * (1.0 / keep_rate(consts))
        if not consts.OVERWRITE:
            new_k += gl.load(to_k + of_keys + offsets, mask=real, other=0.0)
            new_v += gl.load(to_v + of_values + offsets, mask=real, other=0.0)
        gl.store(to_k + of_keys + offsets, new_k.to(to_k.dtype.element_ty), mask=real)
        gl.store(to_v + of_values + offsets, new_v.to(to_v.dtype.element_ty), mask=real)


@gluon.jit
def has_nonfinite(tile, consts: gl.constexpr):
    """Return 1 if a tile of keys has NaN or infinite numbers, else 0."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // consts.D, consts.D // 8], [8, 1], [1, 0]
    )
    x = tile.load(layout).to(gl.float32)
    return gl.max(gl.max(gl.where(gl.abs(x) < _INF, 0, 1), 1), 0)


@gluon.jit
def offset_of(place, consts: gl.constexpr):
    """Return the query's offset in its block for a row of the tile: even queries first."""
    half: gl.constexpr = consts.BLOCK // 2
    return place % half * 2 + place // half


@gluon.jit
def in_order(x, consts: gl.constexpr):
    """Bring rows of queries from the order even, odd to that of the tokens; no data moves.

    A half-warp's stores go to four neighbouring rows of a product. In the order of the tokens these
    are every other row of the tile for dQ, which its swizzle keeps in different banks of shared
    memory. Neighbouring rows would share them in pairs, and each store take twice as long.
    """
    x = x.reshape([2, consts.BLOCK // 2, consts.D])
    return x.permute((1, 0, 2)).reshape([consts.BLOCK, consts.D])


@gluon.jit
def add_grads_of_block(
    tiles, s_tile, dq_tiles, dq, bars, count, dk, dv, nonfinite, row, first_row, head, of_keys,
    MASKED: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """Add the gradients of the block of queries at ``row``: to ``dk``, ``dv``, and dQ in memory.

    Scores lie transposed, ``[k, q]``.
    """
    k_tile, v_tile, q_tiles, g_tiles, m_tiles, d_tiles = tiles
    kv_full, kv_free, q_full, q_free, g_full, g_free = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, consts.D, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, consts.D // 2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    numbers: gl.constexpr = gl.SliceLayout(0, s_layout)
    slot, phase = count % consts.STAGES, (count // consts.STAGES) & 1
    queries = q_tiles.index(slot).reshape([consts.BLOCK, consts.D])
    gradient = g_tiles.index(slot).reshape([consts.BLOCK, consts.D])
    block: gl.constexpr = [KEYS, consts.BLOCK]
    mbarrier.wait(q_full.index(slot), phase)
    mbarrier.wait(g_full.index(slot), phase)
    # The accumulators of the first two products start from -lse and -delta of the queries, which
    # need no further registers then.
    minus_lse = gl.expand_dims(m_tiles.index(slot).load(numbers), 0).broadcast_to(block)
    minus_delta = gl.expand_dims(d_tiles.index(slot).load(numbers), 0).broadcast_to(block)
    options, slope, k_at, seed, groups, q_len, first, stop = of_keys
    rows = row + offset_of(gl.arange(0, consts.BLOCK, layout=numbers), consts)
    bias = gl.zeros(block, gl.float32, layout=s_layout)
    if consts.ALIBI:
        q_at = positions_of(options.q_at, rows, q_len, consts)
        bias = gl.abs(q_at[None, :] - k_at[:, None]) * slope
    if consts.SOFTCAP is None:
        products = warpgroup_mma(k_tile, queries.permute((1, 0)), minus_lse + bias, is_async=True)
    else:
        products = warpgroup_mma(
            k_tile, queries.permute((1, 0)), bias, use_acc=False, is_async=True
        )
    # With dropout -delta is added later: it is no part of what is dropped.
    dweights = warpgroup_mma(
        v_tile, gradient.permute((1, 0)), minus_delta, use_acc=consts.DROPPED is None, is_async=True
    )
    if consts.DROPPED is not None:
        place = gl.arange(0, consts.BLOCK, layout=gl.SliceLayout(0, CALLS))
        index = row + offset_of(place, consts)
        index = gl.load(options.q_index + index, mask=index < q_len, other=0)
        words = packed_calls(kept_of_calls(seed, index[None, :], groups[:, None], consts))
    products = warpgroup_mma_wait(1, [products])
    if consts.SOFTCAP is None:
        weights = gl.exp2(products * unit_of(consts))
        factors = weights
    else:
        scores = capped(products, consts)
        weights = gl.exp2((scores + bias) * unit_of(consts) + minus_lse)
        # The derivative of the cap is part of the scores' gradient.
        factors = weights * (-4.0 * scores * (1.0 + scores))
    if MASKED:
        visible = (rows[None, :] >= first[:, None]) & (rows[None, :] < stop[:, None])
        weights = gl.where(visible, weights, 0.0)
    if consts.DROPPED is not None:
        weights = gl.where(kept_scores(words, s_layout) > 0, weights, 0.0)
    narrow = gl.convert_layout(weights.to(q_tiles.dtype), p_layout)
    # dV is in flight while the gradients of the scores are computed.
    dv = warpgroup_mma(narrow, gradient, dv, is_async=True)
    dweights = warpgroup_mma_wait(1, [dweights])
    if consts.DROPPED is not None:
        dweights = gl.where(kept_scores(words, s_layout) > 0, dweights, 0.0)
        dweights = dweights * (1.0 / keep_rate(consts)) + minus_delta
    dscores = factors * dweights
    if MASKED:
        dscores = gl.where(visible, dscores, 0.0)
    dscores = dscores.to(q_tiles.dtype)
    # dQ needs them transposed, from shared memory.
    s_tile.store(dscores)
    fence_async_shared()
    dscores = gl.convert_layout(dscores, p_layout)
    zero_q = gl.zeros([consts.BLOCK, consts.D], gl.float32, layout=q_layout)
    part = warpgroup_mma(s_tile.permute((1, 0)), k_tile, zero_q, use_acc=False, is_async=True)
    dk = warpgroup_mma(dscores, queries, dk, is_async=True)
    # dQ and dV are there; dK is in flight. The producer may overwrite dO and delta.
    part, dv, narrow = warpgroup_mma_wait(1, [part, dv, narrow])
    mbarrier.arrive(g_free.index(slot), count=1)
    # There are two tiles for dQ. The copy engine still reads the block before out of the other one
    # while this one is written ...
    dq_tile = dq_tiles.index(count & 1)
    dq_tile.store(in_order(part * consts.SCALE, consts))
    fence_async_shared()
    # ... and is done with it behind this barrier: the next block may overwrite it.
    tma.store_wait(0)
    gl.barrier()
    # The copy engine adds it to dQ in memory beside the next block's products.
    if nonfinite == 0:
        tma.async_atomic_add(dq, [first_row + row, head * consts.D], dq_tile)
    # The producer may overwrite queries and lse.
    dk, dscores = warpgroup_mma_wait(0, [dk, dscores])
    mbarrier.arrive(q_free.index(slot), count=1)
    return dk, dv
