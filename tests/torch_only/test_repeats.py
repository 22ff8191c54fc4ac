"""A call like an earlier one reuses what was prepared, but none of the earlier one's tensors.

What is cached of a call holds no tensor of it and nothing mutable: each repeat here follows plain
calls of the same shapes and options, and is compared with dense attention on one process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from dense import sdpa
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_core import Layout
from ring_torch import ring_attention

HEADS, TOKENS, DIM = (4, 2, 2), 24, 8
#: Number of ranks, and options of strategy and layout.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ring": (2, {"strategy": "ring", "layout": "zigzag"}),
    "balanced": (3, {"strategy": "balanced"}),
    "gather": (2, {"strategy": "gather", "transport": "p2p", "layout": "zigzag"}),
    "ulysses": (2, {"strategy": "ulysses", "layout": "striped"}),
}


class Numbers:
    """Whole sequences, drawn alike on all ranks, and this rank's shards of them."""

    def __init__(self, attend: Attend, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.whole = [
            torch.randn(1, TOKENS, heads, DIM, generator=generator, dtype=torch.float64)
            for heads in (*HEADS, HEADS[0])
        ]
        self.positions = attend.positions
        *qkv, self.dout = (x[:, self.positions].clone() for x in self.whole)
        self.qkv = [x.requires_grad_() for x in qkv]

    def grads(self, out: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.qkv, self.dout, **options)

    def check(self, out: Tensor, grads: Any, mask: Tensor | None = None) -> None:
        """Compare this rank's results with dense attention."""
        q, k, v = (x.clone().requires_grad_() for x in self.whole[:3])
        visible = torch.ones(TOKENS, TOKENS).tril().bool() if mask is None else mask
        expected = sdpa(q, k, v, attn_mask=visible)
        expected_value = torch.autograd.grad(expected, (q, k, v), self.whole[3])
        for x, y in zip((out, *grads), (expected, *expected_value), strict=True):
            torch.testing.assert_close(x, y[:, self.positions])


class Attend:
    """Causal calls of one kind."""

    def __init__(self, rank: int, size: int, options: dict[str, Any]) -> None:
        layout = Layout(options.get("layout", "contiguous"), TOKENS, size)
        self.positions, self._options = torch.as_tensor(layout.positions(rank)), options

    def __call__(self, *qkv: Tensor, cu_seqlens: Any = None) -> Tensor:
        out: Tensor = ring_attention(*qkv, causal=True, cu_seqlens=cu_seqlens, **self._options)
        return out


def two_forwards_first(attend: Attend) -> None:
    for order in ((0, 1), (1, 0)):
        numbers = [Numbers(attend, seed) for seed in (1, 2)]
        outs = [attend(*x.qkv) for x in numbers]
        for n in order:
            numbers[n].check(outs[n], numbers[n].grads(outs[n]))


def backward_in_another_thread(attend: Attend) -> None:
    numbers = Numbers(attend, 1)
    out = attend(*numbers.qkv)
    with ThreadPoolExecutor(1) as threads:
        numbers.check(out, threads.submit(numbers.grads, out).result())


def recomputed(attend: Attend) -> None:
    for reentrant in (False, True):
        numbers = [Numbers(attend, seed) for seed in (1, 2)]
        outs = [checkpoint(attend, *x.qkv, use_reentrant=reentrant) for x in numbers]
        for out, x in zip(outs, numbers, strict=True):
            out.backward(x.dout)
        for out, x in zip(outs, numbers, strict=True):
            x.check(out, [y.grad for y in x.qkv])


def graph_retained(attend: Attend) -> None:
    numbers = Numbers(attend, 1)
    out = attend(*numbers.qkv)
    for retain_graph in (True, True, False):
        numbers.check(out, numbers.grads(out, retain_graph=retain_graph))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        numbers.grads(out)


def tensors_changed_in_place(attend: Attend) -> None:
    first, then = Numbers(attend, 1), Numbers(attend, 2)
    attend(*first.qkv)
    with torch.no_grad():
        for x, y in zip(first.qkv, then.qkv, strict=True):
            x.copy_(y)
    out = attend(*first.qkv)
    then.check(out, torch.autograd.grad(out, first.qkv, then.dout))


def documents_changed_in_place(attend: Attend) -> None:
    numbers, offsets = Numbers(attend, 1), [0, 8, TOKENS]
    for bound in (8, 16, 5):
        offsets[1] = bound
        out = attend(*numbers.qkv, cu_seqlens=offsets)
        document = torch.arange(TOKENS) >= bound
        mask = torch.ones(TOKENS, TOKENS).tril().bool() & (document[:, None] == document)
        numbers.check(out, numbers.grads(out), mask)


REPEATS = {
    repeat.__name__: repeat
    for repeat in (
        two_forwards_first, backward_in_another_thread, recomputed, graph_retained,
        tensors_changed_in_place, documents_changed_in_place,
    )
}  # fmt: skip


def _repeats(rank: int, size: int, options: dict[str, Any]) -> None:
    attend = Attend(rank, size, options)
    for repeat in REPEATS.values():
        numbers = Numbers(attend, 0)
        out = attend(*numbers.qkv)
        numbers.check(out, numbers.grads(out))
        repeat(attend)


@pytest.mark.parametrize("way", WAYS)
def test_repeats(way: str, backend: Any) -> None:
    size, options = WAYS[way]
    backend.pool(size).run(_repeats, size, options)
