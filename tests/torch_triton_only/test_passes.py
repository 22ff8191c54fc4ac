"""Triton's passes over memory: elementwise ones, packing, shifts, and joins of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from alone import alone
from torch import Tensor
from views import VIEWS, strided

from benchmarks.development.host_stubs import as_rank, without_launches
from ring_core import Mask
from ring_core.base.merge import UNSHIFTED_BIAS
from ring_torch import accumulate, autograd, memory_ops, merge_ops, ring_attention
from ring_torch.buffers import HeadBuffer, HeadPart
from ring_torch.records import AttentionState, Span
from ring_torch.transports import p2p, peer_copies

READABLE = [name for name in VIEWS if name not in {"strided", "permuted", "expanded"}]


# Blocks of rows are full: else the interpreter warns of the logarithm of zero.
def _rows(view: str, *shape: int) -> Tensor:
    return VIEWS[view](torch.randn(shape))


def _merge(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    spans = ((0, acc.shape[1]),)
    merge_ops.merge_on_gpu(
        acc, acc, acc_lse, out, lse, spans=spans, marks=0, first=False, last=True
    )


@pytest.mark.parametrize("view", READABLE)
def test_passes_over_memory(view: str) -> None:
    torch.manual_seed(0)
    x, y = _rows(view, 2, 32, 3, 8), _rows(view, 2, 32, 3, 8)
    dots = (x * y).sum(-1).transpose(1, 2).contiguous()
    torch.testing.assert_close(memory_ops.row_dots_on_gpu(x, y), dots)
    lse, sinks = _rows(view, 2, 3, 32), torch.randn(3)
    expected = -((sinks[:, None] - lse).exp() * dots).sum((0, 2))
    torch.testing.assert_close(memory_ops.sink_grads_on_gpu(sinks, lse, dots), expected)
    acc, acc_lse = torch.randn(2, 32, 3, 8), torch.randn(2, 3, 32)
    weights = torch.stack([acc_lse, lse]).softmax(0).transpose(2, 3).unsqueeze(-1)
    merged = weights[0] * acc + weights[1] * y
    total = torch.logaddexp(acc_lse, lse)
    _merge(acc, acc_lse, y, lse)
    torch.testing.assert_close(acc, merged)
    torch.testing.assert_close(acc_lse, total)


WIDE, ROWS = (2, 32, 3, 8), (2, 3, 32)
PASSES: dict[str, Callable[..., Any]] = {
    "merge": lambda view: _merge(
        torch.zeros(WIDE), torch.zeros(ROWS), view(torch.zeros(WIDE)), torch.zeros(ROWS)
    ),
    "merge lse": lambda view: _merge(
        torch.zeros(WIDE), torch.zeros(ROWS), torch.zeros(WIDE), view(torch.zeros(ROWS))
    ),
    "mark": lambda view: memory_ops.mark_on_gpu(torch.zeros(WIDE), view(torch.zeros(ROWS))),
    "dots": lambda view: memory_ops.row_dots_on_gpu(torch.zeros(WIDE), view(torch.zeros(WIDE))),
    "sinks": lambda view: memory_ops.sink_grads_on_gpu(
        view(torch.zeros(3)), torch.zeros(ROWS), torch.zeros(ROWS)
    ),
    "sinks of rows": lambda view: memory_ops.sink_grads_on_gpu(
        torch.zeros(3), torch.zeros(ROWS), view(torch.zeros(ROWS))
    ),
    "pack": lambda view: memory_ops.pack_kv_on_gpu(
        view(torch.zeros(WIDE)), torch.zeros(WIDE), torch.zeros(2, 32, 48), add=False
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_no_pass_reads(name: str) -> None:
    """Elementwise kernels assert that the last dimension is contiguous."""
    PASSES[name](lambda x: x)
    with pytest.raises(AssertionError):
        PASSES[name](strided)


H, N = 3, 5000  # not a multiple of a block of rows


def _tensors(batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sinks, lse, delta and the gradient; some rows have an infinite lse."""
    torch.manual_seed(0)
    sinks, lse = torch.randn(H).to(dtype), torch.randn(batch, H, N)
    delta = torch.randn(batch, H, N)
    lse[:, 1, ::7] = -torch.inf  # these rows see nothing
    weights = torch.where(lse == -torch.inf, 0.0, (sinks.float()[:, None] - lse).exp())
    return sinks, lse, delta, -(weights * delta).sum((0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2])
def test_it_is_that_of_torch(batch: int, dtype: torch.dtype) -> None:
    sinks, lse, delta, expected = _tensors(batch, dtype)
    grads = memory_ops.sink_grads_on_gpu(sinks, lse, delta)
    assert grads.dtype == dtype
    torch.testing.assert_close(
        grads, expected.to(dtype), rtol=1e-5 if dtype.itemsize > 2 else 0.01, atol=1e-3
    )
    assert torch.equal(grads, memory_ops.sink_grads_on_gpu(sinks, lse, delta))


