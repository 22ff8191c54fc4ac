"""Views in the elementwise Triton kernels; those of attention: the table's cases of views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from views import VIEWS, strided

from ring_torch import memory_ops, merge_ops

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
