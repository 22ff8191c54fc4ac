"""The forward for Hopper with warps of different roles: one fetches, two groups compute.

FlashAttention-3 (Shah et al., arXiv 2407.08608) for calls whose masks are bands and that have no
option but the scale. Written in Gluon, which says who waits for whom; no JAX. Triton's interpreter
does not run it. A block whose result is NaN is left to the kernel of ``_forward``: masked weights
are 0, and ``0 * nan`` is ``nan``, so the NaN may be of values that nobody sees.

Arrays lie as callers have them, ``[B, T, H, D]``, here ``[B * T, H * D]``.
"""

# What a kernel works on has no type in Python.
# ruff: noqa: ANN001, ANN202, N803, RUF059
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
BOUNDS = gl.constexpr(6)  # numbers of an item: q_start, q_stop, k_start, k_stop, lo, hi
ROWS = gl.constexpr(64)  # queries of one group of warps
GROUPS = gl.constexpr(2)
_INF = gl.constexpr(float("inf"))


class Hot(NamedTuple):
    """What a kernel here is compiled for.

    Attributes:
        D: Head dim of queries, keys and values.
        ITEMS: How many items there are.
        SCALE: Of the logits, positive.
        BLOCK: Keys a block in the forward, queries a block in the backward.
        STAGES: Blocks on their way at once.
        FRESH: Results are new, nothing is merged into.
        TURNS: Groups of warps issue their products in turns.
    """

    D: gl.constexpr
    ITEMS: gl.constexpr
    SCALE: gl.constexpr
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    FRESH: gl.constexpr
    TURNS: gl.constexpr


@gluon.jit
def own_tiles(tiles):
    """How many tiles a program has; rounds go there and back, so that lengths even out."""
    programs = gl.num_programs(0)
    rounds = tiles // programs
    last = tile_of(rounds)
    return gl.where(last < tiles, rounds + 1, rounds)


