"""The warp-specialised forward kernel for Hopper: a producer warp and two groups of consumers.

It is FlashAttention-3 (Shah et al., arXiv 2407.08608) for masks of bands, documents and segments,
with soft cap and ALiBi. It is written in Gluon, where synchronisation is explicit, and
imports no JAX; Triton's interpreter does not run it. A block whose result has NaN is left to the
kernel in plain Triton: masked weights are 0, and ``0 * nan`` is ``nan``, so the NaN may come from
values that no query sees.

Programs (thread blocks) take tiles from a shared counter, so that one which began late, because a
transfer occupied its SM, gets fewer. If all queries see all keys, the last round of tiles may be
too few for all programs: those without a tile then compute some keys of the others' tiles (as in
Stream-K, Osama et al., arXiv 2301.03598), and the program that finishes a tile last merges its
parts, in their order, so that results repeat bit for bit.

Arrays lie in memory as users pass them, ``[B, T, H, D]``, here ``[B * T, H * D]``.
"""


# The arguments and values of kernels have no types in Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ring_jax_gpu.hopper.common import (
    LN2,
    LOG2E,
    Bands,
    Sizes,
    columns_of,
    of_batch_row,
    seen_by,
    swizzled_block_and_head,
    visited,
)
from ring_jax_gpu.hopper.scores import (
    Options,
    capped,
    offset_of_lse,
    positions_of,
    slope_of,
    unit_of,
)
from ring_jax_gpu.hopper.stream_k import StreamK

ROWS = gl.constexpr(64)  # queries of one group of warps
GROUPS = gl.constexpr(2)  # groups of consumer warps
HELD = gl.constexpr(2)  # slots for tiles of queries in shared memory
NO_MORE = gl.constexpr(-1)  # published in place of a tile: consumers end
_INF = gl.constexpr(float("inf"))
# Positions of the fields in a row of ``stream_k``.
FIRST, BUSY, SPLIT, OWN, EACH = (
    gl.constexpr(StreamK._fields.index(name)) for name in ("first", "busy", "split", "own", "each")
)


