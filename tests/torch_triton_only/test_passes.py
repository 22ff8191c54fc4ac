"""Triton's passes over memory: elementwise ones, packing, shifts, and joins of results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from views import VIEWS

from ring_core.base.merge import UNSHIFTED_BIAS
from ring_torch import accumulate, autograd, memory_ops, merge_ops
from ring_torch.buffers import HeadBuffer, HeadPart
from ring_torch.records import AttentionState, Span
from ring_torch.transports import p2p

READABLE = [name for name in VIEWS if name not in {"strided", "permuted", "expanded"}]


def _merge(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    options: Any = {"spans": ((0, acc.shape[1]),), "first": False, "last": True}
    merge_ops.merge_on_gpu(acc, acc, acc_lse, out, lse, marks=0, **options)


@pytest.mark.parametrize("view", READABLE)
def test_passes_over_memory(view: str) -> None:
    torch.manual_seed(0)
    # Blocks of rows are full: else the interpreter warns of the logarithm of zero.
    x, y, lse = (VIEWS[view](torch.randn(shape)) for shape in (WIDE, WIDE, ROWS))
    dots = (x * y).sum(-1).transpose(1, 2).contiguous()
    torch.testing.assert_close(memory_ops.row_dots_on_gpu(x, y), dots)
    expected = -((1 - lse).exp() * dots).sum((0, 2))
    grads = memory_ops.sink_grads_on_gpu(torch.ones(3), lse, dots)
    torch.testing.assert_close(grads, expected)
    packed = torch.zeros(2, 32, 48)
    memory_ops.pack_kv_on_gpu(x, y, packed, add=False)
    torch.testing.assert_close(packed, torch.cat([x.flatten(2), y.flatten(2)], dim=2))
    out, marked = x.clone(), torch.zeros(ROWS)
    marked[..., 0], marked[..., 1:3], out[:, 1] = torch.inf, -torch.inf, torch.nan
    memory_ops.mark_on_gpu(out, marked)
    assert marked[..., :2].isnan().all() and (marked[..., 2] == -torch.inf).all()
    assert (marked[..., 3:] == 0).all()
    acc, acc_lse = torch.randn(WIDE), torch.randn(ROWS)
    weights = torch.stack([acc_lse, lse]).softmax(0).transpose(2, 3).unsqueeze(-1)
    merged, total = weights[0] * acc + weights[1] * y, torch.logaddexp(acc_lse, lse)
    _merge(acc, acc_lse, y, lse)
    torch.testing.assert_close(acc, merged)
    torch.testing.assert_close(acc_lse, total)


WIDE, ROWS = (2, 32, 3, 8), (2, 3, 32)
H, N = 3, 5000  # not a multiple of a block of rows


@pytest.mark.parametrize(
    ("on_gpu", "dtype", "batch", "parts", "sinks_of_a_head"),
    [
        *product([True], [torch.float32, torch.bfloat16, torch.float16], [1, 2], [1], [0]),
        *product([False, True], [torch.float32], [1], [4], [0, 2]),
    ],
)
def test_gradients_of_sinks(
    on_gpu: bool, dtype: torch.dtype, batch: int, parts: int, sinks_of_a_head: int
) -> None:
    """Some rows see nothing. They may be split into a batch of launches, with padded delta."""
    torch.manual_seed(0)
    sinks = torch.randn(H, *[sinks_of_a_head] * bool(sinks_of_a_head)).to(dtype)
    lse, delta = torch.randn(2, batch, H, N).unbind()
    lse[:, 1, ::7] = -torch.inf
    # Several sinks of a head are as many terms of the softmax.
    weights = (sinks.float().view(H, 1, -1) - lse[..., None]).exp()
    weights = weights.masked_fill(lse[..., None] == -torch.inf, 0.0)
    expected = -(weights * delta[..., None]).sum((0, 2)).view(sinks.shape).to(dtype)
    if parts > 1:
        lse, delta = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (lse, delta))
    padded = torch.full((*delta.shape[:2], delta.shape[2] + 3), torch.nan)[..., :-3].copy_(delta)
    with patch.object(autograd, "_can_use_triton", lambda *_: on_gpu):
        grads, again = (autograd._sink_grads(sinks, lse.contiguous(), padded) for _ in range(2))
        none = autograd._sink_grads(sinks, *torch.empty(2, 1, H, 0).unbind())
    assert grads.dtype == dtype and torch.equal(grads, again)
    rtol = 1e-5 if dtype.itemsize > 2 else 0.01
    torch.testing.assert_close(grads, expected, rtol=rtol, atol=1e-3)
    assert torch.equal(none, torch.zeros_like(sinks))


RANKS, BATCH = 4, 2
#: Tensors exchanged together: heads per rank, head dim, dtype, True for memory `[B, H, T]`.
TOGETHER: dict[str, list[tuple[int, int, torch.dtype, bool]]] = {
    "q, k, v": [(3, 16, torch.bfloat16, False), (1, 16, torch.bfloat16, False),
                (1, 24, torch.bfloat16, False)],
    "out, lse": [(3, 24, torch.bfloat16, False), (3, 1, torch.float32, True)],
    "dout": [(40, 16, torch.float32, False)],
}  # fmt: skip


@pytest.mark.parametrize("by_heads", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("lengths", [(5, 7), (8, 8)])
@pytest.mark.parametrize("names", TOGETHER)
def test_packing(names: str, lengths: tuple[int, int], ordered: bool, by_heads: bool) -> None:
    # Imported here, as Triton reads TRITON_INTERPRET when it is imported.
    from ring_torch.comm.head_exchange_kernel import move_on_gpu

    torch.manual_seed(0)
    parts = [
        HeadPart(BATCH, lengths[n > 0], *rest[:3], head_major=rest[3])
        for n, rest in enumerate(TOGETHER[names])
    ]
    layout, cpu = HeadBuffer.of(RANKS, *parts), torch.device("cpu")
    orders = [torch.randperm(RANKS * x.length) if ordered and not by_heads else None for x in parts]
    tensors = [
        x.empty(x.length * (1 if by_heads else RANKS), x.heads * (RANKS if by_heads else 1), cpu).normal_()
        for x in parts
    ]  # fmt: skip
    expected, packed = torch.zeros((2, RANKS, layout.message.size), dtype=torch.uint8).unbind()
    p2p.move(layout, expected, tensors, orders, by_heads=by_heads, packs=True)
    move_on_gpu(layout, packed, tensors, orders, by_heads=by_heads, packs=True)
    assert torch.equal(packed, expected)
    for unpack in (move_on_gpu, p2p.move):
        unpacked = [torch.zeros_like(x) for x in tensors]
        unpack(layout, packed, unpacked, orders, by_heads=by_heads, packs=False)
        assert all(map(torch.equal, unpacked, tensors))


def test_heads_may_lie_far_apart() -> None:
    """Offsets may exceed 2^31 elements; nearly nothing of this large memory is touched."""
    from ring_torch.comm.head_exchange_kernel import move_on_gpu

    heads, stride = 3, 3 << 29
    layout = HeadBuffer.of(1, HeadPart(1, 1, heads, 2, torch.int8))
    before = 1 << 30  # where 32-bit offsets would put the last head
    memory = torch.empty(before + (heads - 1) * stride + 2, dtype=torch.int8, device="cpu")
    x = memory.as_strided((1, 1, heads, 2), (1, 1, stride, 1), before)
    x.copy_(torch.arange(2 * heads, device="cpu").view(x.shape))
    packed = torch.zeros((1, layout.message.size), dtype=torch.uint8, device="cpu")
    move_on_gpu(layout, packed, [x], [None], by_heads=True, packs=True)
    assert packed[0, : 2 * heads].tolist() == list(range(2 * heads))
    x.zero_()
    move_on_gpu(layout, packed, [x], [None], by_heads=True, packs=False)
    assert x.flatten().tolist() == list(range(2 * heads))


NUM_ROWS, NUM_KEYS = 13, 700  # the kernel reads 8 rows and 512 keys at a time


def bias_of(dtype: torch.dtype, batch: int, heads: int) -> Tensor:
    """Return a bias of small and large numbers, hidden keys, and rows without a finite number."""
    bias = torch.randn(batch, heads, NUM_ROWS, NUM_KEYS).to(dtype)
    bias[:, :, 8:] *= 30  # rows with a shift
    bias[:, :, 3:5] = torch.finfo(dtype).min
    bias[:, :, 5] = -torch.inf
    bias[:, :, 6, 7] = torch.inf
    bias[:, :, 7, 600:] = -torch.inf
    return bias


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 3)])
def test_a_shift_is_the_largest_finite_number_of_what_is_seen(
    sizes: tuple[int, int], dtype: torch.dtype, *, segmented: bool
) -> None:
    torch.manual_seed(0)
    rows, keys = torch.arange(NUM_ROWS).int(), torch.arange(NUM_KEYS)
    nine = torch.full((NUM_ROWS,), 9).int()
    window = (rows * 50, rows * 50 + 20)
    for start, stop in ((None, None), (None, rows + 687), window, (nine, nine)):
        bias, ids = bias_of(dtype, *sizes), list[Tensor]()
        visible = torch.ones(1, 1, NUM_ROWS, NUM_KEYS, dtype=torch.bool)
        if start is not None:
            visible = visible & (keys >= start[:, None])
        if stop is not None:
            visible = visible & (keys < stop[:, None])
        if segmented:
            q_ids, k_ids = ids = [torch.randint(-1, 2, (2, n)).int() for n in (NUM_ROWS, NUM_KEYS)]
            same = (q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None]
            visible = visible & same[:, None]
        expected = torch.where(visible & bias.isfinite(), bias.float(), -torch.inf).amax(-1)
        expected[~(expected.isfinite() & (expected.abs() > UNSHIFTED_BIAS))] = 0.0
        shift = memory_ops.bias_shift_on_gpu(bias, start, stop, *(ids or (None, None)))
        torch.testing.assert_close(shift, expected, rtol=0, atol=0)


#: Rows ``(start, length)`` of each result, of 40 in all.
SPANS: list[tuple[Span, ...]] = [
    ((0, 40),), ((7, 11),), ((0, 40), (20, 20)), ((7, 11), (20, 20)), ((0, 20), (20, 20), (3, 30)),
    ((0, 40), (3, 30), (0, 5)), ((0, 40), (0, 40), (0, 40), (0, 40)),
    ((0, 40), (0, 40), (20, 20), (0, 5), (5, 33)),
]  # fmt: skip
#: Dtypes of the sums, and of the results.
DTYPES = [(x, x) for x in (torch.float16, torch.bfloat16, torch.float32)]
DTYPES.append((torch.float32, torch.float16))
ALL_MARKS, SOME_MARKS = 0b11111, 0b01010


def _results(spans: Sequence[Span], dtype: torch.dtype, marks: int) -> tuple[list[Tensor], ...]:
    """Return results with non-finite values, weights of 0, negative zeros and unseen rows."""
    torch.manual_seed(1)
    # They are not adjacent in memory.
    outs = [torch.randn(2, n + 3, 3, 12).to(dtype)[:, 3:] for _, n in spans]
    lses = [torch.randn(2, 3, out.shape[1]) for out in outs]
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        out[0, 1] = -0.0
        lse[1, 2, 2] = 200.0  # others have weight 0 next to it
        lse[0, 2, 3] = -200.0
        out[0, 3, 2] = torch.inf
        out[1, 0, 1, 5] = torch.nan
        out[1, 4] *= 1e-5  # the sums' upper halves are subnormal in float16
        # A row that sees nothing may hold anything; one whose scores are not finite, if marked.
        lse[1, 1, 3], out[1, 3, 1] = -torch.inf, torch.nan
        if n + 1 == len(lses):
            lse[0, 1, 2] = torch.inf if marks >> n & 1 else torch.nan
    return outs, lses


def merged(
    state: AttentionState, low: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], **options: Any
) -> None:  # fmt: skip
    results = [x for pair in zip(outs, lses, strict=True) for x in pair]
    merge_ops.merge_on_gpu(state.out, low, state.lse, *results, **options)


MERGES = [(x, n) for x in SPANS for n in range(1, min(3, len(x)) + 1)]


@pytest.mark.parametrize(
    ("merge", "marks"), [*product(range(len(MERGES)), [ALL_MARKS, SOME_MARKS])]
)
def test_results_are_merged_as_one_by_one(merge: int, marks: int) -> None:
    """Sums have the bits of merges of one result by the kernel, and are near those of torch.

    Each merge is of one dtype with all marks, and of another one with some, in turn.
    """
    (spans, at_once), turn = MERGES[merge], merge + (marks == ALL_MARKS)
    dtype, of_results = DTYPES[turn % len(DTYPES)]
    outs, lses = _results(spans, of_results, marks)
    into, by_torch = (
        AttentionState(torch.zeros(2, 40, 3, 12), torch.full((2, 3, 40), -torch.inf))
        for _ in range(2)
    )
    # The first merge does not read what is there.
    out, low = (torch.full((2, 40, 3, 12), torch.nan, dtype=dtype) for _ in range(2))
    state = AttentionState(out, torch.full((2, 3, 40), torch.nan))
    for start in range(0, len(spans), at_once):
        stop = min(start + at_once, len(spans))
        some = [[x.clone() for x in y[start:stop]] for y in (outs, lses)]
        for n in range(start, stop):
            seen = lses[n].masked_fill(lses[n].isinf(), torch.nan) if marks >> n & 1 else lses[n]
            rows = slice(spans[n][0], sum(spans[n]))
            _merge(*into.take(rows), outs[n], seen)
            accumulate.merge_in_torch(by_torch.take(rows), outs[n], seen)
        if start == 0 and spans[0] == (0, 40) and dtype == of_results:  # it may be the state itself
            some[0][0], some[1][0] = out.copy_(some[0][0]), state.lse.copy_(some[1][0])
        is_last = stop == len(spans)
        some_marks = marks >> start & (1 << stop - start) - 1
        options: Any = {"marks": some_marks, "spans": spans[start:stop], "last": is_last}
        merged(state, low, *some, first=start == 0, **options)
        # A merge that is first and last neither reads nor writes low halves.
        assert not (start == 0 and is_last) or low.isnan().all()
        torch.testing.assert_close(state.lse, into.lse, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(into.lse, by_torch.lse, equal_nan=True)
        is_finite = by_torch.out.isfinite()  # of no weight, an infinity in sums counts in torch
        assert is_finite.float().mean() > 0.9
        torch.testing.assert_close(into.out[is_finite], by_torch.out[is_finite])
        sums = out
        if dtype != torch.float32 and not is_last:  # float32 loses no bits
            halves = torch.stack([x.view(torch.int16) for x in (low, out)], dim=-1)
            sums = halves.view(torch.float32).squeeze(-1)
        expected = into.out.to(sums.dtype)
        if sums.dtype == torch.bfloat16:  # Triton's interpreter truncates where GPUs round
            expected = into.out.view(torch.bfloat16)[..., 1::2].contiguous()
        bits = [x.masked_fill(x.isnan(), torch.nan).view(torch.int16) for x in (sums, expected)]
        assert torch.equal(*bits)
    is_nan = out.isnan().any(-1).transpose(1, 2)
    assert torch.equal(is_nan | state.lse.isnan(), is_nan)
    assert (is_nan & state.lse.isnan())[0, 1, spans[-1][0] + 2]


def test_a_result_of_no_weight_adds_nothing() -> None:
    """A result with lse -200 next to lse 0 has weight 0 in float32: what it holds is ignored."""
    options = {"spans": ((0, 40), (0, 40)), "marks": 3, "first": True, "last": True}
    right, wrong = torch.randn(2, 40, 3, 12).half(), torch.full((2, 40, 3, 12), torch.inf).half()
    for order in (1, -1):
        outs = [right.clone(), wrong.clone()][::order]
        lses = [torch.full((2, 3, 40), x) for x in (0.0, -200.0)][::order]
        state = AttentionState(outs[0], lses[0])  # the first one lies where the merged ones go
        merged(state, state.out, outs, lses, **options)
        assert torch.equal(state.out, right)
        assert torch.equal(state.lse, torch.zeros(2, 3, 40))


@pytest.mark.parametrize("spans", [((0, 40),), ((0, 40), (20, 20)), ((3, 30), (0, 5))])
def test_parts_are_added_as_one_by_one(spans: tuple[Span, ...]) -> None:
    torch.manual_seed(0)
    dq, *parts = [torch.randn(2, n + 3, 3, 12).half()[:, 3:] for _, n in ((0, 40), *spans)]
    total, by_torch = torch.zeros(2, 40, 3, 12), dq.clone()
    rows = [slice(x, x + n) for x, n in spans]
    for some, part in zip(rows, parts, strict=True):
        total[:, some] += part
    total += dq
    accumulate._sum_rows(by_torch, [*zip(rows, parts, strict=True)])
    merge_ops.sum_on_gpu(dq, parts, spans)
    assert torch.equal(dq, total.half()) and torch.equal(by_torch, dq)
