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


@pytest.mark.parametrize("spans", PARTS[1:])
def test_parts_are_added_as_one_by_one(spans: tuple[tuple[int, int], ...]) -> None:
    join, parts = _joined(spans)
    total = torch.zeros(2, 40, 3, 12)
    for (start, n), part in zip(spans, parts[1:], strict=True):
        total[:, start : start + n] += part
    total += parts[0]
    join.sum(parts)
    assert torch.equal(parts[0], total.half())