@gluon.jit
def tile_of(turn):
    """The tile of this program in a round."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def place_of(tile, blocks, together):
    """Which turn a tile has among the ``blocks`` of its head, and which head; as elsewhere."""
    each = blocks * together
    within = tile % each
    return within // together, (tile // each) * together + within % together


@gluon.jit
def visited(items, n, outer, outer_stop, BLOCK: gl.constexpr, ROWS_OUTSIDE: gl.constexpr):
    """Blocks of item ``n`` that tokens ``[outer, outer_stop)`` see, and those seen whole by all.

    ``(start, full_start, full_stop, end)``, ranges as ``inner_blocks`` has them.
    """
    at = items + n * BOUNDS
    lo, hi = gl.load(at + 4), gl.load(at + 5)
    if ROWS_OUTSIDE:
        begin, end, start, stop = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        near, far = -hi, -lo
    else:
        start, stop, begin, end = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        near, far = lo, hi
    shift = start - begin
    top, bottom = gl.maximum(outer, begin), gl.minimum(outer_stop, end) - 1
    first = gl.maximum(top + shift + near, start)
    last = gl.minimum(bottom + shift + far + 1, stop)
    some = (top <= bottom) & (first < last)
    low = gl.where(some, first // BLOCK, 0)
    high = gl.where(some, (last + BLOCK - 1) // BLOCK, 0)
    whole_first = gl.maximum(bottom + shift + near, start)
    whole_last = gl.minimum(top + shift + far + 1, stop)
    whole = (outer >= begin) & (outer_stop <= end) & (whole_first < whole_last)
    whole_low = gl.where(whole, (whole_first + BLOCK - 1) // BLOCK, low)
    whole_high = gl.where(whole, whole_last // BLOCK, low)
    whole_low = gl.minimum(gl.maximum(whole_low, low), high)
    whole_high = gl.maximum(gl.minimum(whole_high, high), whole_low)
    return low, whole_low, whole_high, high


@gluon.jit
def seen_by(items, n, outer, ROWS_OUTSIDE: gl.constexpr):
    """Which inner tokens ``[first, stop)`` each outer token sees of item ``n``."""
    at = items + n * BOUNDS
    lo, hi = gl.load(at + 4), gl.load(at + 5)
    if ROWS_OUTSIDE:
        begin, end, start, stop = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        near, far = -hi, -lo
    else:
        start, stop, begin, end = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        near, far = lo, hi
    diagonal = outer + (start - begin)
    first = gl.maximum(diagonal + near, start)
    last = gl.minimum(diagonal + far + 1, stop)
    return first, gl.where((outer >= begin) & (outer < end), last, 0)


@gluon.jit
def attend_fast(
    q, k, v, items, out, lse, flags, q_len, k_len, batch, heads, group, together,
    facts: gl.constexpr,
):  # fmt: skip
    """Blocks of 128 queries of one head, the last ones first; a GPU's programs share them.

    ``q`` is a descriptor of ``[B * T, H * D]``; ``k`` and ``v`` are of ``[B * S, K * 2 D]``, where
    a head's values lie beside its keys. ``out [B, T, H, D]``, ``lse [B * H, T]``; ``flags [B * H,
    blocks, 2]`` says which 64 queries were left out because of NaN.
    """
    stages: gl.constexpr = facts.STAGES
    held: gl.constexpr = 2 if facts.FRESH else 1  # blocks of queries
    q_tiles = gl.allocate_shared_memory(q.dtype, [held * GROUPS, ROWS, facts.D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [stages, facts.BLOCK, facts.D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [stages, facts.BLOCK, facts.D], v.layout)
    q_full, q_free = mbarrier.allocate_mbarrier(held), mbarrier.allocate_mbarrier(held)
    k_full, k_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    v_full, v_free = mbarrier.allocate_mbarrier(stages), mbarrier.allocate_mbarrier(stages)
    turns = mbarrier.allocate_mbarrier(GROUPS)
    for n in gl.static_range(held):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_free.index(n), count=GROUPS)
    for n in gl.static_range(stages):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_free.index(n), count=GROUPS)
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(v_free.index(n), count=GROUPS)
    for n in gl.static_range(GROUPS):
        mbarrier.init(turns.index(n), count=1)
    tiles = (q_tiles, k_tiles, v_tiles)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free, turns)
    sizes = (q_len, k_len, batch, heads, group, together)
    gl.warp_specialize(
        [
            (attend_group, (tiles, bars, items, out, lse, flags, sizes, gl.constexpr(0), facts)),
            (attend_group, (tiles, bars, items, out, lse, flags, sizes, gl.constexpr(1), facts)),
            (fetch_for_queries, (q, k, v, tiles, bars, items, sizes, facts)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def fetch_for_queries(q, k, v, tiles, bars, items, sizes, facts: gl.constexpr):
    """The warp that fetches: queries of a tile, then the keys and values that they see."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, turns = bars
    q_len, k_len, batch, heads, group, together = sizes
    held: gl.constexpr = 2 if facts.FRESH else 1
    blocks = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    count = 0
    for done in range(own_tiles(blocks * batch * heads)):
        turn, flat = place_of(tile_of(done), blocks, together)
        row = (blocks - 1 - turn) * (ROWS * GROUPS)
        b, head = flat // heads, flat % heads
        slot = done % held
        mbarrier.wait(q_free.index(slot), ((done // held) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), GROUPS * q.nbytes_per_cta)
        for n in gl.static_range(GROUPS):
            tma.async_load(
                q, [b * q_len + row + n * ROWS, head * facts.D], q_full.index(slot),
                q_tiles.index(slot * GROUPS + n),
            )  # fmt: skip
        column = (head // group) * (2 * facts.D)
        row_stop = gl.minimum(row + ROWS * GROUPS, q_len)
        for item in range(facts.ITEMS):
            low, whole_low, whole_high, high = visited(
                items, item, row, row_stop, facts.BLOCK, ROWS_OUTSIDE=True
            )
            for i in range(high - low):
                at = b * k_len + (high - 1 - i) * facts.BLOCK
                slot = count % facts.STAGES
                phase = ((count // facts.STAGES) & 1) ^ 1
                mbarrier.wait(k_free.index(slot), phase)
                mbarrier.expect(k_full.index(slot), k.nbytes_per_cta)
                tma.async_load(k, [at, column], k_full.index(slot), k_tiles.index(slot))
                mbarrier.wait(v_free.index(slot), phase)
                mbarrier.expect(v_full.index(slot), v.nbytes_per_cta)
                tma.async_load(v, [at, column + facts.D], v_full.index(slot), v_tiles.index(slot))
                count += 1


@gluon.jit
def attend_group(
    tiles, bars, items, out, lse, flags, sizes, WHICH: gl.constexpr, facts: gl.constexpr
):
    """A group of warps, which takes 64 queries of each tile."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_free, k_full, k_free, v_full, v_free, turns = bars
    q_len, k_len, batch, heads, group, together = sizes
    held: gl.constexpr = 2 if facts.FRESH else 1
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    blocks = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    count = 0
    for done in range(own_tiles(blocks * batch * heads)):
        turn, flat = place_of(tile_of(done), blocks, together)
        block = blocks - 1 - turn
        row = block * (ROWS * GROUPS)
        row_stop = gl.minimum(row + ROWS * GROUPS, q_len)
        rows = row + WHICH * ROWS + gl.arange(0, ROWS, layout=s_rows)
        top = gl.full([ROWS], -_INF, gl.float32, layout=s_rows)
        total = gl.zeros([ROWS], gl.float32, layout=s_rows)
        acc = gl.zeros([ROWS, facts.D], gl.float32, layout=o_layout)
        slot = done % held
        queries = q_tiles.index(slot * GROUPS + WHICH)
        mbarrier.wait(q_full.index(slot), (done // held) & 1)
        for n in range(facts.ITEMS):
            low, whole_low, whole_high, high = visited(
                items, n, row, row_stop, facts.BLOCK, ROWS_OUTSIDE=True
            )
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
        mbarrier.arrive(q_free.index(slot), count=1)
        keep(
            out, lse, flags, top, total, acc, rows, flat, block, WHICH, q_len, heads, o_layout,
            facts,
        )  # fmt: skip


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
    out, lse, flags, top, total, acc, rows, flat, block, WHICH: gl.constexpr, q_len, heads,
    layout: gl.constexpr, facts: gl.constexpr,
):  # fmt: skip
    """Write the result, or merge it into what was there; if there is a NaN, only say so."""
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    row_at: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    top, total = gl.convert_layout(top, rows_layout), gl.convert_layout(total, rows_layout)
    rows = gl.convert_layout(rows, rows_layout)
    is_odd = (acc != acc) & (rows < q_len)[:, None]  # noqa: PLR0124
    odd = gl.max(gl.max(gl.where(is_odd, 1, 0), 1), 0)
    blocks = (q_len + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    gl.store(flags + (flat * blocks + block) * GROUPS + WHICH, odd)
    if odd == 0:
        part = gl.where(total == 0, -_INF, (top * (facts.SCALE * LOG2E) + gl.log2(total)) * LN2)
        mean = acc * (1.0 / gl.where(total == 0, 1.0, total))[:, None]
        place = flat.to(gl.int64) * q_len
        wide_rows = (block * GROUPS + WHICH) * ROWS + gl.arange(
            0, ROWS, layout=gl.SliceLayout(1, row_at)
        )
        dims = gl.arange(0, facts.D, layout=gl.SliceLayout(0, row_at))
        b, head = flat // heads, flat % heads
        at = ((b * q_len + wide_rows).to(gl.int64) * heads + head)[:, None] * facts.D
        at = out + at + dims[None, :]
        real = wide_rows < q_len
        if facts.FRESH:
            result = gl.convert_layout(mean.to(out.dtype.element_ty), row_at)
            gl.store(at, result, mask=real[:, None])
            gl.store(lse + place + rows, part, mask=rows < q_len)
        else:
            part = gl.convert_layout(part, gl.SliceLayout(1, row_at))
            mean = gl.convert_layout(mean, row_at)
            old = gl.load(lse + place + wide_rows, mask=real, other=-_INF)
            high = gl.maximum(old, part)
            high = gl.where(high == -_INF, 0.0, high)
            merged = high + gl.log(gl.exp(old - high) + gl.exp(part - high))
            safe = gl.where(merged == -_INF, 0.0, merged)
            before = gl.load(at, mask=real[:, None] & (old > -_INF)[:, None], other=0.0)
            result = mean * gl.exp(part - safe)[:, None] + before * gl.exp(old - safe)[:, None]
            gl.store(at, result, mask=real[:, None])
            gl.store(lse + place + wide_rows, merged, mask=real)
