"""A call like an earlier one reuses what was prepared, but none of the earlier one's tensors.

What is cached of a call holds no tensor of it and nothing mutable: each repeat here follows plain
calls of the same shapes and options, and is compared with dense attention on one process.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
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
    """Inputs of a call, drawn alike on all ranks: whole sequences, and this rank's shards."""

    def __init__(self, rank: int, size: int, layout: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.whole = [
            torch.randn(1, TOKENS, heads, DIM, generator=generator, dtype=torch.float64)
            for heads in (*HEADS, HEADS[0])
        ]
        self.positions = torch.as_tensor(Layout(layout, TOKENS, size).positions(rank))

    def shards(self) -> tuple[list[Tensor], Tensor]:
        """Return q, k and v of this rank, and the gradient of the output."""
        *qkv, dout = (x[:, self.positions].clone() for x in self.whole)
        return [x.requires_grad_() for x in qkv], dout

    def check(self, out: Tensor, grads: Any, mask: Tensor | None = None) -> None:
        """Compare this rank's results with dense attention."""
        q, k, v = (x.clone().requires_grad_() for x in self.whole[:3])
        keys = [x.repeat_interleave(HEADS[0] // HEADS[1], dim=2) for x in (k, v)]
        visible = torch.ones(TOKENS, TOKENS).tril().bool() if mask is None else mask
        query, key, value = (x.transpose(1, 2) for x in (q, *keys))
        expected = scaled_dot_product_attention(query, key, value, visible).transpose(1, 2)
        expected_value = torch.autograd.grad(expected, (q, k, v), self.whole[3])
        for x, y in zip((out, *grads), (expected, *expected_value), strict=True):
            torch.testing.assert_close(x, y[:, self.positions])


class Attend:
    """Causal calls of one kind, and the inputs that they are made with."""

    def __init__(self, rank: int, size: int, options: dict[str, Any]) -> None:
        self._place = rank, size, options.get("layout", "contiguous")
        self._options = options

    def __call__(self, *qkv: Tensor, cu_seqlens: Any = None) -> Tensor:
        out: Tensor = ring_attention(*qkv, causal=True, cu_seqlens=cu_seqlens, **self._options)
        return out

    def numbers(self, seed: int) -> Numbers:
        return Numbers(*self._place, seed)

    def once(self, seed: int) -> None:
        numbers = self.numbers(seed)
        qkv, dout = numbers.shards()
        out = self(*qkv)
        numbers.check(out, torch.autograd.grad(out, qkv, dout))


def two_forwards_first(attend: Attend) -> None:
    for order in ((0, 1), (1, 0)):
        numbers = [attend.numbers(seed) for seed in (1, 2)]
        shards = [x.shards() for x in numbers]
        outs = [attend(*qkv) for qkv, _ in shards]
        for n in order:
            qkv, dout = shards[n]
            numbers[n].check(outs[n], torch.autograd.grad(outs[n], qkv, dout))


def backward_in_another_thread(attend: Attend) -> None:
    numbers = attend.numbers(1)
    qkv, dout = numbers.shards()
    out, grads = attend(*qkv), list[Tensor]()
    thread = threading.Thread(target=lambda: grads.extend(torch.autograd.grad(out, qkv, dout)))
    thread.start()
    thread.join()
    numbers.check(out, grads)


def recomputed(attend: Attend) -> None:
    for reentrant in (False, True):
        numbers = [attend.numbers(seed) for seed in (1, 2)]
        shards = [x.shards() for x in numbers]
        outs = [checkpoint(attend, *qkv, use_reentrant=reentrant) for qkv, _ in shards]
        for out, (_, dout) in zip(outs, shards, strict=True):
            out.backward(dout)
        for n, (qkv, _) in enumerate(shards):
            numbers[n].check(outs[n], [x.grad for x in qkv])


def graph_retained(attend: Attend) -> None:
    numbers = attend.numbers(1)
    qkv, dout = numbers.shards()
    out = attend(*qkv)
    for retain_graph in (True, True, False):
        numbers.check(out, torch.autograd.grad(out, qkv, dout, retain_graph=retain_graph))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, qkv, dout)


def tensors_changed_in_place(attend: Attend) -> None:
    first, then = attend.numbers(1), attend.numbers(2)
    (qkv, _), (others, dout) = first.shards(), then.shards()
    attend(*qkv)
    with torch.no_grad():
        for x, y in zip(qkv, others, strict=True):
            x.copy_(y)
    out = attend(*qkv)
    then.check(out, torch.autograd.grad(out, qkv, dout))


def documents_changed_in_place(attend: Attend) -> None:
    numbers = attend.numbers(1)
    offsets: Any = [0, 8, TOKENS]
    for bound in (8, 16, 5):
        offsets[1] = bound
        qkv, dout = numbers.shards()
        out = attend(*qkv, cu_seqlens=offsets)
        document = torch.arange(TOKENS) >= bound
        mask = torch.ones(TOKENS, TOKENS).tril().bool() & (document[:, None] == document)
        numbers.check(out, torch.autograd.grad(out, qkv, dout), mask)


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
        attend.once(0)
        repeat(attend)


@pytest.mark.parametrize("way", WAYS)
def test_repeats(way: str, backend: Any) -> None:
    size, options = WAYS[way]
    backend.pool(size).run(_repeats, size, options)
