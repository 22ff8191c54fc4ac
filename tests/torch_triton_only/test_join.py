"""Results of a row's launches, and parts of its gradient, are joined in one elementwise pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_torch import accumulate, merge_ops
from ring_torch.records import AttentionState, Span

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