@pytest.mark.parametrize("sinks_of_a_head", [0, 2])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_may_come_in_parts(on_gpu: bool, parts: int, sinks_of_a_head: int) -> None:
    """Rows may be split into a batch of launches, with padded delta, as some kernels need."""
    sinks, lse, delta, _ = _tensors(1, torch.float32)
    if sinks_of_a_head:
        sinks = torch.randn(H, sinks_of_a_head)
    expected = autograd._sink_grads(sinks, lse, delta)
    in_parts, delta = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (lse, delta))
    padded = torch.full((parts, H, N // parts + 3), torch.nan)[..., :-3].copy_(delta)
    with patch.object(autograd, "_can_use_triton", lambda *_: on_gpu):
        grads = autograd._sink_grads(sinks, in_parts.contiguous(), padded)
    assert grads.shape == sinks.shape
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-4)


def test_heads_without_rows_have_none() -> None:
    grads = memory_ops.sink_grads_on_gpu(torch.ones(H), *torch.empty(2, 1, H, 0).unbind())
    assert torch.equal(grads, torch.zeros(H))


@pytest.mark.parametrize("window", [128, None])
def test_all_rows_count(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see own keys only, whose launches come apart from the others', count, too."""
    shapes: list[tuple[int, ...]] = []

    def noted(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        shapes.extend((tuple(lse.shape), tuple(delta.shape)))
        return sinks

    def grads() -> None:
        q, k, v = (torch.zeros(1, 4096, heads, 128).bfloat16() for heads in (4, 2, 2))
        sinks = torch.zeros(4).requires_grad_()
        mask = Mask(causal=True, window=None if window is None else (window, 0))
        out = ring_attention(
            q.requires_grad_(), k, v, mask=mask, sinks=sinks, kernel="fa4", strategy="gather",
            layout="zigzag", transport="symm_mem",
        )  # fmt: skip
        torch.autograd.grad(out, (q, sinks), torch.ones_like(out))

    monkeypatch.setattr(peer_copies, "fits_one_kernel", lambda *_: False)
    monkeypatch.setattr(autograd, "_sink_grads", noted)
    with without_launches(), alone():
        as_rank(0, 4, grads)
    assert len(shapes) == 2
    assert {(x[0] * x[2], x[1]) for x in shapes} == {(4096, 4)}


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
    from ring_torch.comm import head_exchange_kernel

    torch.manual_seed(0)
    parts = [
        HeadPart(BATCH, lengths[n > 0], *rest[:3], head_major=rest[3])
        for n, rest in enumerate(TOGETHER[names])
    ]
    layout = HeadBuffer.of(RANKS, *parts)
    orders = [
        torch.randperm(RANKS * x.length, device="cpu") if ordered and not by_heads else None
        for x in parts
    ]
    shapes = [
        (x.length, RANKS * x.heads) if by_heads else (RANKS * x.length, x.heads) for x in parts
    ]
    tensors = [
        x.empty(*shape, torch.device("cpu")).normal_()
        for x, shape in zip(parts, shapes, strict=True)
    ]
    size = (RANKS, layout.message.size)
    expected, packed = (torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(2))
    p2p.move(layout, expected, tensors, orders, by_heads=by_heads, packs=True)
    head_exchange_kernel.move_on_gpu(layout, packed, tensors, orders, by_heads=by_heads, packs=True)
    assert torch.equal(packed, expected)
    unpacked = [torch.zeros_like(x) for x in tensors]
    head_exchange_kernel.move_on_gpu(
        layout, packed, unpacked, orders, by_heads=by_heads, packs=False
    )
    for x, y in zip(unpacked, tensors, strict=True):
        assert torch.equal(x, y)
    again = [torch.zeros_like(x) for x in tensors]
    p2p.move(layout, packed, again, orders, by_heads=by_heads, packs=False)
    for x, y in zip(again, tensors, strict=True):
        assert torch.equal(x, y)


def test_heads_may_lie_far_apart() -> None:
    """Offsets may exceed 2^31 elements; nearly nothing of this large memory is touched."""
    from ring_torch.comm import head_exchange_kernel

    heads, stride = 3, 3 << 29
    layout = HeadBuffer.of(1, HeadPart(1, 1, heads, 2, torch.int8))
    before = 1 << 30  # where 32-bit offsets would put the last head
    memory = torch.empty(before + (heads - 1) * stride + 2, dtype=torch.int8, device="cpu")
    x = memory.as_strided((1, 1, heads, 2), (1, 1, stride, 1), before)
    x.copy_(torch.arange(2 * heads, device="cpu").view(x.shape))
    packed = torch.zeros((1, layout.message.size), dtype=torch.uint8, device="cpu")
    head_exchange_kernel.move_on_gpu(layout, packed, [x], [None], by_heads=True, packs=True)
    assert packed[0, : 2 * heads].tolist() == list(range(2 * heads))
    x.zero_()
    head_exchange_kernel.move_on_gpu(layout, packed, [x], [None], by_heads=True, packs=False)
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


def by_torch(
    bias: Tensor, start: Tensor | None, stop: Tensor | None, ids: tuple[Tensor, Tensor] | None
) -> Tensor:
    keys, visible = torch.arange(NUM_KEYS), torch.ones(1, 1, NUM_ROWS, NUM_KEYS, dtype=torch.bool)
    if start is not None:
        visible = visible & (keys >= start[:, None])
    if stop is not None:
        visible = visible & (keys < stop[:, None])
    if ids is not None:
        q_ids, k_ids = ids
        visible = (
            visible & ((q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None])[:, None]
        )
    shown = torch.where(visible & bias.isfinite(), bias.float(), -torch.inf).amax(-1)
    return shown.masked_fill(~(shown.isfinite() & (shown.abs() > UNSHIFTED_BIAS)), 0.0)


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_largest_finite_number_of_what_is_seen(
    dtype: torch.dtype, *, segmented: bool
) -> None:
    torch.manual_seed(0)
    spans = {
        "all": (None, None),
        "causal": (None, torch.arange(687, 687 + NUM_ROWS).int()),
        "window": (torch.arange(NUM_ROWS).int() * 50, torch.arange(NUM_ROWS).int() * 50 + 20),
        "nothing": (torch.full((NUM_ROWS,), 9).int(), torch.full((NUM_ROWS,), 9).int()),
    }
    for (start, stop), (batch, heads) in product(spans.values(), ((1, 1), (2, 1), (1, 3))):
        bias = bias_of(dtype, batch, heads)
        ids = None
        if segmented:
            ids = (
                torch.randint(-1, 2, (2, NUM_ROWS)).int(),
                torch.randint(-1, 2, (2, NUM_KEYS)).int(),
            )
        shift = memory_ops.bias_shift_on_gpu(bias, start, stop, *(ids or (None, None)))
        torch.testing.assert_close(shift, by_torch(bias, start, stop, ids), rtol=0, atol=0)


#: Results that a merge takes, with their rows and marks.
Merge = Callable[..., None]


def _by_kernel(
    state: AttentionState, low: Tensor, results: Sequence[Tensor], **options: Any
) -> None:
    merge_ops.merge_on_gpu(state.out, low, state.lse, *results, **options)


def _one_by_kernel(state: AttentionState, out: Tensor, lse: Tensor) -> None:
    whole = ((0, out.shape[1]),)
    _by_kernel(state, state.out, [out, lse], spans=whole, marks=0, first=False, last=True)


WAYS = pytest.mark.parametrize(
    ("merge", "merge_one"),
    [(_by_kernel, _one_by_kernel), (accumulate.merge, accumulate.merge_in_torch)],
    ids=["kernel", "torch"],
)
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


def _bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor, with one NaN for all."""
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int16)


@WAYS
@pytest.mark.parametrize("marks", [ALL_MARKS, SOME_MARKS], ids=["marked", "some-marked"])
@pytest.mark.parametrize(("dtype", "of_results"), DTYPES)
@pytest.mark.parametrize(
    ("spans", "at_once"), [(x, n) for x in SPANS for n in range(1, min(3, len(x)) + 1)]
)
def test_results_are_merged_as_one_by_one(
    spans: tuple[Span, ...], dtype: torch.dtype, of_results: torch.dtype, at_once: int, marks: int,
    merge: Merge, merge_one: Merge,
) -> None:  # fmt: skip
    outs, lses = _results(spans, of_results, marks)
    into, by_torch = (
        AttentionState(torch.zeros(2, 40, 3, 12), torch.full((2, 3, 40), -torch.inf))
        for _ in range(2)
    )
    # The first merge does not read what is there.
    out, low = (torch.full((2, 40, 3, 12), torch.nan, dtype=dtype) for _ in range(2))
    state = AttentionState(out, torch.full((2, 3, 40), torch.nan))
    for start in range(0, len(spans), at_once):
        stop, results = min(start + at_once, len(spans)), list[Tensor]()
        for n in range(start, stop):
            results += [outs[n].clone(), lses[n].clone()]
            seen = lses[n].masked_fill(lses[n].isinf(), torch.nan) if marks >> n & 1 else lses[n]
            (row, count) = spans[n]
            for one, total in ((merge_one, into), (accumulate.merge_in_torch, by_torch)):
                one(total.take(slice(row, row + count)), outs[n], seen)
        if start == 0 and spans[0] == (0, 40) and dtype == of_results:  # it may be the state itself
            results[:2] = out.copy_(results[0]), state.lse.copy_(results[1])
        is_last = stop == len(spans)
        options = {"marks": marks >> start & (1 << stop - start) - 1, "spans": spans[start:stop]}
        merge(state, low, results, first=start == 0, last=is_last, **options)
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
        if sums.dtype == torch.bfloat16 and merge is _by_kernel:
            # Triton's interpreter truncates where GPUs round.
            expected = into.out.view(torch.bfloat16)[..., 1::2].contiguous()
        assert torch.equal(_bits(sums), _bits(expected))
    is_nan = out.isnan().any(-1).transpose(1, 2)
    assert torch.equal(is_nan | state.lse.isnan(), is_nan)
    last_row = spans[-1][0] + 2
    assert is_nan[0, 1, last_row]
    assert state.lse[0, 1, last_row].isnan()


@WAYS
def test_only_marked_infinities_are_no_numbers(merge: Merge, merge_one: Merge) -> None:
    """A row with lse -inf sees nothing in an unmarked result; in a marked one it is not finite."""
    del merge_one
    for marks in range(8):
        outs = [torch.full((1, 40, 1, 12), float(n)) for n in range(3)]
        lses = [torch.zeros(1, 1, 40) for _ in range(3)]
        for n, (x, lse) in enumerate(zip(outs, lses, strict=True)):
            lse[..., n], x[:, n] = -torch.inf, torch.inf
        out, lse = torch.empty(1, 40, 1, 12), torch.empty(1, 1, 40)
        merge(
            AttentionState(out, lse), out, [x for y in zip(outs, lses, strict=True) for x in y],
            spans=((0, 40),) * 3, marks=marks, first=True, last=True,
        )  # fmt: skip
        for n in range(3):
            is_marked = bool(marks >> n & 1)
            assert bool(lse[..., n].isnan()) == is_marked
            assert bool(out[:, n].isnan().all()) == is_marked
            mean = sum(m for m in range(3) if m != n) / 2
            assert is_marked or torch.allclose(out[:, n], torch.tensor(mean))
        torch.testing.assert_close(out[:, 3:], torch.ones(1, 37, 1, 12))


def test_a_result_of_no_weight_adds_nothing() -> None:
    """A result with lse -200 next to lse 0 has weight 0 in float32: what it holds is ignored."""
    options = {"spans": ((0, 40), (0, 40)), "marks": 3, "first": True, "last": True}
    right, wrong = torch.randn(2, 40, 3, 12).half(), torch.full((2, 40, 3, 12), torch.inf).half()
    for order in (1, -1):
        results = [(right.clone(), torch.zeros(2, 3, 40))]
        results = [*results, (wrong.clone(), torch.full((2, 3, 40), -200.0))][::order]
        state = AttentionState(*results[0])  # the first one lies where the merged ones go
        _by_kernel(state, state.out, [x for pair in results for x in pair], **options)
        assert torch.equal(state.out, right)
        assert torch.equal(state.lse, torch.zeros(2, 3, 40))


def test_a_single_merge_takes_no_low_halves() -> None:
    """A merge that is first and last neither reads nor writes the argument for low halves."""
    spans = ((0, 40), (20, 20))
    outs, lses = _results(spans, torch.bfloat16, ALL_MARKS)
    low = torch.full_like(outs[0], 5.0)
    state = AttentionState(torch.empty_like(low), torch.empty(2, 3, 40))
    results = [x for pair in zip(outs, lses, strict=True) for x in pair]
    _by_kernel(state, low, results, spans=spans, marks=3, first=True, last=True)
    assert (low == 5.0).all()


def _sum_by_kernel(dq: Tensor, parts: Sequence[tuple[slice, Tensor]]) -> None:
    spans = tuple((rows.start, rows.stop - rows.start) for rows, _ in parts)
    merge_ops.sum_on_gpu(dq, [x for _, x in parts], spans)


@pytest.mark.parametrize("add", [_sum_by_kernel, accumulate._sum_rows], ids=["kernel", "torch"])
@pytest.mark.parametrize("spans", [((0, 40),), ((0, 40), (20, 20)), ((3, 30), (0, 5))])
def test_parts_are_added_as_one_by_one(
    spans: tuple[Span, ...], add: Callable[[Tensor, Sequence[tuple[slice, Tensor]]], None]
) -> None:
    torch.manual_seed(0)
    dq, *parts = [torch.randn(2, n + 3, 3, 12).half()[:, 3:] for _, n in ((0, 40), *spans)]
    total = torch.zeros(2, 40, 3, 12)
    rows = [slice(start, start + n) for start, n in spans]
    for some, part in zip(rows, parts, strict=True):
        total[:, some] += part
    total += dq
    add(dq, [*zip(rows, parts, strict=True)])
    assert torch.equal(dq, total.half())
