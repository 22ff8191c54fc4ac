"""The kernel that finds the largest bias that each row sees, in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from ring_core.base.merge import UNSHIFTED_BIAS
from ring_torch import memory_ops

ROWS, KEYS = 13, 700  # the kernel reads 8 rows and 512 keys at a time


def bias_of(dtype: torch.dtype, batch: int, heads: int) -> Tensor:
    """Return a bias of small and large numbers, hidden keys, and rows without a finite number."""
    bias = torch.randn(batch, heads, ROWS, KEYS).to(dtype)
    bias[:, :, 8:] *= 30  # rows with a shift
    bias[:, :, 3:5] = torch.finfo(dtype).min
    bias[:, :, 5] = -torch.inf
    bias[:, :, 6, 7] = torch.inf
    bias[:, :, 7, 600:] = -torch.inf
    return bias


def by_torch(
    bias: Tensor, start: Tensor | None, stop: Tensor | None, ids: tuple[Tensor, Tensor] | None
) -> Tensor:
    keys, visible = torch.arange(KEYS), torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool)
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
        "causal": (None, torch.arange(687, 687 + ROWS).int()),
        "window": (torch.arange(ROWS).int() * 50, torch.arange(ROWS).int() * 50 + 20),
        "nothing": (torch.full((ROWS,), 9).int(), torch.full((ROWS,), 9).int()),
    }
    for (start, stop), (batch, heads) in product(spans.values(), ((1, 1), (2, 1), (1, 3))):
        bias = bias_of(dtype, batch, heads)
        ids = None
        if segmented:
            ids = torch.randint(-1, 2, (2, ROWS)).int(), torch.randint(-1, 2, (2, KEYS)).int()
        shift = memory_ops.bias_shift_on_gpu(bias, start, stop, *(ids or (None, None)))
        torch.testing.assert_close(shift, by_torch(bias, start, stop, ids), rtol=0, atol=0)
