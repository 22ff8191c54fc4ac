"""Parts of a row's attention, and of its gradient, are joined in one elementwise pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from ring_torch import merge_ops
from ring_torch.kernels.api import merge_of_spans
from ring_torch.records import AttentionState

#: Row ``(start, length)`` of each part after the first, which has all 40 rows.
PARTS: list[tuple[tuple[int, int], ...]] = [(), ((0, 40),), ((0, 40), (20, 20)), ((3, 30), (0, 5))]


def _joined(spans: tuple[tuple[int, int], ...]) -> tuple[merge_ops.JoinOnGpu, list[torch.Tensor]]:
    """Return the join, and float16 tensors of each part, which are not adjacent in memory."""
    torch.manual_seed(0)
    numbers = [torch.randn(2, n + 3, 3, 12).half()[:, 3:] for _, n in ((0, 40), *spans)]
    return merge_ops.JoinOnGpu([(0, 40), *spans]), numbers


@pytest.mark.parametrize("spans", PARTS)
def test_parts_are_merged_as_one_by_one(spans: tuple[tuple[int, int], ...]) -> None:
    """Joined parts equal merges one by one, to the bit; rows with non-finite scores become NaN."""
    join, outs = _joined(spans)
    lses = [torch.randn(2, 3, out.shape[1]) for out in outs]
    lses[-1][0, 1, 2] = torch.inf
    into = AttentionState(torch.zeros(2, 40, 3, 12), torch.full((2, 3, 40), -torch.inf))
    for (start, n), out, lse in zip(((0, 40), *spans), outs, lses, strict=True):
        marked = lse.masked_fill(lse.isinf(), torch.nan)
        merge_ops.merge_on_gpu(*into.take(slice(start, start + n)), out, marked)
    join.merge(list(zip(outs, lses, strict=True)))
    torch.testing.assert_close(lses[0], into.lse, rtol=0, atol=0, equal_nan=True)
    visible = ~into.lse.isnan().transpose(1, 2)
    assert visible.sum() == visible.numel() - 1
    assert torch.equal(outs[0][visible], into.out.half()[visible])
    assert into.out[~visible].isnan().all()
    assert outs[0][~visible].isnan().all()


def test_a_part_of_no_weight_adds_nothing() -> None:
    """A part with lse -200 next to lse 0 has weight 0 in float32: whatever it holds is ignored."""
    join, (out, part) = _joined(((0, 40),))
    expected = out.clone()
    lse, part_lse = torch.zeros(2, 3, 40), torch.full((2, 3, 40), -200.0)
    join.merge([(out, lse), (part.fill_(torch.inf), part_lse)])
    assert torch.equal(out, expected)
    lse, part_lse = part_lse, torch.zeros(2, 3, 40)
    join.merge([(part, lse), (expected, part_lse)])
    assert torch.equal(part, expected)


@pytest.mark.parametrize("spans", PARTS[1:])
def test_parts_are_added_as_one_by_one(spans: tuple[tuple[int, int], ...]) -> None:
    join, parts = _joined(spans)
    total = torch.zeros(2, 40, 3, 12)
    for (start, n), part in zip(spans, parts[1:], strict=True):
        total[:, start : start + n] += part
    total += parts[0]
    join.sum(parts)
    assert torch.equal(parts[0], total.half())


#: Rows of each result, of 40 in all: the first two are merged together, then one at a time.
IN_TURN: list[tuple[tuple[int, int], ...]] = [
    ((0, 40),),
    ((7, 11),),
    ((0, 40), (20, 20)),
    ((7, 11), (20, 20)),
    ((0, 20), (20, 20), (3, 30)),
    ((0, 40), (0, 40), (0, 40), (0, 40)),
    ((0, 40), (0, 40), (20, 20), (0, 5), (5, 33)),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def _results(
    spans: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return 16-bit results with non-finite values, weights of 0, and negative zeros."""
    torch.manual_seed(1)
    narrow = torch.float16 if dtype == torch.float32 else dtype
    # They are not adjacent in memory.
    outs = [torch.randn(2, n + 3, 3, 12).to(narrow)[:, 3:] for _, n in spans]
    lses = [torch.randn(2, 3, out.shape[1]) for out in outs]
    for out, lse in zip(outs, lses, strict=True):
        out[0, 1] = -0.0
        lse[1, 2, 2] = 200.0  # others have weight 0 next to it
        lse[0, 2, 3] = -200.0
        out[0, 3, 2] = torch.inf
        out[1, 0, 1, 5] = torch.nan
        out[1, 4] *= 1e-5  # the sums' upper halves are subnormal in float16
    lses[-1][0, 1, 2] = torch.inf
    return outs, lses


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor, with one NaN for all."""
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int16)


def _merges_on_cpu(spans: Any, *, first: bool, last: bool) -> Callable[..., None]:
    return merge_of_spans(torch.empty(0), spans, first=first, last=last)


def _merge_one_on_cpu(acc: Any, acc_lse: Any, out: Any, lse: Any) -> None:
    AttentionState(acc, acc_lse).merge(out, lse)


@pytest.mark.parametrize(
    ("merge_of", "merge_one"),
    [
        (merge_ops.merge_of_spans_on_gpu, merge_ops.merge_on_gpu),
        (_merges_on_cpu, _merge_one_on_cpu),
    ],
    ids=["kernel", "torch"],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", IN_TURN)
def test_spans_are_merged_as_one_by_one(
    spans: tuple[tuple[int, int], ...], dtype: torch.dtype, merge_of: Any, merge_one: Any
) -> None:
    """Merged spans equal merges one by one, bit for bit, also with non-finite or no results."""
    outs, lses = _results(spans, dtype)
    into = AttentionState(torch.zeros(2, 40, 3, 12), torch.full((2, 3, 40), -torch.inf))
    # The first merge does not read what is there.
    out, low = (torch.full((2, 40, 3, 12), torch.nan, dtype=dtype) for _ in range(2))
    lse = torch.full((2, 3, 40), torch.nan)
    for start, stop in pairwise((0, *range(min(2, len(spans)), len(spans) + 1))):
        results = []
        for (row, n), x, x_lse in list(zip(spans, outs, lses, strict=True))[start:stop]:
            results += [x.clone(), x_lse.clone()]
            merge_one(
                *into.take(slice(row, row + n)), x, x_lse.masked_fill(x_lse.isinf(), torch.nan)
            )
        if start == 0 and spans[0] == (0, 40) and dtype != torch.float32:  # it may be in `out`
            results[0] = out.copy_(results[0])
        is_last = stop == len(spans)
        merge_of(spans[start:stop], first=start == 0, last=is_last)(out, low, lse, *results)
        torch.testing.assert_close(lse, into.lse, rtol=0, atol=0, equal_nan=True)
        sums = out
        if dtype != torch.float32 and not is_last:  # float32 loses no bits
            halves = torch.stack([x.view(torch.int16) for x in (low, out)], dim=-1)
            sums = halves.view(torch.float32).squeeze(-1)
        expected = into.out.to(sums.dtype)
        if sums.dtype == torch.bfloat16 and merge_one is merge_ops.merge_on_gpu:
            # Triton's interpreter truncates where GPUs round.
            expected = into.out.view(torch.bfloat16)[..., 1::2].contiguous()
        assert torch.equal(_bits(sums), _bits(expected))
    assert out.isnan().any()


def test_a_single_merge_takes_no_low_halves() -> None:
    """A merge that is first and last neither reads nor writes the argument for low halves."""
    outs, lses = _results(((0, 40), (20, 20)), torch.bfloat16)
    low, lse = torch.full_like(outs[0], 5.0), torch.empty(2, 3, 40)
    out = torch.empty_like(low)
    merge = merge_ops.merge_of_spans_on_gpu(((0, 40), (20, 20)), first=True, last=True)
    merge(out, low, lse, outs[0], lses[0], outs[1], lses[1])
    assert (low == 5.0).all()
