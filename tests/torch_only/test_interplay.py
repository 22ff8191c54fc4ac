"""Inputs of which one alone needs a gradient, and groups that are destroyed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor

from ring_torch import ContextParallel, ring_attention

RANKS = 4

LENGTH, DIM = 16, 16


def same(results: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("expected", ["q", "k", "v", "sinks", "bias"])
@on_ranks
def test_one_input_alone_asks_for_a_gradient(expected: str) -> None:
    """Check that gradients of the inputs that ask for one equal those when all do."""
    cp = ContextParallel()
    generator = torch.Generator().manual_seed(1)
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {
            "q": (1, LENGTH, 2, 8), "k": (1, LENGTH, 2, 8), "v": (1, LENGTH, 2, 8), "sinks": (2,),
            "bias": (1, 1, LENGTH, LENGTH),
        }.items()
    }  # fmt: skip

    def gradients(names: tuple[str, ...]) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in made.items()}
        q, k, v = (cp.shard(leaves[name]) for name in ("q", "k", "v"))
        bias = cp.shard(leaves["bias"], dim=2)
        out = cp.attention(q, k, v, sinks=leaves["sinks"], bias=bias, causal=True)
        out.square().sum().backward()
        return {name: x.grad for name, x in leaves.items() if x.grad is not None}

    all_grads, some_grads = gradients(tuple(made)), gradients((expected,))
    assert set(some_grads) == {expected}
    same([some_grads[expected]], [all_grads[expected]])


@on_ranks
def test_a_group_that_is_destroyed_is_gone() -> None:
    """Also of cached calls; its threads, which may hold Python objects, end before Python."""
    group = dist.new_group([0, 1, 2, 3])
    assert isinstance(group, dist.ProcessGroup)
    gone = weakref.ref(group)
    x = torch.zeros(1, 4, 1, 8, requires_grad=True)
    out = ring_attention(x, x, x, group=group, causal=True)
    out.sum().backward()
    dist.destroy_process_group(group)
    del group, out
    gc.collect()
    assert gone() is None
