"""The warp-specialised forward for Hopper: a producer warp, two groups of consumers.

FlashAttention-3 (Shah et al., arXiv 2407.08608) for calls whose masks are bands and that have no
option but the scale. Written in Gluon, which says who waits for whom; no JAX. Triton's interpreter
does not run it. A block whose result is NaN is left to the kernel of ``forward``: masked weights
are 0, and ``0 * nan`` is ``nan``, so the NaN may be of values that nobody sees.

Programs take tiles from one counter, so that one which began late, because a transfer held its
processor, gets less to do. Where all queries see all keys, tiles do not come out even over the
programs: of those left for a last round, programs that would else be idle do some keys (as in
Stream-K, Osama et al., arXiv 2301.03598), and who is done last merges the parts, in their order.

Arrays lie as callers have them, ``[B, T, H, D]``, here ``[B * T, H * D]``.
"""


# What a kernel works on has no type in Python.
# ruff: noqa: ANN001, ANN201, N803, RUF059
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
    columns_of,
    seen_by,
    swizzled_block_and_head,
    visited,
)
from ring_jax_gpu.hopper.stream_k import StreamK

ROWS = gl.constexpr(64)  # queries of one group of warps
GROUPS = gl.constexpr(2)
HELD = gl.constexpr(2)  # tiles of queries that a program has at once
NO_MORE = gl.constexpr(-1)  # no tile
_INF = gl.constexpr(float("inf"))
# Where ``stream_k`` has what.
FIRST, BUSY, SPLIT, OWN, EACH = (
    gl.constexpr(StreamK._fields.index(name)) for name in ("first", "busy", "split", "own", "each")
)


@gluon.jit
def decode_tile(tile_id, sizes, consts: gl.constexpr):
    """``(block, flat, part, split_index)``: which queries of which head, which part of their keys.

    ``split_index`` is a split tile's number among these, else -1. Queries that see something come
    first, and of parts the first ones; blocks are from the last on.
    """
    q_len, k_len, batch, heads, group, heads_per_swizzle, stream_k = sizes
    many = batch * heads
    blocks = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    part, split_index = 0, -1
    if consts.STREAM_K:
        first, busy = gl.load(stream_k + FIRST), gl.load(stream_k + BUSY)
        split, each = gl.load(stream_k + SPLIT), gl.load(stream_k + EACH)
        whole = busy * many - split
        tile = tile_id
        if tile_id >= whole + split * each:
            tile = tile_id - split * (each - 1)
        elif tile_id >= whole:
            split_index, part = (tile_id - whole) % split, (tile_id - whole) // split
            tile = whole + split_index
        if tile < busy * many:
            swizzled, flat = swizzled_block_and_head(tile, busy, heads_per_swizzle)
            block = first + busy - 1 - swizzled
        else:
            swizzled, flat = swizzled_block_and_head(
                tile - busy * many, blocks - busy, heads_per_swizzle
            )
            block = swizzled + gl.where(swizzled >= first, busy, 0)
    else:
        swizzled, flat = swizzled_block_and_head(tile_id, blocks, heads_per_swizzle)
        block = blocks - 1 - swizzled
    return block, flat, part, split_index


