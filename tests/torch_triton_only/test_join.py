"""Parts of a row's attention, and of its gradient, are joined in one pass over memory."""

from __future__ import annotations

import pytest
import torch

from ring_torch import merge_ops
from ring_torch.records import AttentionState

#: Rows of each part beside the first, which has all 40.
PARTS: list[tuple[tuple[int, int], ...]] = [(), ((0, 40),), ((0, 40), (20, 20)), ((3, 30), (0, 5))]


def _joined(spans: tuple[tuple[int, int], ...]) -> tuple[merge_ops.JoinOnGpu, list[torch.Tensor]]:
    """Return the join, and float16 numbers of each part, which lie apart in memory."""
    torch.manual_seed(0)
    numbers = [torch.randn(2, n + 3, 3, 12).half()[:, 3:] for _, n in ((0, 40), *spans)]
    return merge_ops.JoinOnGpu([(0, 40), *spans]), numbers


@pytest.mark.parametrize("spans", PARTS)
def test_parts_are_merged_as_one_by_one(spans: tuple[tuple[int, int], ...]) -> None:
    """To the bit, with rows whose scores are not finite, which become NaN."""
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
    """Whatever it holds: beside lse = 0 the weight of lse = -200 is 0 in float32."""
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


#: Rows of each of several results, of 40 rows in all, which are merged two at a time.
IN_TURN: list[tuple[tuple[int, int], ...]] = [
    ((0, 40),),
    ((0, 40), (20, 20)),
    ((0, 20), (20, 20), (3, 30)),
    ((0, 40), (0, 40), (20, 20), (0, 5), (5, 33)),
    ((7, 11), (20, 20)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("spans", IN_TURN)
def test_two_at_once_are_merged_as_one_by_one(
    spans: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> None:
    """To the bit, with results that are not finite, weights of 0, zeros below 0 and no results."""
    torch.manual_seed(1)
    # They lie apart in memory.
    outs = [torch.randn(2, n + 3, 3, 12).half()[:, 3:] for _, n in spans]
    lses = [torch.randn(2, 3, out.shape[1]) for out in outs]
    for out, lse in zip(outs, lses, strict=True):
        out[0, 1] = -0.0
        lse[1, 2, 2] = 200.0  # beside it others count for nothing
        lse[0, 2, 3] = -200.0
        out[0, 3, 2] = torch.inf
    lses[-1][0, 1, 2] = torch.inf
    into = AttentionState(torch.zeros(2, 40, 3, 12), torch.full((2, 3, 40), -torch.inf))
    for (start, n), out, lse in zip(spans, outs, lses, strict=True):
        marked = lse.masked_fill(lse.isinf(), torch.nan)
        merge_ops.merge_on_gpu(*into.take(slice(start, start + n)), out, marked)
    # What is there before the first merge is not read.
    acc, lse = torch.full((2, 40, 3, 12), torch.nan), torch.full((2, 3, 40), torch.nan)
    dst = torch.full((2, 40, 3, 12), torch.nan, dtype=dtype)
    for start in range(0, len(spans), 2):
        part = slice(start, start + 2)
        results = [x for pair in zip(outs[part], lses[part], strict=True) for x in pair]
        if spans[start] == (0, 40) and dtype == torch.float16:  # `dst` may hold one of them
            results[0] = dst.copy_(results[0])
        merge = merge_ops.merge_of_spans_on_gpu(spans[part], first=start == 0)
        merge(acc, dst if start + 2 >= len(spans) else acc, lse, *results)
    torch.testing.assert_close(lse, into.lse, rtol=0, atol=0, equal_nan=True)
    expected = into.out.to(dtype)
    assert torch.equal(dst.isnan(), expected.isnan())
    assert expected.isnan().any()
    assert torch.equal(
        dst.nan_to_num(7.0).view(torch.int16), expected.nan_to_num(7.0).view(torch.int16)
    )
