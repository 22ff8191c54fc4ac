"""Attention of some queries over the pages of one rank in Triton: split-KV, for GPUs.

It computes what :func:`ring_torch.serving.paged.attend` computes. A rank's own tokens of a request,
page after page, are cut into units; the units of all requests, one request behind the other, are
shared out evenly among a fixed number of programs for each K/V head, so that requests of unlike
lengths take no longer than those of equal lengths. Program ``c`` writes what it found of request
``b`` to slot ``c + b``, which no other pair has, and a second kernel merges the slots of each row.

Lengths are read on the device: a captured graph serves any lengths. Units whose keys all queries
see go through a loop without masks.
"""

# Triton's decorator, and the arguments of kernels, have no types in Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ring_torch.serving.paged import PagedKeys, Rules

_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
_MOST_ROWS = 128  # of queries and heads, of a program
_WIDE, _FEW_ROWS = 512, 32
_LEAST_UNITS = 2  # of a program, where there are enough for all


class Sizes(NamedTuple):
    """Sizes of a launch, measured on an H200.

    Attributes:
        unit: Bytes of keys and values of a unit.
        stages: Units in flight.
        warps: Warps of a program.
        programs: Programs for each multiprocessor.
        edge: Units that one at a request's end, whose keys not all queries see, counts for beside
            itself.
    """

    unit: int
    stages: int
    warps: int
    programs: int
    edge: int

    @staticmethod
    def of(block: int, dim: int, page: int) -> Sizes:
        """Return the sizes for rows of a program, numbers of a key and a value, bytes of a page."""
        if dim > _WIDE:
            return Sizes(128 << 10, 2, 8, 1, 3)
        if block > _FEW_ROWS:
            return Sizes(32 << 10, 2, 4, 2, 3)
        # Units of several pages take longer to find, so that few large ones are better.
        return Sizes(32 << 10, 5, 4, 2, 3) if page >= 32 << 10 else Sizes(64 << 10, 3, 4, 2, 3)


@triton.jit
def _own_before(position, owner, ranks, PAGE: tl.constexpr):
    """Return how many of a rank's own tokens come before a position."""
    page = position // PAGE
    pages = (tl.maximum(page - owner, 0) + ranks - 1) // ranks
    return pages * PAGE + tl.where(page % ranks == owner, position % PAGE, 0)


