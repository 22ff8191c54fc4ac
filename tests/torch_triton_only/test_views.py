"""Views in the Triton kernels: they read the right elements, and write contiguous rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from views import OPERANDS, VIEWS, Entry, Given, Known, differences, entries, made, strided

from ring_core import KernelConfig
from ring_torch import autograd, memory_ops, merge_ops, prepare
from ring_torch.kernels.api import Selection
from ring_torch.kernels.triton import TritonKernel
from ring_torch.local import LocalRanks

WAYS = {
    "alone": (1, {}), "ring": (2, {"strategy": "ring"}),
    "balanced": (2, {"strategy": "balanced"}), "gather": (2, {"strategy": "gather"}),
    "ulysses": (2, {"strategy": "ulysses"}),
}  # fmt: skip
CAN = ("sinks", "lse", "segments", "bias", "alibi")
PARTS = 13
READABLE = [name for name in VIEWS if name not in {"strided", "permuted", "expanded"}]


def _wrong(rank: int, size: int, options: dict[str, Any], some: list[Entry]) -> list[str]:
    """Return the differences for each tensor and view, with elementwise kernels in Triton, too."""
    errors, known = list[str](), Known()
    prepare._prepare.cache_clear()
    with (
        patch.object(prepare, "choose", lambda *_: Selection(TritonKernel(), ())),
        patch.object(autograd, "_can_use_triton", lambda _, dtype: dtype == torch.float32),
    ):
        for entry in some:
            batch = 2 if size == 1 else 1  # interpreted kernels are slow
            x = made(rank, size, batch=batch, length=16, heads=(2, 2), dtype=torch.float32)
            config = KernelConfig("triton", block_q=16, block_k=16)
            call = Given.of(entry, x, {"causal": True, "kernel": config, **options})
            wrong = differences(call, known=known, rtol=1e-5, atol=1e-5)
            errors += [f"{entry.operand} {entry.view}: {message}" for message in wrong]
    return errors


def _entries(way: str, part: int) -> list[Entry]:
    return entries(CAN, part, PARTS, turn=3 * list(WAYS).index(way))


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))]
)
@pytest.mark.nightly(only=["ring-0", "balanced-0"])
@pytest.mark.parametrize("way", WAYS)
def test_a_view_is_what_it_shows(way: str, part: int, pools: dict[int, LocalRanks]) -> None:
    size, options = WAYS[way]
    assert pools[size].run(_wrong, size, options, _entries(way, part)) == [[]] * size


def test_each_part_has_every_tensor_and_every_view() -> None:
    for part in range(PARTS):
        some = [entry for way in WAYS for entry in _entries(way, part)]
        for names, which in ((OPERANDS, 0), (VIEWS, 1)):
            shares = [entry[which] for entry in some]
            assert all(shares.count(name) >= 2 for name in names), (part, shares)


# Blocks of rows are full: else the interpreter warns of the logarithm of zero.
def _rows(view: str, *shape: int) -> Tensor:
    return VIEWS[view](torch.randn(shape))


def _merge(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    spans = ((0, acc.shape[1]),)
    merge_ops.merge_on_gpu(
        acc, acc, acc_lse, [out, lse], spans=spans, marks=0, first=False, last=True
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
