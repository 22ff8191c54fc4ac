"""``ContextParallel`` and ``ring_attention``: groups, layouts, autograd, and what ranks send."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_ranks
from patched import replaced
from torch import Tensor

from ring_core import Mask, reference
from ring_torch import ContextParallel, KernelConfig, ring_attention
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRanks

RANKS = 4


def qkv(length: int = 48) -> list[Tensor]:
    return [numbers(seed, 1, length, heads, 8) for seed, heads in enumerate((4, 2, 2))]


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.tensor(reference.attention(q.numpy(), k.numpy(), v.numpy(), **options)[0])


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@on_ranks
def test_subgroups(rank: int) -> None:
    """Check two rings at once, one whose ranks are in another order, and a rank outside of it."""
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    turned: Any = dist.new_group([3, 1, 0])
    q, k, v = qkv()
    cp = ContextParallel(pairs[rank // 2])
    assert cp.cp_size == 2
    scale = 1.0 + rank // 2  # the two rings have different inputs
    out = cp.unshard(cp.attention(*(cp.shard(x * scale) for x in (q, k, v)), causal=True))
    same(out, dense(q * scale, k * scale, v * scale, causal=True))
    if rank == 2:
        for call in (
            lambda: ContextParallel(turned),
            lambda: ring_attention(q, k, v, group=turned),
        ):
            with pytest.raises(ValueError, match="not in"):
                call()
        with pytest.raises(ValueError, match="group must be a process group"):
            ring_attention(q, k, v, group="cp")  # type: ignore[call-overload]  # wrong on purpose
        return
    cp = ContextParallel(turned, "contiguous")
    same(cp.unshard(cp.attention(*(cp.shard(x) for x in (q, k, v)))), dense(q, k, v))


@on_ranks
def test_device_mesh(rank: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"mesh\['cp'\]"):
        ContextParallel(mesh)
    cp, (q, k, v) = ContextParallel(mesh["cp"]), qkv()
    assert (cp.cp_size, cp.cp_rank) == (2, rank % 2)
    same(cp.unshard(cp.attention(*(cp.shard(x) for x in (q, k, v)))), dense(q, k, v))


def _recorded(_: int, layout: Any, mask: Mask) -> tuple[list[str], list[str]]:
    """Return the sends and kernel calls of a forward and of its backward, in order."""
    events: list[str] = []
    start, forward, backward = Ranks.start, EagerKernel.attend, EagerKernel.differentiate

    def start_(ranks: Ranks, sends: Any, receives: Any) -> Any:
        moved = [tensor.numel() for tensor, _ in sends]
        events.extend(f"send {n}" for n in moved if n != 2048)
        return start(ranks, sends, receives)

    def forward_(self: Any, *args: Any) -> Any:
        events.append("kernel")
        return forward(self, *args)

    def backward_(self: Any, *args: Any) -> None:
        events.append("kernel")
        backward(self, *args)

    cp, (q, k, v) = ContextParallel(layout=layout), qkv()
    local = [cp.shard(x).requires_grad_() for x in (q, k, v)]
    with (
        patch.object(Ranks, "start", start_),
        replaced(EagerKernel, attend=forward_, differentiate=backward_),
    ):
        out = cp.attention(*local, mask=mask, kernel="eager")
        first = events.copy()
        events.clear()
        out.sum().backward()
    return first, events


def test_transfers_start_before_kernels_and_the_last_step_sends_nothing(pool: LocalRanks) -> None:
    size = 12 * 2 * (8 + 8) * 8  # bytes of a rank's K and V
    for forward, backward in pool.run(_recorded, "zigzag", Mask(causal=True)):
        assert forward == [f"send {size}", "kernel"] * 3 + ["kernel"]
        # The first stage has no gradients to send yet when its K/V leave; the last sends nothing.
        assert backward == [f"send {size}", "kernel", f"send {size}"] * 2 + [
            "kernel",
            f"send {size}",
            "kernel",
        ]


def test_dead_steps_cost_nothing(pool: LocalRanks) -> None:
    for forward, backward in pool.run(_recorded, "contiguous", Mask(causal=True, window=(3, 0))):
        assert sum(event.startswith("send") for event in forward) == 1
        assert sum(event.startswith("send") for event in backward) == 1
    for forward, backward in pool.run(
        _recorded, "contiguous", Mask(cu_seqlens=(0, 12, 24, 36, 48))
    ):
        assert forward == backward == ["kernel"]


def test_blocks_are_a_choice() -> None:
    q, k, v = qkv()
    config = KernelConfig("eager", block_q=7, block_k=5)
    ids = torch.arange(48, dtype=torch.int32)[None] // 10
    for options in (
        {"causal": True, "window": (9, 0)},
        {"segment_ids": ids},
        {"cu_seqlens": (0, 11, 30, 48)},
    ):
        kwargs = {n: x.numpy() if isinstance(x, Tensor) else x for n, x in options.items()}
        same(ring_attention(q, k, v, kernel=config, **options), dense(q, k, v, **kwargs))
    same(ring_attention(q, k, v, kernel=KernelConfig(block_q=16)), dense(q, k, v))


def test_one_call_in_both_forms() -> None:
    """``attention``, ``explain`` and ``ring_attention`` take the same options in the same order."""
    options = list(inspect.signature(ring_attention).parameters)
    assert options[:5] == ["q", "k", "v", "group", "layout"]
    for method in (ContextParallel.attention, ContextParallel.explain):
        assert list(inspect.signature(method).parameters)[1:] == options[:3] + options[5:]
    oracle = list(inspect.signature(reference.attention).parameters)
    assert options[5 : 5 + len(oracle) - 3] == oracle[3:]


LENGTH = 16


@pytest.mark.parametrize("expected", ["q", "k", "v", "sinks", "bias"])
@on_ranks
def test_one_input_alone_asks_for_a_gradient(expected: str) -> None:
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
    torch.testing.assert_close(some_grads[expected], all_grads[expected], rtol=1e-10, atol=1e-10)


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