@gluon.jit
def seen_in_part(items, n, row, row_stop, part, split_index, sizes, consts: gl.constexpr):
    """:func:`visited` for a part of the keys, of which the first ones are the last."""
    low, whole_low, whole_high, high = visited(
        items, n, row, row_stop, consts.BLOCK, ROWS_OUTSIDE=True
    )
    if consts.STREAM_K:
        stream_k, length = sizes[6], high - low
        others = gl.maximum(gl.load(stream_k + EACH) - 1, 1)
        own = gl.where(split_index >= 0, gl.minimum(gl.load(stream_k + OWN), length), length)
        begin = gl.where(part > 0, own + (length - own) * (part - 1) // others, 0)
        low = high - (own + (length - own) * part // others)
        high -= begin
        whole_low = gl.minimum(gl.maximum(whole_low, low), high)
        whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def fwd_hopper(
    q, k, v, items, stream_k, marks, before, lse, out, parts, sums, q_len, k_len, batch, heads,
    group, heads_per_swizzle, consts: gl.constexpr,
):  # fmt: skip
    """Blocks of 128 queries of one head, the last ones first; a GPU's programs share them.

    ``q`` is a descriptor of ``[B * T, H * D]``; ``k`` and ``v`` are of ``[B * S, K * D]``, or both
    of ``[B * S, K * 2 D]``, where a head's values lie beside its keys. ``out [B, T, H, D]`` and
    ``lse [B * H, T]`` are merged into unless ``consts.FRESH``; with ``before``, like ``out``, that
    is what ``out`` held. ``marks``, all zeros, are ``[B * H, blocks, 2]``, which says what 64
    queries were left out because of NaN, then how many tiles were taken, then ``[split, 2]`` parts
    that are done. With ``consts.STREAM_K``, ``stream_k`` is what ``StreamK`` says; parts of tiles
    leave ``parts [split * each, 2, 64, D]`` and ``sums [split * each, 2, 2, 64]``. The cache holds
    the keys of ``heads_per_swizzle`` heads.
    """
    stages: gl.constexpr = consts.STAGES
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(q.dtype, [HELD * GROUPS, ROWS, consts.D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [stages, consts.BLOCK, consts.D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [stages, consts.BLOCK, consts.D], v.layout)
    tile_ids = gl.allocate_shared_memory(gl.int32, [HELD, 1], number)
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
    tiles = (q_tiles, k_tiles, v_tiles, tile_ids)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free, pingpong)
    sizes = (q_len, k_len, batch, heads, group, heads_per_swizzle, stream_k)
    kept = (before, out, lse, parts, sums)
    gl.warp_specialize(
        [
            (consumer, (tiles, bars, items, marks, kept, sizes, gl.constexpr(0), consts)),
            (consumer, (tiles, bars, items, marks, kept, sizes, gl.constexpr(1), consts)),
            (producer, (q, k, v, tiles, bars, items, marks, before, sizes, consts)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def next_tile_at(marks, q_len, many):
    """Where the number of tiles taken is."""
    return marks + (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS) * GROUPS * many


@gluon.jit
def producer(q, k, v, tiles, bars, items, marks, before, sizes, consts: gl.constexpr):
    """The producer warp fetches: queries of a tile, then the keys and values that they see."""
    q_tiles, k_tiles, v_tiles, tile_ids = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, pingpong = bars
    q_len, k_len, batch, heads, group, heads_per_swizzle, stream_k = sizes
    many = batch * heads
    blocks = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    stop = blocks * many
    if consts.STREAM_K:
        stop += gl.load(stream_k + SPLIT) * (gl.load(stream_k + EACH) - 1)
    tile_id = gl.program_id(0)
    done, count = 0, 0
    while tile_id < stop:
        block, flat, part, split_index = decode_tile(tile_id, sizes, consts)
        row = block * (ROWS * GROUPS)
        b, head = flat // heads, flat % heads
        row_stop = gl.minimum(row + ROWS * GROUPS, q_len)
        if has_work(items, row, row_stop, before, consts):
            slot = done % HELD
            mbarrier.wait(q_free.index(slot), ((done // HELD) & 1) ^ 1)
            publish(tile_ids.index(slot), tile_id)
            mbarrier.expect(q_full.index(slot), GROUPS * q.nbytes_per_cta)
            for n in gl.static_range(GROUPS):
                tma.async_load(
                    q, [b * q_len + row + n * ROWS, head * consts.D], q_full.index(slot),
                    q_tiles.index(slot * GROUPS + n),
                )  # fmt: skip
            done += 1
            of_keys, of_values = columns_of(head // group, consts)
            for item in range(consts.ITEMS):
                low, _, _, high = seen_in_part(
                    items, item, row, row_stop, part, split_index, sizes, consts
                )
                for i in range(high - low):
                    at = b * k_len + (high - 1 - i) * consts.BLOCK
                    slot = count % consts.STAGES
                    phase = ((count // consts.STAGES) & 1) ^ 1
                    mbarrier.wait(k_free.index(slot), phase)
                    mbarrier.expect(k_full.index(slot), k.nbytes_per_cta)
                    tma.async_load(k, [at, of_keys], k_full.index(slot), k_tiles.index(slot))
                    mbarrier.wait(v_free.index(slot), phase)
                    mbarrier.expect(v_full.index(slot), v.nbytes_per_cta)
                    tma.async_load(v, [at, of_values], v_full.index(slot), v_tiles.index(slot))
                    count += 1
        tile_id = gl.num_programs(0) + gl.atomic_add(next_tile_at(marks, q_len, many), 1)
    slot = done % HELD
    mbarrier.wait(q_free.index(slot), ((done // HELD) & 1) ^ 1)
    publish(tile_ids.index(slot), NO_MORE)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def has_work(items, row, row_stop, before, consts: gl.constexpr):
    """Whether queries see something, or their results are new memory, to be written anyway."""
    if consts.FRESH or before is not None:
        some = True
    else:
        some = False
        for n in range(consts.ITEMS):
            low, _, _, high = visited(items, n, row, row_stop, consts.BLOCK, ROWS_OUTSIDE=True)
            some = some | (high > low)
    return some


@gluon.jit
def publish(place, tile_id):
    """Tell the consumers which tile is theirs, before the barrier of its queries."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place.store(gl.full([1], tile_id, gl.int32, layout=layout))
    gl.barrier()


@gluon.jit
def fetch_published(tile_ids, q_full, done):
    """The next tile, whose queries are there then, too."""
    slot = done % HELD
    mbarrier.wait(q_full.index(slot), (done // HELD) & 1)
    return tile_id_at(tile_ids.index(slot))


@gluon.jit
def tile_id_at(place):
    """A tile that was published."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(place.load(layout), 0)


@gluon.jit
def consumer(tiles, bars, items, marks, kept, sizes, WHICH: gl.constexpr, consts: gl.constexpr):
    """A group of consumer warps, which takes 64 queries of each tile."""
    q_tiles, _, _, tile_ids = tiles
    q_full, q_free, _, _, _, _, _ = bars
    q_len, k_len, batch, heads, group, heads_per_swizzle, stream_k = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    many = batch * heads
    done, count = 0, 0
    tile_id = fetch_published(tile_ids, q_full, done)
    while tile_id >= 0:
        block, flat, part, split_index = decode_tile(tile_id, sizes, consts)
        row = block * (ROWS * GROUPS)
        row_stop = gl.minimum(row + ROWS * GROUPS, q_len)
        rows = row + WHICH * ROWS + gl.arange(0, ROWS, layout=s_rows)
        top, total, acc = start_of(
            kept, row + WHICH * ROWS, flat, heads, q_len, part, s_rows, o_layout, consts
        )
        slot = done % HELD
        queries = q_tiles.index(slot * GROUPS + WHICH)
        for n in range(consts.ITEMS):
            seen = seen_in_part(items, n, row, row_stop, part, split_index, sizes, consts)
            top, total, acc, count = consume_item(
                queries, tiles, bars, items, n, seen, rows, count, top, total, acc, WHICH, consts
            )
        if not consts.FRESH:
            # Found anew: else the addresses that were read from stay in registers until now.
            block, flat, part, split_index = decode_tile(
                tile_id_at(tile_ids.index(slot)), sizes, consts
            )
        mbarrier.arrive(q_free.index(slot), count=1)
        is_whole = True
        if consts.STREAM_K:
            is_whole = split_index < 0
            if split_index >= 0:
                each = gl.load(stream_k + EACH)
                share(kept, split_index * each + part, top, total, acc, WHICH, o_layout, consts)
                number = split_index * GROUPS + WHICH
                is_last = (
                    gl.atomic_add(next_tile_at(marks, q_len, many) + 1 + number, 1) == each - 1
                )
                is_whole = is_last
                if is_last:
                    top, total, acc = joined(
                        kept, split_index * each, each, WHICH, s_rows, o_layout, consts
                    )
        if is_whole:
            keep(kept, marks, top, total, acc, flat, block, WHICH, q_len, heads, o_layout, consts)
        done += 1
        tile_id = fetch_published(tile_ids, q_full, done)


@gluon.jit
def consume_item(
    queries, tiles, bars, items, n, seen, rows, count, top, total, acc, WHICH: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """The blocks of keys that a group's queries see of an item."""
    _, k_tiles, v_tiles, _ = tiles
    _, _, k_full, k_free, v_full, v_free, pingpong = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    low, whole_low, whole_high, high = seen
    if high > low:
        first, stop = seen_by(items, n, rows, ROWS_OUTSIDE=True)
        products = scores_of(queries, k_tiles, k_full, pingpong, count, WHICH, s_layout, consts)
        pass_turn(pingpong, WHICH, consts)
        products = warpgroup_mma_wait(0, [products])
        mbarrier.arrive(k_free.index(count % consts.STAGES), count=1)
        top, total, shrink, weights = online_softmax(
            products, top, total, first, stop, (high - 1) * consts.BLOCK, True, s_layout,
            consts,
        )  # fmt: skip
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(weights.to(k_tiles.dtype), p_layout)
        count += 1
        right = gl.maximum(high - whole_high, 1)
        middle = gl.maximum(high - whole_low, 1)
        for i in range(1, right):
            top, total, acc, weights = one_block(
                queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first,
                stop, (high - 1 - i) * consts.BLOCK, WHICH, True, consts,
            )  # fmt: skip
            count += 1
        for i in range(right, middle):
            top, total, acc, weights = one_block(
                queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first,
                stop, (high - 1 - i) * consts.BLOCK, WHICH, False, consts,
            )  # fmt: skip
            count += 1
        for i in range(middle, high - low):
            top, total, acc, weights = one_block(
                queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first,
                stop, (high - 1 - i) * consts.BLOCK, WHICH, True, consts,
            )  # fmt: skip
            count += 1
        last = (count - 1) % consts.STAGES
        mbarrier.wait(v_full.index(last), ((count - 1) // consts.STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(last), count=1)
    return top, total, acc, count


@gluon.jit
def start_of(
    kept, row, flat, heads, q_len, part, s_rows: gl.constexpr, layout: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """Where the running softmax of 64 queries begins: with what was there, as one key's."""
    before, out, lse, _, _ = kept
    o_rows: gl.constexpr = gl.SliceLayout(1, layout)
    top = gl.full([ROWS], -_INF, gl.float32, layout=s_rows)
    total = gl.zeros([ROWS], gl.float32, layout=s_rows)
    acc = gl.zeros([ROWS, consts.D], gl.float32, layout=layout)
    if not consts.FRESH:  # noqa: SIM102  # known when this is compiled
        if part == 0:
            source = out
            if before is not None:
                source = before
            rows = row + gl.arange(0, ROWS, layout=o_rows)
            known = gl.load(lse + flat.to(gl.int64) * q_len + rows, mask=rows < q_len, other=-_INF)
            at = source + offsets_of(rows, flat, heads, q_len, layout, consts)
            acc = gl.load(at, mask=(known > -_INF)[:, None], other=0.0).to(gl.float32)
            known = gl.convert_layout(known, s_rows)
            top = known * (1.0 / consts.SCALE)
            total = gl.where(known == -_INF, 0.0, 1.0)
    return top, total, acc


@gluon.jit
def offsets_of(rows, flat, heads, q_len, layout: gl.constexpr, consts: gl.constexpr):
    """Where rows of a head are in ``[B, T, H, D]``."""
    dims = gl.arange(0, consts.D, layout=gl.SliceLayout(0, layout))
    first = ((flat // heads) * q_len).to(gl.int64) * heads + flat % heads
    return (first + rows.to(gl.int64) * heads)[:, None] * consts.D + dims[None, :]


@gluon.jit
def share(
    kept, place, top, total, acc, WHICH: gl.constexpr, layout: gl.constexpr, consts: gl.constexpr
):
    """Leave a part for who is done last."""
    _, _, _, parts, sums = kept
    place = place * GROUPS + WHICH
    numbers = gl.arange(0, ROWS, layout=top.type.layout)
    gl.store(sums + place * (2 * ROWS) + numbers, top)
    gl.store(sums + place * (2 * ROWS) + ROWS + numbers, total)
    gl.store(part_at(parts, place, layout, consts), acc)
    gl.barrier()


@gluon.jit
def part_at(parts, place, layout: gl.constexpr, consts: gl.constexpr):
    """The numbers of a part."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, consts.D, layout=gl.SliceLayout(0, layout))
    return parts + place * (ROWS * consts.D) + rows[:, None] * consts.D + dims[None, :]


@gluon.jit
def joined(
    kept, place, parts, WHICH: gl.constexpr, s_rows: gl.constexpr, layout: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """All parts of a tile, merged in their order."""
    _, _, _, at, sums = kept
    scale: gl.constexpr = consts.SCALE * LOG2E
    numbers = gl.arange(0, ROWS, layout=s_rows)
    top = gl.full([ROWS], -_INF, gl.float32, layout=s_rows)
    total = gl.zeros([ROWS], gl.float32, layout=s_rows)
    acc = gl.zeros([ROWS, consts.D], gl.float32, layout=layout)
    for n in range(parts):
        one = (place + n) * GROUPS + WHICH
        its_top = gl.load(sums + one * (2 * ROWS) + numbers)
        its_total = gl.load(sums + one * (2 * ROWS) + ROWS + numbers)
        new_top = gl.maximum(top, its_top)
        safe = gl.where(new_top == -_INF, 0.0, new_top) * scale
        shrink, weight = gl.exp2(top * scale - safe), gl.exp2(its_top * scale - safe)
        total = total * shrink + its_total * weight
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, layout))
        weight = gl.convert_layout(weight, gl.SliceLayout(1, layout))
        part = gl.load(part_at(at, one, layout, consts))
        acc = acc * shrink[:, None] + part * weight[:, None]
        top = new_top
    return top, total, acc


@gluon.jit
def scores_of(queries, k_tiles, k_full, pingpong, count, WHICH: gl.constexpr,
              layout: gl.constexpr, consts: gl.constexpr):  # fmt: skip
    """Begin the products with block ``count`` of the keys, when it is this group's turn."""
    slot = count % consts.STAGES
    mbarrier.wait(k_full.index(slot), (count // consts.STAGES) & 1)
    if consts.PINGPONG:
        mbarrier.wait(pingpong.index(WHICH), (count & 1) ^ (1 - WHICH))
    zero = gl.zeros([ROWS, consts.BLOCK], gl.float32, layout=layout)
    return warpgroup_mma(
        queries, k_tiles.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def pass_turn(pingpong, WHICH: gl.constexpr, consts: gl.constexpr):
    """The other group's turn."""
    if consts.PINGPONG:
        mbarrier.arrive(pingpong.index(1 - WHICH), count=1)


@gluon.jit
def one_block(
    queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first, stop, start,
    WHICH: gl.constexpr, MASKED: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """A block of keys; the values of the block before are multiplied meanwhile."""
    _, _, k_full, k_free, v_full, v_free, pingpong = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, consts.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    products = scores_of(queries, k_tiles, k_full, pingpong, count, WHICH, s_layout, consts)
    before = (count - 1) % consts.STAGES
    mbarrier.wait(v_full.index(before), ((count - 1) // consts.STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    pass_turn(pingpong, WHICH, consts)
    products = warpgroup_mma_wait(1, [products])
    mbarrier.arrive(k_free.index(count % consts.STAGES), count=1)
    top, total, shrink, new = online_softmax(
        products, top, total, first, stop, start, MASKED, s_layout, consts
    )
    new = gl.convert_layout(new.to(k_tiles.dtype), p_layout)
    # This passes at once. ptxas moves no wait for products across a branch, and would move the next
    # one above all that is to be computed meanwhile.
    mbarrier.wait(v_full.index(before), ((count - 1) // consts.STAGES) & 1)
    acc, weights, new = warpgroup_mma_wait(0, [acc, weights, new])
    mbarrier.arrive(v_free.index(before), count=1)
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return top, total, acc, new


@gluon.jit
def online_softmax(
    products, top, total, first, stop, start, MASKED: gl.constexpr, layout: gl.constexpr,
    consts: gl.constexpr,
):  # fmt: skip
    """The step of the running softmax; ``top`` is of products, without the scale."""
    scale: gl.constexpr = consts.SCALE * LOG2E
    if MASKED:
        cols = start + gl.arange(0, consts.BLOCK, layout=gl.SliceLayout(0, layout))
        visible = (cols[None, :] >= first[:, None]) & (cols[None, :] < stop[:, None])
        products = gl.where(visible, products, -_INF)
    new_top = gl.maximum(top, gl.max(products, 1))
    safe = gl.where(new_top == -_INF, 0.0, new_top) if MASKED else new_top
    base = safe * scale
    weights = gl.exp2(products * scale - base[:, None])
    shrink = gl.exp2(top * scale - base)
    return new_top, total * shrink + gl.sum(weights, 1), shrink, weights


@gluon.jit
def keep(
    kept, marks, top, total, acc, flat, block, WHICH: gl.constexpr, q_len, heads,
    layout: gl.constexpr, consts: gl.constexpr,
):  # fmt: skip
    """Write the result; if there is a NaN, only say so."""
    _, out, lse, _, _ = kept
    o_rows: gl.constexpr = gl.SliceLayout(1, layout)
    top, total = gl.convert_layout(top, o_rows), gl.convert_layout(total, o_rows)
    part = block * GROUPS + WHICH
    rows = part * ROWS + gl.arange(0, ROWS, layout=o_rows)
    real = rows < q_len
    is_nan = (acc != acc) & real[:, None]  # noqa: PLR0124
    has_nan = gl.max(gl.max(gl.where(is_nan, 1, 0), 1), 0)
    if has_nan == 0:
        mean = acc * (1.0 / gl.where(total == 0, 1.0, total))[:, None]
        merged = (top * (consts.SCALE * LOG2E) + gl.log2(total)) * LN2
        merged = gl.where(total == 0, -_INF, merged)
        gl.store(lse + flat.to(gl.int64) * q_len + rows, merged, mask=real)
        if out.dtype.element_ty == gl.float32:  # four threads write 32 bytes
            at = out + offsets_of(rows, flat, heads, q_len, layout, consts)
            gl.store(at, mean, mask=real[:, None])
        else:
            wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            its_rows = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
            its_at = out + offsets_of(its_rows, flat, heads, q_len, wide, consts)
            result = gl.convert_layout(mean.to(out.dtype.element_ty), wide)
            gl.store(its_at, result, mask=(its_rows < q_len)[:, None])
    else:
        parts = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS) * GROUPS
        gl.store(marks + flat * parts + part, 1)