@triton.jit
def _first_key(position, left, chunk, HAS_LEFT: tl.constexpr, HAS_CHUNK: tl.constexpr):
    """Return the first position that the query at a position sees."""
    first = position * 0
    if HAS_LEFT:
        first = tl.maximum(first, position - left)
    if HAS_CHUNK:
        first = tl.maximum(first, position // chunk * chunk)
    return first


@triton.jit
def _units(
    positions, block, B, n, G, owner, ranks, left, chunk, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, BI: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):  # fmt: skip
    """Return, for each request, what a block of rows needs of the rank's units of tokens.

    They are ``[first, end)``; of these all queries of the block see all keys of ``[full, behind)``.
    """
    b, i = tl.arange(0, BB), block * BM // G + tl.arange(0, BI)
    is_query = (b[:, None] < B) & (i[None, :] < tl.minimum(n, ((block + 1) * BM - 1) // G + 1))
    p = tl.load(positions + b[:, None] * n + i[None, :], mask=is_query, other=-1)
    last = tl.max(p, 1)
    first = tl.min(tl.where(is_query, p, 2147483647), 1)
    first = tl.where(b < B, first, -1)
    low = _first_key(tl.maximum(first, 0), left, chunk, HAS_LEFT, HAS_CHUNK)
    high = _first_key(tl.maximum(last, 0), left, chunk, HAS_LEFT, HAS_CHUNK)
    start = _own_before(low, owner, ranks, PAGE) // BN
    end = tl.maximum((_own_before(last + 1, owner, ranks, PAGE) + BN - 1) // BN, start)
    full = (_own_before(high, owner, ranks, PAGE) + BN - 1) // BN
    behind = _own_before(tl.maximum(first + 1, 0), owner, ranks, PAGE) // BN
    full = tl.minimum(tl.maximum(full, start), end)
    return start, end, full, tl.minimum(tl.maximum(behind, full), end)


@triton.jit
def _shares(first, end, behind, EDGE: tl.constexpr):
    """Return where each request's units begin and end among those of all.

    Those of its end count for more, as nothing is loaded ahead of them; each request counts for one
    more, which is the time that a program takes to begin and end it.
    """
    at_end = end - tl.minimum(tl.maximum(behind, first), end)
    counts = tl.where(end > first, end - first + at_end * EDGE + 1, 0)
    ends = tl.cumsum(counts, 0)
    return ends - counts, ends


@triton.jit
def _unit_at(x, first, end, behind, EDGE: tl.constexpr):
    """Return the unit of a request that begins at or behind a place in its share."""
    whole = tl.minimum(tl.maximum(behind, first), end) - first
    at_end = (tl.maximum(x - whole, 0) + EDGE) // (1 + EDGE)
    return tl.minimum(first + tl.minimum(x, whole) + at_end, end)


@triton.jit
def _at(x, b, BB: tl.constexpr):
    """Return a number of a block."""
    return tl.sum(tl.where(tl.arange(0, BB) == b, x, 0), 0)


@triton.jit
def _pool_rows(table, unit, end, PAGE: tl.constexpr, BN: tl.constexpr):
    """Return the rows of the pool that hold a unit's tokens."""
    x = unit * BN + tl.arange(0, BN)
    if PAGE % BN == 0:  # a unit lies on one page
        page = tl.load(table + unit * BN // PAGE).to(tl.int64)
    else:
        page = tl.load(table + x // PAGE, mask=x < end, other=0).to(tl.int64)
    return page * PAGE + x % PAGE


@triton.jit
def _step(
    q1, q2, k, v, rows, is_row, is_seen, distance, slope, top, total, acc, k_row, v_row, D, DV,
    factor, softcap, D1: tl.constexpr, D2: tl.constexpr, BV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, IS_EDGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a unit's keys and values to what rows have seen so far; scores are to base 2."""
    d1, dv = tl.arange(0, D1), tl.arange(0, BV)
    keys = tl.load(k + rows[None, :] * k_row + d1[:, None], mask=is_row[None, :], other=0.0)
    scores = tl.dot(q1, keys, input_precision=PRECISION)
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        is_number = (d2[:, None] < D) & is_row[None, :]
        keys = tl.load(k + rows[None, :] * k_row + d2[:, None], mask=is_number, other=0.0)
        scores = tl.dot(q2, keys, scores, input_precision=PRECISION)
    scores *= factor
    if HAS_SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp2(scores) + 1))  # tanh
    if HAS_SLOPES:
        scores -= slope[:, None] * distance
    if IS_EDGE:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1), propagate_nan=tl.PropagateNan.ALL)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - safe)
    weights = tl.exp2(scores - safe[:, None])
    total = total * shrink + tl.sum(weights, 1)
    is_value = is_row[:, None] & (dv[None, :] < DV)
    values = tl.load(v + rows[:, None] * v_row + dv[None, :], mask=is_value, other=0.0)
    acc = acc * shrink[:, None]
    if IS_EDGE:
        # 0 * nan is nan: what is not finite reaches the rows that see it, and no others.
        is_finite = tl.abs(values.to(tl.float32)) < float("inf")
        spoils = tl.max(tl.where(is_finite, 0, 1), 1)
        is_spoilt = tl.max(tl.where(is_seen & (spoils[None, :] > 0), 1, 0), 1)
        values = tl.where(is_finite, values, 0.0)
        acc = tl.where(is_spoilt[:, None] > 0, float("nan"), acc)
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _attend(  # noqa: PLR0915
    q, positions, k, v, table, slopes, outs, lses, B, n, G, D, DV, width, owner, ranks, left, chunk,
    factor, softcap, slope_rows, k_row, k_head, v_row, v_head, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, BI: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, BV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    EDGE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what a program's share of the units gives, for some rows of a K/V head."""
    c, kv_head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    programs, kv_heads = tl.num_programs(0), tl.num_programs(1)
    first, end, full, behind = _units(
        positions, block, B, n, G, owner, ranks, left, chunk, PAGE, BM, BN, BB, BI, HAS_LEFT,
        HAS_CHUNK,
    )  # fmt: skip
    starts, ends = _shares(first, end, behind, EDGE)
    units = tl.max(ends, 0).to(tl.int64)
    low, high = (c * units // programs).to(tl.int32), ((c + 1) * units // programs).to(tl.int32)
    is_request = tl.arange(0, BB) < B
    b_first = tl.sum(tl.where(is_request & (ends <= low), 1, 0), 0)
    b_end = tl.sum(tl.where(is_request & (starts < high), 1, 0), 0)
    # Row r is query r // G, and head r % G of this K/V head's.
    row = block * BM + tl.arange(0, BM)
    is_own = row < n * G
    head = kv_head * G + row % G
    d1, d2, dv = tl.arange(0, D1), D1 + tl.arange(0, max(D2, 16)), tl.arange(0, BV)
    k += kv_head * k_head
    v += kv_head * v_head
    for b in range(b_first, b_end):
        begin, first_b, end_b = _at(starts, b, BB), _at(first, b, BB), _at(end, b, BB)
        full_b, behind_b = _at(full, b, BB), _at(behind, b, BB)
        unit = _unit_at(tl.maximum(low - begin, 0), first_b, end_b, behind_b, EDGE)
        stop = _unit_at(high - begin, first_b, end_b, behind_b, EDGE)
        pages = table + b * width
        of_q = ((b * n + row // G).to(tl.int64) * (kv_heads * G) + head) * D
        q1 = tl.load(q + of_q[:, None] + d1[None, :], mask=is_own[:, None], other=0.0)
        q2 = tl.load(
            q + of_q[:, None] + d2[None, :], mask=is_own[:, None] & (d2[None, :] < D), other=0.0
        )
        at = tl.load(positions + b * n + row // G, mask=is_own, other=-1)
        slope = tl.zeros([BM], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + b * slope_rows + head, mask=is_own, other=0.0)
        top = tl.full([BM], float("-inf"), tl.float32)
        total, acc = tl.zeros([BM], tl.float32), tl.zeros([BM, BV], tl.float32)
        # Units of which all queries see all keys ...
        inner, outer = tl.maximum(unit, full_b), tl.minimum(stop, behind_b)
        for u in tl.range(inner, outer, num_stages=STAGES):
            x = u * BN + tl.arange(0, BN)
            rows = _pool_rows(pages, u, (u + 1) * BN, PAGE, BN)
            at_keys = (x // PAGE * ranks + owner) * PAGE + x % PAGE
            distance = (at[:, None] - at_keys[None, :]).to(tl.float32)
            top, total, acc = _step(
                q1, q2, k, v, rows, x >= 0, x >= 0, distance, slope, top, total, acc, k_row, v_row,
                D, DV, factor, softcap, D1, D2, BV, HAS_SOFTCAP, HAS_SLOPES, False, PRECISION,
            )  # fmt: skip
        # ... and those before and behind them.
        before = tl.maximum(tl.minimum(stop, full_b) - unit, 0)
        after = tl.maximum(unit, tl.maximum(full_b, behind_b))
        for edge in range(before + tl.maximum(stop - after, 0)):
            u = tl.where(edge < before, unit + edge, after + edge - before)
            x = u * BN + tl.arange(0, BN)
            rows = _pool_rows(pages, u, width * PAGE, PAGE, BN)
            at_keys = (x // PAGE * ranks + owner) * PAGE + x % PAGE
            is_seen = is_own[:, None] & (at_keys[None, :] <= at[:, None])
            is_seen = is_seen & (x < width * PAGE)[None, :]
            low_key = _first_key(tl.maximum(at, 0), left, chunk, HAS_LEFT, HAS_CHUNK)
            is_seen = is_seen & (at_keys[None, :] >= low_key[:, None])
            # Of a key that no query sees nothing is read: its page may be free, or not written.
            is_row = tl.max(tl.where(is_seen, 1, 0), 0) > 0
            distance = (at[:, None] - at_keys[None, :]).to(tl.float32)
            top, total, acc = _step(
                q1, q2, k, v, rows, is_row, is_seen, distance, slope, top, total, acc, k_row, v_row,
                D, DV, factor, softcap, D1, D2, BV, HAS_SOFTCAP, HAS_SLOPES, True, PRECISION,
            )  # fmt: skip
        total = tl.where(total == 0, 1.0, total)  # `top` is -inf there
        acc = acc / total[:, None]
        slot = ((c + b).to(tl.int64) * kv_heads + kv_head) * (n * G) + row
        tl.store(lses + slot, top + tl.log2(total), mask=is_own)
        is_out = is_own[:, None] & (dv[None, :] < DV)
        tl.store(outs + slot[:, None] * DV + dv[None, :], acc, mask=is_out)


@triton.jit
def _merge(
    positions, outs, lses, out, lse, B, n, G, DV, C, owner, ranks, left, chunk, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr,
    BV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_CHUNK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Write a row's output over all programs that have met its request, and its ``lse``."""
    r, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    first, end, _, behind = _units(
        positions, r // BM, B, n, G, owner, ranks, left, chunk, PAGE, BM, BN, BB, BI, HAS_LEFT,
        HAS_CHUNK,
    )  # fmt: skip
    starts, ends = _shares(first, end, behind, EDGE)
    units, begin, stop = tl.max(ends, 0).to(tl.int64), _at(starts, b, BB), _at(ends, b, BB)
    # The last program whose share begins at or before the request's first unit, and its last.
    c_first = (((begin + 1).to(tl.int64) * C - 1) // tl.maximum(units, 1)).to(tl.int32)
    c_last = ((stop.to(tl.int64) * C - 1) // tl.maximum(units, 1)).to(tl.int32)
    c_last = tl.where(stop > begin, c_last, c_first - 1)
    dv = tl.arange(0, BV)
    top, total = float("-inf"), 0.0
    acc = tl.zeros([BV], tl.float32)
    for start in range(c_first, c_last + 1, BC):
        c = start + tl.arange(0, BC)
        slot = ((c + b).to(tl.int64) * kv_heads + kv_head) * (n * G) + r
        logs = tl.load(lses + slot, mask=c <= c_last, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 0), propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, shrink = tl.exp2(logs - safe), tl.exp2(top - safe)
        is_part = (c <= c_last)[:, None] & (dv[None, :] < DV)
        parts = tl.load(outs + slot[:, None] * DV + dv[None, :], mask=is_part, other=0.0)
        acc = acc * shrink + tl.sum(weights[:, None] * parts, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    total = tl.where(total == 0, 1.0, total)  # `top` is -inf there
    acc = acc / total
    # Infinite numbers become NaN, as in every kernel.
    acc = tl.where(tl.abs(acc) < float("inf"), acc, float("nan"))
    i, head = r // G, kv_head * G + r % G
    of_row = (b * n + i).to(tl.int64) * (kv_heads * G) + head
    tl.store(out + of_row * DV + dv, acc, mask=dv < DV)
    of_lse = (b.to(tl.int64) * (kv_heads * G) + head) * n + i
    tl.store(lse + of_lse, (top + tl.log2(total)) * _LN_2)


@cache
def _processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; a few on the host, for Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q: Tensor, positions: Tensor, keys: PagedKeys, columns: range, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of some pages, as :func:`ring_torch.serving.paged.attend`.

    ``columns`` bound how many programs there are; what each reads follows from ``positions``.
    """
    batch, n, heads, dim = q.shape
    _, page_size, kv_heads, _ = keys.k.shape
    groups, value_dim = heads // kv_heads, keys.v.shape[-1]
    rows = n * groups
    block = min(_MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    blocks = -(-rows // block)
    width = 1 << (dim.bit_length() - 1)  # the largest power of 2 in it
    rest = max(16, triton.next_power_of_2(dim - width)) if dim > width else 0
    row = (dim + value_dim) * q.element_size()
    sizes = Sizes.of(block, dim + value_dim, page_size * row)
    unit = sizes.unit // row
    unit = max(16, min(128, 1 << (unit.bit_length() - 1)))
    units = batch * -(-len(columns) * page_size // unit)
    programs = sizes.programs * _processors(q.device) // (kv_heads * blocks)
    programs = max(1, min(programs, units // _LEAST_UNITS))
    outs = q.new_empty(programs + batch, kv_heads, rows, value_dim, dtype=torch.float32)
    lses = q.new_empty(programs + batch, kv_heads, rows, dtype=torch.float32)
    out = q.new_empty(batch, n, heads, value_dim, dtype=torch.float32)
    lse = q.new_empty(batch, heads, n, dtype=torch.float32)
    left, chunk = rules.mask.band[0], rules.mask.chunk_size
    factor = rules.scale * (_LOG2_E if rules.softcap is None else 2 * _LOG2_E / rules.softcap)
    slopes = None if rules.slopes is None else rules.slopes.float() * _LOG2_E
    positions = positions.int().contiguous()
    shared = {
        "PAGE": page_size, "BM": block, "BN": unit, "BB": triton.next_power_of_2(batch),
        "BI": triton.next_power_of_2(min(n, (block - 1) // groups + 2)),
        "BV": max(16, triton.next_power_of_2(value_dim)), "HAS_LEFT": left is not None,
        "HAS_CHUNK": chunk is not None, "EDGE": sizes.edge,
    }  # fmt: skip
    _attend[programs, kv_heads, blocks](
        q.contiguous(), positions, keys.k, keys.v, keys.table, slopes, outs, lses, batch, n, groups,
        dim, value_dim, keys.table.stride(0), keys.owner, keys.ranks, left or 0, chunk or 1, factor,
        (rules.softcap or 0.0) * _LOG2_E, 0 if slopes is None or len(slopes) == 1 else heads,
        keys.k.stride(1), keys.k.stride(2), keys.v.stride(1), keys.v.stride(2), D1=width, D2=rest,
        HAS_SOFTCAP=rules.softcap is not None, HAS_SLOPES=slopes is not None, STAGES=sizes.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=sizes.warps, **shared,
    )  # fmt: skip
    _merge[rows, kv_heads, batch](
        positions, outs, lses, out, lse, batch, n, groups, value_dim, programs, keys.owner,
        keys.ranks, left or 0, chunk or 1, BC=max(16, triton.next_power_of_2(min(programs, 64))),
        num_warps=2, **shared,
    )  # fmt: skip
    return out, lse
