"""The forward for Hopper with warps of different roles: one fetches, two groups compute.

FlashAttention-3 (Shah et al., arXiv 2407.08608) for calls whose masks are bands and that have no
option but the scale. Written in Gluon, which says who waits for whom; no JAX. Triton's interpreter
does not run it. A block whose result is NaN is left to the kernel of ``forward``: masked weights
are 0, and ``0 * nan`` is ``nan``, so the NaN may be of values that nobody sees.

Programs draw tickets, so that one which began late, because a transfer held its processor, gets
less to do. Where all queries see all keys, tiles do not come out even over the programs: of those
left for a last round, programs that would else be idle do some keys (as in Stream-K, Osama et al.,
arXiv 2301.03598), and who is done last merges the parts, in their order.

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

from ring_jax_gpu.hopper.common import LN2, LOG2E, columns_of, place_of, seen_by, visited
from ring_jax_gpu.hopper.stream_k import Shares

ROWS = gl.constexpr(64)  # queries of one group of warps
GROUPS = gl.constexpr(2)
HELD = gl.constexpr(2)  # tiles of queries that a program has at once
NO_MORE = gl.constexpr(-1)  # no ticket
_INF = gl.constexpr(float("inf"))
# Where ``shares`` has what.
FIRST = gl.constexpr(Shares._fields.index("first"))
BUSY = gl.constexpr(Shares._fields.index("busy"))
SPLIT = gl.constexpr(Shares._fields.index("split"))
OWN = gl.constexpr(Shares._fields.index("own"))
EACH = gl.constexpr(Shares._fields.index("each"))


@gluon.jit
def job_of(ticket, sizes, facts: gl.constexpr):
    """``(block, flat, part, turn)``: which queries of which head, which part of their keys.

    ``turn`` is a shared tile's number among these, else -1. Queries that see something come first,
    and of parts the first ones; blocks are from the last on.
    """
    q_len, k_len, batch, heads, group, together, shares = sizes
    many = batch * heads
    blocks = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    part, turn = 0, -1
    if facts.SHARED:
        first, busy = gl.load(shares + FIRST), gl.load(shares + BUSY)
        split, each = gl.load(shares + SPLIT), gl.load(shares + EACH)
        whole = busy * many - split
        tile = ticket
        if ticket >= whole + split * each:
            tile = ticket - split * (each - 1)
        elif ticket >= whole:
            turn, part = (ticket - whole) % split, (ticket - whole) // split
            tile = whole + turn
        if tile < busy * many:
            place, flat = place_of(tile, busy, together)
            block = first + busy - 1 - place
        else:
            place, flat = place_of(tile - busy * many, blocks - busy, together)
            block = place + gl.where(place >= first, busy, 0)
    else:
        place, flat = place_of(ticket, blocks, together)
        block = blocks - 1 - place
    return block, flat, part, turn


@gluon.jit
def seen_in_part(items, n, row, row_stop, part, turn, sizes, facts: gl.constexpr):
    """:func:`visited` for a part of the keys, of which the first ones are the last."""
    low, whole_low, whole_high, high = visited(
        items, n, row, row_stop, facts.BLOCK, ROWS_OUTSIDE=True
    )
    if facts.SHARED:
        shares, length = sizes[6], high - low
        others = gl.maximum(gl.load(shares + EACH) - 1, 1)
        own = gl.where(turn >= 0, gl.minimum(gl.load(shares + OWN), length), length)
        begin = gl.where(part > 0, own + (length - own) * (part - 1) // others, 0)
        low = high - (own + (length - own) * part // others)
        high -= begin
        whole_low = gl.minimum(gl.maximum(whole_low, low), high)
        whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def attend_fast(
    q, k, v, items, shares, marks, before, lse, out, parts, sums, q_len, k_len, batch, heads, group,
    together, facts: gl.constexpr,
):  # fmt: skip
    """Blocks of 128 queries of one head, the last ones first; a GPU's programs share them.

    ``q`` is a descriptor of ``[B * T, H * D]``; ``k`` and ``v`` are of ``[B * S, K * D]``, or both
    of ``[B * S, K * 2 D]``, where a head's values lie beside its keys. ``out [B, T, H, D]`` and
    ``lse [B * H, T]`` are merged into unless ``facts.FRESH``; with ``before``, like ``out``, that
    is what ``out`` held. ``marks``, all zeros, are ``[B * H, blocks, 2]``, which says what 64
    queries were left out because of NaN, then a number of tickets drawn, then ``[split, 2]`` parts
    that are done. With ``facts.SHARED``, ``shares`` is what ``_shares.Shares`` says; parts of tiles
    leave ``parts [split * each, 2, 64, D]`` and ``sums [split * each, 2, 2, 64]``. ``together``
    heads take turns, so many that the cache holds their keys.
    """
    stages: gl.constexpr = facts.STAGES
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(q.dtype, [HELD * GROUPS, ROWS, facts.D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [stages, facts.BLOCK, facts.D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [stages, facts.BLOCK, facts.D], v.layout)
    tickets = gl.allocate_shared_memory(gl.int32, [HELD, 1], number)
    q_full, q_free = mbarrier.allocate_mbarrier(HELD), mbarrier.allocate_mbarrier(HELD)
    k_full, k_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    v_full, v_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    turns = mbarrier.allocate_mbarrier(GROUPS)
    for n in gl.static_range(HELD):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_free.index(n), count=GROUPS)
    for n in gl.static_range(stages):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_free.index(n), count=GROUPS)
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(v_free.index(n), count=GROUPS)
    for n in gl.static_range(GROUPS):
        mbarrier.init(turns.index(n), count=1)
    tiles = (q_tiles, k_tiles, v_tiles, tickets)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free, turns)
    sizes = (q_len, k_len, batch, heads, group, together, shares)
    kept = (before, out, lse, parts, sums)
    gl.warp_specialize(
        [
            (attend_group, (tiles, bars, items, marks, kept, sizes, gl.constexpr(0), facts)),
            (attend_group, (tiles, bars, items, marks, kept, sizes, gl.constexpr(1), facts)),
            (fetch_for_queries, (q, k, v, tiles, bars, items, marks, before, sizes, facts)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def drawn_at(marks, q_len, many):
    """Where the number of tickets drawn is."""
    return marks + (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS) * GROUPS * many


@gluon.jit
def fetch_for_queries(q, k, v, tiles, bars, items, marks, before, sizes, facts: gl.constexpr):
    """The warp that fetches: queries of a tile, then the keys and values that they see."""
    q_tiles, k_tiles, v_tiles, tickets = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, turns = bars
    q_len, k_len, batch, heads, group, together, shares = sizes
    many = batch * heads
    blocks = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    stop = blocks * many
    if facts.SHARED:
        stop += gl.load(shares + SPLIT) * (gl.load(shares + EACH) - 1)
    ticket = gl.program_id(0)
    done, count = 0, 0
    while ticket < stop:
        block, flat, part, turn = job_of(ticket, sizes, facts)
        row = block * (ROWS * GROUPS)
        b, head = flat // heads, flat % heads
        row_stop = gl.minimum(row + ROWS * GROUPS, q_len)
        if has_work(items, row, row_stop, before, facts):
            slot = done % HELD
            mbarrier.wait(q_free.index(slot), ((done // HELD) & 1) ^ 1)
            hand_over(tickets.index(slot), ticket)
            mbarrier.expect(q_full.index(slot), GROUPS * q.nbytes_per_cta)
            for n in gl.static_range(GROUPS):
                tma.async_load(
                    q, [b * q_len + row + n * ROWS, head * facts.D], q_full.index(slot),
                    q_tiles.index(slot * GROUPS + n),
                )  # fmt: skip
            done += 1
            of_keys, of_values = columns_of(head // group, facts)
            for item in range(facts.ITEMS):
                low, _, _, high = seen_in_part(items, item, row, row_stop, part, turn, sizes, facts)
                for i in range(high - low):
                    at = b * k_len + (high - 1 - i) * facts.BLOCK
                    slot = count % facts.STAGES
                    phase = ((count // facts.STAGES) & 1) ^ 1
                    mbarrier.wait(k_free.index(slot), phase)
                    mbarrier.expect(k_full.index(slot), k.nbytes_per_cta)
                    tma.async_load(k, [at, of_keys], k_full.index(slot), k_tiles.index(slot))
                    mbarrier.wait(v_free.index(slot), phase)
                    mbarrier.expect(v_full.index(slot), v.nbytes_per_cta)
                    tma.async_load(v, [at, of_values], v_full.index(slot), v_tiles.index(slot))
                    count += 1
        ticket = gl.num_programs(0) + gl.atomic_add(drawn_at(marks, q_len, many), 1)
    slot = done % HELD
    mbarrier.wait(q_free.index(slot), ((done // HELD) & 1) ^ 1)
    hand_over(tickets.index(slot), NO_MORE)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def has_work(items, row, row_stop, before, facts: gl.constexpr):
    """Whether queries see something, or their results are new memory, to be written anyway."""
    if facts.FRESH or before is not None:
        some = True
    else:
        some = False
        for n in range(facts.ITEMS):
            low, _, _, high = visited(items, n, row, row_stop, facts.BLOCK, ROWS_OUTSIDE=True)
            some = some | (high > low)
    return some


@gluon.jit
def hand_over(place, ticket):
    """Tell the groups which tile is theirs, before the barrier of its queries."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place.store(gl.full([1], ticket, gl.int32, layout=layout))
    gl.barrier()