@gluon.jit
def decode_tile(tile_id, sizes, consts: gl.constexpr):
    """Decode a number of the shared counter to a block of queries and a part of their keys.

    Return ``(block, flat, part, split_index)``: the block of 128 queries, the head over all batch
    rows, the part of its keys, and the tile's number among split tiles, -1 if it is not split.
    The last blocks of queries come before the first ones. With ``consts.STREAM_K`` that is so of
    blocks that see something; the others follow. Of split tiles all first parts come before the
    other ones.
    """
    all_heads = sizes.batch * sizes.heads
    blocks = (sizes.q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    part, split_index = 0, -1
    if consts.STREAM_K:
        first, busy = gl.load(sizes.stream_k + FIRST), gl.load(sizes.stream_k + BUSY)
        split, each = gl.load(sizes.stream_k + SPLIT), gl.load(sizes.stream_k + EACH)
        # Whole tiles come first, then all parts of split tiles, then tiles that see nothing.
        whole = busy * all_heads - split
        tile = tile_id
        if tile_id >= whole + split * each:
            tile = tile_id - split * (each - 1)
        elif tile_id >= whole:
            split_index, part = (tile_id - whole) % split, (tile_id - whole) // split
            tile = whole + split_index
        if tile < busy * all_heads:
            swizzled, flat = swizzled_block_and_head(tile, busy, sizes.heads_per_swizzle)
            block = first + busy - 1 - swizzled
        else:
            swizzled, flat = swizzled_block_and_head(
                tile - busy * all_heads, blocks - busy, sizes.heads_per_swizzle
            )
            block = swizzled + gl.where(swizzled >= first, busy, 0)
    else:
        swizzled, flat = swizzled_block_and_head(tile_id, blocks, sizes.heads_per_swizzle)
        block = blocks - 1 - swizzled
    return block, flat, part, split_index


@gluon.jit
def seen_in_part(bands, n, row, row_stop, part, split_index, sizes, consts: gl.constexpr):
    """Return :func:`visited` for one part of the keys; part 0 has the last blocks of keys."""
    low, whole_low, whole_high, high = visited(
        bands, n, row, row_stop, consts.BLOCK, ROWS_OUTSIDE=True
    )
    if consts.STREAM_K:
        stream_k, length = sizes.stream_k, high - low
        others = gl.maximum(gl.load(stream_k + EACH) - 1, 1)
        # Part 0 has `own` blocks of keys; the other parts share those before them evenly.
        own = gl.where(split_index >= 0, gl.minimum(gl.load(stream_k + OWN), length), length)
        begin = gl.where(part > 0, own + (length - own) * (part - 1) // others, 0)
        low = high - (own + (length - own) * part // others)
        high -= begin
        whole_low = gl.minimum(gl.maximum(whole_low, low), high)
        whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def fwd_hopper(
    q, k, v, k_at, items, cells, cells_batch, slopes, slopes_batch, q_at, stream_k, marks, before,
    lse, out, parts, sums, q_len, k_len, batch, heads, group, heads_per_swizzle,
    consts: gl.constexpr,
):  # fmt: skip
    """Compute attention by blocks of 128 queries of one head; persistent programs share them.

    - ``q``: descriptor of ``[B * T, H * D]``.
    - ``k``, ``v``: descriptors of ``[B * S, K * D]``, or both of ``[B * S, K * 2 D]``, where a
      head's values lie beside its keys.
    - ``items``, ``cells``, ``cells_batch``: the bounds of the work items and the documents, see
      ``Bands``.
    - ``slopes``, ``slopes_batch``, ``q_at``, ``k_at``: see ``Options``; ``k_at`` is a descriptor.
    - ``stream_k``: the fields of a ``StreamK``, with ``consts.STREAM_K``.
    - ``marks``: int32, zeros at first. ``[B * H, blocks, 2]`` flags of 64 queries each, set to 1 if
      they are left out because of NaN; then the shared counter of tiles; then ``[split, 2]``
      counters of finished parts.
    - ``before``: like ``out``; if it is not None the accumulated output is read from there.
    - ``lse [B * H, T]``, ``out [B, T, H, D]``: results, merged into unless ``consts.OVERWRITE``.
    - ``parts [split * each, 2, 64, D]``, ``sums [split * each, 2, 2, 64]``: the results of parts of
      split tiles.
    - ``q_len``, ``k_len``, ``batch``, ``heads``, ``group``, ``heads_per_swizzle``: see ``Sizes``.
    """
    stages: gl.constexpr = consts.STAGES
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(q.dtype, [HELD * GROUPS, ROWS, consts.D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [stages, consts.BLOCK, consts.D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [stages, consts.BLOCK, consts.D], v.layout)
    at_tiles = k_tiles
    if consts.ALIBI:
        at_tiles = gl.allocate_shared_memory(gl.float32, [stages, consts.BLOCK], k_at.layout)
    tile_ids = gl.allocate_shared_memory(gl.int32, [HELD, 1], number)
    # The producer waits for `free` before it overwrites a tile: both groups of consumers have read
    # it. They wait for `full` before they read. By `pingpong` they take turns on the tensor cores.
    # A slot's n-th use has the parity n & 1: consumers wait for that of this use, the producer for
    # the one before it, which a fresh barrier counts as done, so that first uses do not wait.
    q_full, q_free = mbarrier.allocate_mbarrier(HELD), mbarrier.allocate_mbarrier(HELD)
    k_full, k_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    v_full, v_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    pingpong = mbarrier.allocate_mbarrier(GROUPS)
    for n in gl.static_range(HELD):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_free.index(n), count=GROUPS)
    for n in gl.static_range(stages):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_free.index(n), count=GROUPS)
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(v_free.index(n), count=GROUPS)
    for n in gl.static_range(GROUPS):
        mbarrier.init(pingpong.index(n), count=1)
    tiles = (q_tiles, k_tiles, v_tiles, at_tiles, tile_ids)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free, pingpong)
    bands = Bands(items, cells, q_len if cells is not None else None, cells_batch)
    options = Options(slopes, slopes_batch, q_at, None, None, None, None)
    sizes = Sizes(q_len, k_len, batch, heads, group, heads_per_swizzle, stream_k)
    outputs = (before, out, lse, parts, sums)
    gl.warp_specialize(
        [
            (
                consumer,
                (tiles, bars, bands, options, marks, outputs, sizes, gl.constexpr(0), consts),
            ),
            (
                consumer,
                (tiles, bars, bands, options, marks, outputs, sizes, gl.constexpr(1), consts),
            ),
            (producer, (q, k, v, k_at, tiles, bars, bands, marks, before, sizes, consts)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def tile_counter(marks, q_len, all_heads):
    """Return the pointer to the shared counter of tiles."""
    return marks + (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS) * GROUPS * all_heads


@gluon.jit
def producer(q, k, v, k_at, tiles, bars, bands, marks, before, sizes, consts: gl.constexpr):
    """Run the producer warp: fetch the queries of each tile, then the keys and values they see."""
    q_tiles, k_tiles, v_tiles, at_tiles, tile_ids = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, pingpong = bars
    all_heads = sizes.batch * sizes.heads
    blocks = (sizes.q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    stop = blocks * all_heads
    if consts.STREAM_K:
        stop += gl.load(sizes.stream_k + SPLIT) * (gl.load(sizes.stream_k + EACH) - 1)
    tile_id = gl.program_id(0)
    done, count = 0, 0
    while tile_id < stop:
        block, flat, part, split_index = decode_tile(tile_id, sizes, consts)
        row = block * (ROWS * GROUPS)
        b, head = flat // sizes.heads, flat % sizes.heads
        row_bands = of_batch_row(bands, b)
        row_stop = gl.minimum(row + ROWS * GROUPS, sizes.q_len)
        if has_work(row_bands, row, row_stop, before, consts):
            # Both groups have finished the tile that was in this slot. Its queries are overwritten
            # while the consumers still compute the tile in the other slot.
            slot = done % HELD
            mbarrier.wait(q_free.index(slot), ((done // HELD) & 1) ^ 1)
            publish(tile_ids.index(slot), tile_id)
            mbarrier.expect(q_full.index(slot), GROUPS * q.nbytes_per_cta)
            for n in gl.static_range(GROUPS):
                tma.async_load(
                    q, [b * sizes.q_len + row + n * ROWS, head * consts.D], q_full.index(slot),
                    q_tiles.index(slot * GROUPS + n),
                )  # fmt: skip
            done += 1
            key_column, value_column = columns_of(head // sizes.group, consts)
            for item in range(consts.ITEMS):
                low, _, _, high = seen_in_part(
                    row_bands, item, row, row_stop, part, split_index, sizes, consts
                )
                for i in range(high - low):
                    key_row = b * sizes.k_len + (high - 1 - i) * consts.BLOCK
                    slot = count % consts.STAGES
                    phase = ((count // consts.STAGES) & 1) ^ 1
                    # Both groups have multiplied the keys in this slot, and later its values: each
                    # is overwritten as soon as it is free, up to STAGES blocks ahead.
                    mbarrier.wait(k_free.index(slot), phase)
                    with_keys: gl.constexpr = k.nbytes_per_cta + (
                        k_at.nbytes_per_cta if consts.ALIBI else 0
                    )
                    full = k_full.index(slot)
                    mbarrier.expect(full, with_keys)
                    tma.async_load(k, [key_row, key_column], full, k_tiles.index(slot))
                    if consts.ALIBI:
                        first_key = key_row - b * sizes.k_len
                        tma.async_load(k_at, [first_key], full, at_tiles.index(slot))
                    mbarrier.wait(v_free.index(slot), phase)
                    mbarrier.expect(v_full.index(slot), v.nbytes_per_cta)
                    tma.async_load(
                        v, [key_row, value_column], v_full.index(slot), v_tiles.index(slot)
                    )
                    count += 1
        # Take the next tile: each program began with that of its own number, others are counted.
        tile_id = gl.num_programs(0) + gl.atomic_add(tile_counter(marks, sizes.q_len, all_heads), 1)
    # Once its slot is free, tell the consumers that there are no more tiles: `full` is completed by
    # hand, as no copy arrives there.
    slot = done % HELD
    mbarrier.wait(q_free.index(slot), ((done // HELD) & 1) ^ 1)
    publish(tile_ids.index(slot), NO_MORE)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def has_work(bands, row, row_stop, before, consts: gl.constexpr):
    """Return True if queries see something, or their results are new memory and must be written."""
    if consts.OVERWRITE or before is not None:
        some = True
    else:
        some = False
        for n in range(consts.ITEMS):
            low, _, _, high = visited(bands, n, row, row_stop, consts.BLOCK, ROWS_OUTSIDE=True)
            some = some | (high > low)
    return some


@gluon.jit
def publish(tile_slot, tile_id):
    """Store a tile's number for the consumers, who read it after the barrier of its queries."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile_slot.store(gl.full([1], tile_id, gl.int32, layout=layout))
    gl.barrier()


@gluon.jit
def fetch_published(tile_ids, q_full, done):
    """Wait for the queries of the next tile, and return the tile's number."""
    slot = done % HELD
    mbarrier.wait(q_full.index(slot), (done // HELD) & 1)
    return load_tile_id(tile_ids.index(slot))


@gluon.jit
def load_tile_id(tile_slot):
    """Load a tile's number that the producer published."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(tile_slot.load(layout), 0)


@gluon.jit
def consumer(
    tiles, bars, bands, options, marks, outputs, sizes, WHICH: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """Run a group of consumer warps, which computes 64 of each tile's 128 queries."""
    q_tiles, _, _, _, tile_ids = tiles
    q_full, q_free, _, _, _, _, _ = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    all_heads = sizes.batch * sizes.heads
    done, count = 0, 0
    tile_id = fetch_published(tile_ids, q_full, done)
    while tile_id >= 0:
        block, flat, part, split_index = decode_tile(tile_id, sizes, consts)
        row = block * (ROWS * GROUPS)
        row_stop = gl.minimum(row + ROWS * GROUPS, sizes.q_len)
        rows = row + WHICH * ROWS + gl.arange(0, ROWS, layout=s_rows)
        row_max, total, acc = initial_state(
            outputs,
            row + WHICH * ROWS,
            flat,
            sizes.heads,
            sizes.q_len,
            part,
            s_rows,
            o_layout,
            consts,
        )
        slot = done % HELD
        queries = q_tiles.index(slot * GROUPS + WHICH)
        row_bands = of_batch_row(bands, flat // sizes.heads)
        slope = slope_of(options, flat, sizes.heads, consts)
        for n in range(consts.ITEMS):
            seen = seen_in_part(row_bands, n, row, row_stop, part, split_index, sizes, consts)
            row_max, total, acc, count = consume_item(
                queries, tiles, bars, row_bands, options, slope, n, seen, rows, count, row_max, total,
                acc, sizes.q_len, WHICH, consts,
            )  # fmt: skip
        if not consts.OVERWRITE:
            # Decoded again, so that addresses need not stay in registers during the loop.
            block, flat, part, split_index = decode_tile(
                load_tile_id(tile_ids.index(slot)), sizes, consts
            )
        # The producer may overwrite these queries from here on.
        mbarrier.arrive(q_free.index(slot), count=1)
        is_whole = True
        if consts.STREAM_K:
            is_whole = split_index < 0
            if split_index >= 0:
                # Hand this part over; the program that counts the last part merges all of them.
                each = gl.load(sizes.stream_k + EACH)
                store_part(
                    outputs, split_index * each + part, row_max, total, acc, WHICH, o_layout, consts
                )
                number = split_index * GROUPS + WHICH
                is_last = (
                    gl.atomic_add(tile_counter(marks, sizes.q_len, all_heads) + 1 + number, 1)
                    == each - 1
                )
                is_whole = is_last
                if is_last:
                    row_max, total, acc = merge_parts(
                        outputs, split_index * each, each, WHICH, s_rows, o_layout, consts
                    )
        if is_whole:
            store_result(
                outputs, marks, row_max, total, acc, flat, block, WHICH, sizes.q_len, sizes.heads,
                o_layout, consts,
            )  # fmt: skip
        done += 1
        tile_id = fetch_published(tile_ids, q_full, done)


@gluon.jit
def consume_item(
    queries, tiles, bars, bands, options, slope, n, seen, rows, count, row_max, total, acc, q_len,
    WHICH: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """Add the blocks of keys that a group's queries see of an item to the running softmax.

    Blocks are visited from the last to the first: some that need a mask, those that need none, some
    that need a mask. The products with values trail those with keys by one block.
    """
    _, k_tiles, v_tiles, at_tiles, _ = tiles
    _, _, k_full, k_free, v_full, v_free, pingpong = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    low, whole_low, whole_high, high = seen
    if high > low:
        first, stop = seen_by(bands, n, rows, ROWS_OUTSIDE=True)
        of_rows = (slope, positions_of(options.q_at, rows, q_len, consts), first, stop)
        # The last block of keys comes first: there is no block before it whose values could be
        # multiplied meanwhile. Its keys' slot is free as soon as its scores are there.
        products = scores_of(
            queries, k_tiles, at_tiles, k_full, pingpong, count, of_rows, WHICH, s_layout, consts
        )  # fmt: skip
        pass_turn(pingpong, WHICH, consts)
        products = warpgroup_mma_wait(0, [products])
        k_at = key_positions(at_tiles, count, s_layout, consts)
        mbarrier.arrive(k_free.index(count % consts.STAGES), count=1)
        row_max, total, shrink, weights = online_softmax(
            products, row_max, total, of_rows, k_at, (high - 1) * consts.BLOCK, True, s_layout,
            consts,
        )  # fmt: skip
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(weights.to(k_tiles.dtype), p_layout)
        count += 1
        # Then the other blocks, from last to first: with a mask, without one, with one again.
        right = gl.maximum(high - whole_high, 1)
        middle = gl.maximum(high - whole_low, 1)
        for i in range(1, right):
            row_max, total, acc, weights = attend_block(
                queries, k_tiles, v_tiles, at_tiles, bars, count, row_max, total, acc, weights, of_rows,
                (high - 1 - i) * consts.BLOCK, WHICH, True, consts,
            )  # fmt: skip
            count += 1
        for i in range(right, middle):
            row_max, total, acc, weights = attend_block(
                queries, k_tiles, v_tiles, at_tiles, bars, count, row_max, total, acc, weights, of_rows,
                (high - 1 - i) * consts.BLOCK, WHICH, False, consts,
            )  # fmt: skip
            count += 1
        for i in range(middle, high - low):
            row_max, total, acc, weights = attend_block(
                queries, k_tiles, v_tiles, at_tiles, bars, count, row_max, total, acc, weights, of_rows,
                (high - 1 - i) * consts.BLOCK, WHICH, True, consts,
            )  # fmt: skip
            count += 1
        # The values of the last block are still to be multiplied; then their slot is free.
        last = (count - 1) % consts.STAGES
        mbarrier.wait(v_full.index(last), ((count - 1) // consts.STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(last), count=1)
    return row_max, total, acc, count


@gluon.jit
def initial_state(
    outputs, row, flat, heads, q_len, part, s_rows: gl.constexpr, layout: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """Return the state from which the running softmax of 64 queries starts.

    The accumulated result counts as one key, in part 0 of a split tile only.
    """
    before, out, lse, _, _ = outputs
    o_rows: gl.constexpr = gl.SliceLayout(1, layout)
    row_max = gl.full([ROWS], -_INF, gl.float32, layout=s_rows)
    total = gl.zeros([ROWS], gl.float32, layout=s_rows)
    acc = gl.zeros([ROWS, consts.D], gl.float32, layout=layout)
    if not consts.OVERWRITE:  # noqa: SIM102  # a compile-time condition
        if part == 0:
            source = out
            if before is not None:
                source = before
            rows = row + gl.arange(0, ROWS, layout=o_rows)
            old = gl.load(lse + flat.to(gl.int64) * q_len + rows, mask=rows < q_len, other=-_INF)
            pointers = source + offsets_of(rows, flat, heads, q_len, layout, consts)
            acc = gl.load(pointers, mask=(old > -_INF)[:, None], other=0.0).to(gl.float32)
            old = gl.convert_layout(old, s_rows)
            row_max = (old * LOG2E - offset_of_lse(consts)) / unit_of(consts)
            total = gl.where(old == -_INF, 0.0, 1.0)
    return row_max, total, acc


@gluon.jit
def offsets_of(rows, flat, heads, q_len, layout: gl.constexpr, consts: gl.constexpr):
    """Return the offsets of rows of a head in ``[B, T, H, D]``."""
    dims = gl.arange(0, consts.D, layout=gl.SliceLayout(0, layout))
    first = ((flat // heads) * q_len).to(gl.int64) * heads + flat % heads
    return (first + rows.to(gl.int64) * heads)[:, None] * consts.D + dims[None, :]


@gluon.jit
def store_part(
    outputs, index, row_max, total, acc, WHICH: gl.constexpr, layout: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """Store the result of part ``index``, for the program that finishes the tile last."""
    _, _, _, parts, sums = outputs
    index = index * GROUPS + WHICH
    rows = gl.arange(0, ROWS, layout=row_max.type.layout)
    gl.store(sums + index * (2 * ROWS) + rows, row_max)
    gl.store(sums + index * (2 * ROWS) + ROWS + rows, total)
    gl.store(part_pointers(parts, index, layout, consts), acc)
    # All threads have stored their shares before the caller counts the part as finished.
    gl.barrier()


@gluon.jit
def part_pointers(parts, index, layout: gl.constexpr, consts: gl.constexpr):
    """Return the pointers to the unnormalised output ``[64, D]`` of a part."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, consts.D, layout=gl.SliceLayout(0, layout))
    return parts + index * (ROWS * consts.D) + rows[:, None] * consts.D + dims[None, :]


@gluon.jit
def merge_parts(
    outputs, index, num_parts, WHICH: gl.constexpr, s_rows: gl.constexpr, layout: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """Merge the parts of a tile from ``index`` on, in their order, so that results repeat."""
    _, _, _, parts, sums = outputs
    scale = unit_of(consts)
    rows = gl.arange(0, ROWS, layout=s_rows)
    row_max = gl.full([ROWS], -_INF, gl.float32, layout=s_rows)
    total = gl.zeros([ROWS], gl.float32, layout=s_rows)
    acc = gl.zeros([ROWS, consts.D], gl.float32, layout=layout)
    for n in range(num_parts):
        part_index = (index + n) * GROUPS + WHICH
        part_max = gl.load(sums + part_index * (2 * ROWS) + rows)
        part_total = gl.load(sums + part_index * (2 * ROWS) + ROWS + rows)
        new_max = gl.maximum(row_max, part_max)
        safe = gl.where(new_max == -_INF, 0.0, new_max) * scale
        # Both are rescaled to the larger maximum, then added.
        shrink, weight = gl.exp2(row_max * scale - safe), gl.exp2(part_max * scale - safe)
        total = total * shrink + part_total * weight
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, layout))
        weight = gl.convert_layout(weight, gl.SliceLayout(1, layout))
        part = gl.load(part_pointers(parts, part_index, layout, consts))
        acc = acc * shrink[:, None] + part * weight[:, None]
        row_max = new_max
    return row_max, total, acc


@gluon.jit
def key_positions(at_tiles, count, layout: gl.constexpr, consts: gl.constexpr):
    """Return the positions of block ``count`` of the keys, for ALiBi; their slot may then go."""
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    if consts.ALIBI:
        k_at = at_tiles.index(count % consts.STAGES).load(columns)
    else:
        k_at = gl.zeros([consts.BLOCK], gl.float32, layout=columns)
    return k_at


@gluon.jit
def alibi_of(of_rows, k_at):
    """Return ALiBi's bias of a block of scores, in their units."""
    slope, q_at, _, _ = of_rows
    return gl.abs(q_at[:, None] - k_at[None, :]) * slope


@gluon.jit
def scores_of(
    queries, k_tiles, at_tiles, k_full, pingpong, count, of_rows, WHICH: gl.constexpr,
    layout: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """Start the products with block ``count`` of the keys, when it is this group's turn."""
    slot = count % consts.STAGES
    mbarrier.wait(k_full.index(slot), (count // consts.STAGES) & 1)
    starts: gl.constexpr = consts.ALIBI and consts.SOFTCAP is None  # from the bias
    if starts:
        bias = alibi_of(of_rows, key_positions(at_tiles, count, layout, consts))
    else:
        bias = gl.zeros([ROWS, consts.BLOCK], gl.float32, layout=layout)
    # Group 0 begins, as the parity that it waits for counts as done. From then on each group waits
    # until the other one has issued its products of the turn before.
    if consts.PINGPONG:
        mbarrier.wait(pingpong.index(WHICH), (count & 1) ^ (1 - WHICH))
    return warpgroup_mma(
        queries, k_tiles.index(slot).permute((1, 0)), bias, use_acc=starts, is_async=True
    )


@gluon.jit
def pass_turn(pingpong, WHICH: gl.constexpr, consts: gl.constexpr):
    """Let the other group of warps issue its products."""
    if consts.PINGPONG:
        mbarrier.arrive(pingpong.index(1 - WHICH), count=1)


@gluon.jit
def attend_block(
    queries, k_tiles, v_tiles, at_tiles, bars, count, row_max, total, acc, weights, of_rows, start,
    WHICH: gl.constexpr, MASKED: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """Compute the weights of a block of keys, and add the values of the block before to ``acc``.

    ``weights`` are those of the block before. Return the new state and the weights of this block.
    """
    _, _, k_full, k_free, v_full, v_free, pingpong = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    # In flight: this block's products with keys, and the block before's with values.
    products = scores_of(
        queries, k_tiles, at_tiles, k_full, pingpong, count, of_rows, WHICH, s_layout, consts
    )
    before = (count - 1) % consts.STAGES
    mbarrier.wait(v_full.index(before), ((count - 1) // consts.STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    pass_turn(pingpong, WHICH, consts)
    # The scores are there, and the producer may overwrite these keys. The softmax runs beside the
    # products with values, and beside the other group's products.
    products = warpgroup_mma_wait(1, [products])
    k_at = key_positions(at_tiles, count, s_layout, consts)
    mbarrier.arrive(k_free.index(count % consts.STAGES), count=1)
    row_max, total, shrink, new = online_softmax(
        products, row_max, total, of_rows, k_at, start, MASKED, s_layout, consts
    )
    new = gl.convert_layout(new.to(k_tiles.dtype), p_layout)
    # This wait passes at once. ptxas moves no wait for products across a branch, and without one it
    # would move the next one above the softmax.
    mbarrier.wait(v_full.index(before), ((count - 1) // consts.STAGES) & 1)
    acc, weights, new = warpgroup_mma_wait(0, [acc, weights, new])
    # The producer may overwrite the values of the block before.
    mbarrier.arrive(v_free.index(before), count=1)
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return row_max, total, acc, new


@gluon.jit
def online_softmax(
    products, row_max, total, of_rows, k_at, start, MASKED: gl.constexpr, layout: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """Do one step of the running softmax; ``row_max`` is of scores in the unit of ``unit_of``.

    Return the new maximum and sum, the factor of what was accumulated, and the block's weights.
    """
    scale = unit_of(consts)
    _, _, first, stop = of_rows
    if consts.SOFTCAP is not None:
        products = capped(products, consts)
        if consts.ALIBI:
            products += alibi_of(of_rows, k_at)
    if MASKED:
        cols = start + gl.arange(0, consts.BLOCK, layout=gl.SliceLayout(0, layout))
        visible = (cols[None, :] >= first[:, None]) & (cols[None, :] < stop[:, None])
        products = gl.where(visible, products, -_INF)
    new_max = gl.maximum(row_max, gl.max(products, 1))
    safe = gl.where(new_max == -_INF, 0.0, new_max) if MASKED else new_max
    base = safe * scale
    weights = gl.exp2(products * scale - base[:, None])
    shrink = gl.exp2(row_max * scale - base)
    return new_max, total * shrink + gl.sum(weights, 1), shrink, weights


@gluon.jit
def store_result(
    outputs, marks, row_max, total, acc, flat, block, WHICH: gl.constexpr, q_len, heads,
    layout: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """Write ``out`` and ``lse`` of 64 queries, or only set their flag if the output has NaN."""
    _, out, lse, _, _ = outputs
    o_rows: gl.constexpr = gl.SliceLayout(1, layout)
    row_max, total = gl.convert_layout(row_max, o_rows), gl.convert_layout(total, o_rows)
    part = block * GROUPS + WHICH
    rows = part * ROWS + gl.arange(0, ROWS, layout=o_rows)
    real = rows < q_len
    is_nan = (acc != acc) & real[:, None]  # noqa: PLR0124 - true for NaN alone
    has_nan = gl.max(gl.max(gl.where(is_nan, 1, 0), 1), 0)
    if has_nan == 0:
        mean = acc * (1.0 / gl.where(total == 0, 1.0, total))[:, None]
        merged = (row_max * unit_of(consts) + offset_of_lse(consts) + gl.log2(total)) * LN2
        merged = gl.where(total == 0, -_INF, merged)
        gl.store(lse + flat.to(gl.int64) * q_len + rows, merged, mask=real)
        if out.dtype.element_ty == gl.float32:  # as the products lie: 32 bytes of a row at a time
            pointers = out + offsets_of(rows, flat, heads, q_len, layout, consts)
            gl.store(pointers, mean, mask=real[:, None])
        else:
            wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            wide_rows = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
            pointers = out + offsets_of(wide_rows, flat, heads, q_len, wide, consts)
            result = gl.convert_layout(mean.to(out.dtype.element_ty), wide)
            gl.store(pointers, result, mask=(wide_rows < q_len)[:, None])
    else:
        flags_per_head = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS) * GROUPS
        gl.store(marks + flat * flags_per_head + part, 1)