@gluon.jit
def taken_over(tickets, q_full, done):
    """The ticket of the next tile, whose queries are there then, too."""
    slot = done % HELD
    mbarrier.wait(q_full.index(slot), (done // HELD) & 1)
    return ticket_at(tickets.index(slot))


@gluon.jit
def ticket_at(place):
    """A ticket that was handed over."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(place.load(layout), 0)


@gluon.jit
def attend_group(tiles, bars, items, marks, kept, sizes, WHICH: gl.constexpr, facts: gl.constexpr):
    """A group of warps, which takes 64 queries of each tile."""
    q_tiles, _, _, tickets = tiles
    q_full, q_free, _, _, _, _, _ = bars
    q_len, k_len, batch, heads, group, together, shares = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    many = batch * heads
    done, count = 0, 0
    ticket = taken_over(tickets, q_full, done)
    while ticket >= 0:
        block, flat, part, turn = job_of(ticket, sizes, facts)
        row = block * (ROWS * GROUPS)
        row_stop = gl.minimum(row + ROWS * GROUPS, q_len)
        rows = row + WHICH * ROWS + gl.arange(0, ROWS, layout=s_rows)
        top, total, acc = start_of(
            kept, row + WHICH * ROWS, flat, heads, q_len, part, s_rows, o_layout, facts
        )
        slot = done % HELD
        queries = q_tiles.index(slot * GROUPS + WHICH)
        for n in range(facts.ITEMS):
            seen = seen_in_part(items, n, row, row_stop, part, turn, sizes, facts)
            top, total, acc, count = attend_item(
                queries, tiles, bars, items, n, seen, rows, count, top, total, acc, WHICH, facts
            )
        if not facts.FRESH:
            # Found anew: else the addresses that were read from stay in registers until now.
            block, flat, part, turn = job_of(ticket_at(tickets.index(slot)), sizes, facts)
        mbarrier.arrive(q_free.index(slot), count=1)
        is_whole = True
        if facts.SHARED:
            is_whole = turn < 0
            if turn >= 0:
                each = gl.load(shares + EACH)
                share(kept, turn * each + part, top, total, acc, WHICH, o_layout, facts)
                number = turn * GROUPS + WHICH
                is_last = gl.atomic_add(drawn_at(marks, q_len, many) + 1 + number, 1) == each - 1
                is_whole = is_last
                if is_last:
                    top, total, acc = joined(
                        kept, turn * each, each, WHICH, s_rows, o_layout, facts
                    )
        if is_whole:
            keep(kept, marks, top, total, acc, flat, block, WHICH, q_len, heads, o_layout, facts)
        done += 1
        ticket = taken_over(tickets, q_full, done)


@gluon.jit
def attend_item(
    queries, tiles, bars, items, n, seen, rows, count, top, total, acc, WHICH: gl.constexpr,
    facts: gl.constexpr,
):  # fmt: skip
    """The blocks of keys that a group's queries see of an item."""
    _, k_tiles, v_tiles, _ = tiles
    _, _, k_full, k_free, v_full, v_free, turns = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    low, whole_low, whole_high, high = seen
    if high > low:
        first, stop = seen_by(items, n, rows, ROWS_OUTSIDE=True)
        products = scores_of(queries, k_tiles, k_full, turns, count, WHICH, s_layout, facts)
        hand_on(turns, WHICH, facts)
        products = warpgroup_mma_wait(0, [products])
        mbarrier.arrive(k_free.index(count % facts.STAGES), count=1)
        top, total, shrink, weights = soften(
            products, top, total, first, stop, (high - 1) * facts.BLOCK, True, s_layout,
            facts,
        )  # fmt: skip
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(weights.to(k_tiles.dtype), p_layout)
        count += 1
        right = gl.maximum(high - whole_high, 1)
        middle = gl.maximum(high - whole_low, 1)
        for i in range(1, right):
            top, total, acc, weights = one_block(
                queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first,
                stop, (high - 1 - i) * facts.BLOCK, WHICH, True, facts,
            )  # fmt: skip
            count += 1
        for i in range(right, middle):
            top, total, acc, weights = one_block(
                queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first,
                stop, (high - 1 - i) * facts.BLOCK, WHICH, False, facts,
            )  # fmt: skip
            count += 1
        for i in range(middle, high - low):
            top, total, acc, weights = one_block(
                queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first,
                stop, (high - 1 - i) * facts.BLOCK, WHICH, True, facts,
            )  # fmt: skip
            count += 1
        last = (count - 1) % facts.STAGES
        mbarrier.wait(v_full.index(last), ((count - 1) // facts.STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(last), count=1)
    return top, total, acc, count


@gluon.jit
def start_of(
    kept, row, flat, heads, q_len, part, s_rows: gl.constexpr, layout: gl.constexpr,
    facts: gl.constexpr,
):  # fmt: skip
    """Where the running softmax of 64 queries begins: with what was there, as one key's."""
    before, out, lse, _, _ = kept
    o_rows: gl.constexpr = gl.SliceLayout(1, layout)
    top = gl.full([ROWS], -_INF, gl.float32, layout=s_rows)
    total = gl.zeros([ROWS], gl.float32, layout=s_rows)
    acc = gl.zeros([ROWS, facts.D], gl.float32, layout=layout)
    if not facts.FRESH:  # noqa: SIM102  # known when this is compiled
        if part == 0:
            source = out
            if before is not None:
                source = before
            rows = row + gl.arange(0, ROWS, layout=o_rows)
            known = gl.load(lse + flat.to(gl.int64) * q_len + rows, mask=rows < q_len, other=-_INF)
            at = source + offsets_of(rows, flat, heads, q_len, layout, facts)
            acc = gl.load(at, mask=(known > -_INF)[:, None], other=0.0).to(gl.float32)
            known = gl.convert_layout(known, s_rows)
            top = known * (1.0 / facts.SCALE)
            total = gl.where(known == -_INF, 0.0, 1.0)
    return top, total, acc


@gluon.jit
def offsets_of(rows, flat, heads, q_len, layout: gl.constexpr, facts: gl.constexpr):
    """Where rows of a head are in ``[B, T, H, D]``."""
    dims = gl.arange(0, facts.D, layout=gl.SliceLayout(0, layout))
    first = ((flat // heads) * q_len).to(gl.int64) * heads + flat % heads
    return (first + rows.to(gl.int64) * heads)[:, None] * facts.D + dims[None, :]


@gluon.jit
def share(
    kept, place, top, total, acc, WHICH: gl.constexpr, layout: gl.constexpr, facts: gl.constexpr
):
    """Leave a part for who is done last."""
    _, _, _, parts, sums = kept
    place = place * GROUPS + WHICH
    numbers = gl.arange(0, ROWS, layout=top.type.layout)
    gl.store(sums + place * (2 * ROWS) + numbers, top)
    gl.store(sums + place * (2 * ROWS) + ROWS + numbers, total)
    gl.store(part_at(parts, place, layout, facts), acc)
    gl.barrier()


@gluon.jit
def part_at(parts, place, layout: gl.constexpr, facts: gl.constexpr):
    """The numbers of a part."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, facts.D, layout=gl.SliceLayout(0, layout))
    return parts + place * (ROWS * facts.D) + rows[:, None] * facts.D + dims[None, :]


@gluon.jit
def joined(
    kept, place, parts, WHICH: gl.constexpr, s_rows: gl.constexpr, layout: gl.constexpr,
    facts: gl.constexpr,
):  # fmt: skip
    """All parts of a tile, merged in their order."""
    _, _, _, at, sums = kept
    scale: gl.constexpr = facts.SCALE * LOG2E
    numbers = gl.arange(0, ROWS, layout=s_rows)
    top = gl.full([ROWS], -_INF, gl.float32, layout=s_rows)
    total = gl.zeros([ROWS], gl.float32, layout=s_rows)
    acc = gl.zeros([ROWS, facts.D], gl.float32, layout=layout)
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
        part = gl.load(part_at(at, one, layout, facts))
        acc = acc * shrink[:, None] + part * weight[:, None]
        top = new_top
    return top, total, acc


@gluon.jit
def scores_of(queries, k_tiles, k_full, turns, count, WHICH: gl.constexpr,
              layout: gl.constexpr, facts: gl.constexpr):  # fmt: skip
    """Begin the products with block ``count`` of the keys, when it is this group's turn."""
    slot = count % facts.STAGES
    mbarrier.wait(k_full.index(slot), (count // facts.STAGES) & 1)
    if facts.TURNS:
        mbarrier.wait(turns.index(WHICH), (count & 1) ^ (1 - WHICH))
    zero = gl.zeros([ROWS, facts.BLOCK], gl.float32, layout=layout)
    return warpgroup_mma(
        queries, k_tiles.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def hand_on(turns, WHICH: gl.constexpr, facts: gl.constexpr):
    """The other group's turn."""
    if facts.TURNS:
        mbarrier.arrive(turns.index(1 - WHICH), count=1)


@gluon.jit
def one_block(
    queries, k_tiles, v_tiles, bars, count, top, total, acc, weights, first, stop, start,
    WHICH: gl.constexpr, MASKED: gl.constexpr, facts: gl.constexpr,
):  # fmt: skip
    """A block of keys; the values of the block before are multiplied meanwhile."""
    _, _, k_full, k_free, v_full, v_free, turns = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    products = scores_of(queries, k_tiles, k_full, turns, count, WHICH, s_layout, facts)
    before = (count - 1) % facts.STAGES
    mbarrier.wait(v_full.index(before), ((count - 1) // facts.STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    hand_on(turns, WHICH, facts)
    products = warpgroup_mma_wait(1, [products])
    mbarrier.arrive(k_free.index(count % facts.STAGES), count=1)
    top, total, shrink, new = soften(
        products, top, total, first, stop, start, MASKED, s_layout, facts
    )
    new = gl.convert_layout(new.to(k_tiles.dtype), p_layout)
    # This passes at once. ptxas moves no wait for products across a branch, and would move the next
    # one above all that is to be computed meanwhile.
    mbarrier.wait(v_full.index(before), ((count - 1) // facts.STAGES) & 1)
    acc, weights, new = warpgroup_mma_wait(0, [acc, weights, new])
    mbarrier.arrive(v_free.index(before), count=1)
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return top, total, acc, new


@gluon.jit
def soften(
    products, top, total, first, stop, start, MASKED: gl.constexpr, layout: gl.constexpr,
    facts: gl.constexpr,
):  # fmt: skip
    """The step of the running softmax; ``top`` is of products, without the scale."""
    scale: gl.constexpr = facts.SCALE * LOG2E
    if MASKED:
        cols = start + gl.arange(0, facts.BLOCK, layout=gl.SliceLayout(0, layout))
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
    layout: gl.constexpr, facts: gl.constexpr,
):  # fmt: skip
    """Write the result; if there is a NaN, only say so."""
    _, out, lse, _, _ = kept
    o_rows: gl.constexpr = gl.SliceLayout(1, layout)
    top, total = gl.convert_layout(top, o_rows), gl.convert_layout(total, o_rows)
    part = block * GROUPS + WHICH
    rows = part * ROWS + gl.arange(0, ROWS, layout=o_rows)
    real = rows < q_len
    is_odd = (acc != acc) & real[:, None]  # noqa: PLR0124
    odd = gl.max(gl.max(gl.where(is_odd, 1, 0), 1), 0)
    if odd == 0:
        mean = acc * (1.0 / gl.where(total == 0, 1.0, total))[:, None]
        merged = (top * (facts.SCALE * LOG2E) + gl.log2(total)) * LN2
        merged = gl.where(total == 0, -_INF, merged)
        gl.store(lse + flat.to(gl.int64) * q_len + rows, merged, mask=real)
        if out.dtype.element_ty == gl.float32:  # four threads write 32 bytes
            at = out + offsets_of(rows, flat, heads, q_len, layout, facts)
            gl.store(at, mean, mask=real[:, None])
        else:
            wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            its_rows = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
            its_at = out + offsets_of(its_rows, flat, heads, q_len, wide, facts)
            result = gl.convert_layout(mean.to(out.dtype.element_ty), wide)
            gl.store(its_at, result, mask=(its_rows < q_len)[:, None])
    else:
        parts = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS) * GROUPS
        gl.store(marks + flat * parts + part, 1)
