"""``ContextParallel`` and ``ring_attention``: groups, layouts, autograd, and what ranks send."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_ranks
from patched import replaced
from refused import refused
from torch import Tensor

from ring_core import Mask, reference
from ring_torch import ContextParallel, ring_attention
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
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    refused(r"mesh\['cp'\]", ContextParallel, mesh)
    q, k, v = qkv()
    scale = 1.0 + rank // 2  # the two rings have different inputs
    for group in (pairs[rank // 2], mesh["cp"]):
        cp = ContextParallel(group)
        assert (cp.cp_size, cp.cp_rank) == (2, rank % 2)
        out = cp.unshard(cp.attention(*(cp.shard(x * scale) for x in (q, k, v)), causal=True))
        same(out, dense(q * scale, k * scale, v * scale, causal=True))
    if rank == 2:
        for call in (
            lambda: ContextParallel(turned),
            lambda: ring_attention(q, k, v, group=turned),
        ):
            refused("not in", call)
        refused("group must be a process group", ring_attention, q, k, v, group="cp")
        return
    cp = ContextParallel(turned, "contiguous")
    same(cp.unshard(cp.attention(*(cp.shard(x) for x in (q, k, v)))), dense(q, k, v))


def _recorded(_: int, layout: Any, mask: Mask) -> list[list[str]]:
    """Return the sends and kernel calls of a forward and of its backward, in order."""
    events: list[str] = []
    start = Ranks.start

    def start_(ranks: Ranks, sends: Any, receives: Any) -> Any:
        events.extend(f"send {x.numel()}" for x, _ in sends if x.numel() != 2048)
        return start(ranks, sends, receives)

    def noted(method: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append("kernel")
            return method(*args)

        return call

    kernel = {name: noted(getattr(EagerKernel, name)) for name in ("attend", "differentiate")}
    cp, passes = ContextParallel(layout=layout), []
    local = [cp.shard(x).requires_grad_() for x in qkv()]
    with patch.object(Ranks, "start", start_), replaced(EagerKernel, **kernel):
        out = cp.attention(*local, mask=mask, kernel="eager")
        passes.append(events.copy())
        events.clear()
        out.sum().backward()
    return [*passes, events]


def test_transfers_start_before_kernels_and_the_last_step_sends_nothing(pool: LocalRanks) -> None:
    sent = f"send {12 * 2 * (8 + 8) * 8}"  # bytes of a rank's K and V
    for forward, backward in pool.run(_recorded, "zigzag", Mask(causal=True)):
        assert forward == [sent, "kernel"] * 3 + ["kernel"]
        # The first stage has no gradients to send yet when its K/V leave; the last sends nothing.
        assert backward == [sent, "kernel", sent] * 2 + ["kernel", sent, "kernel"]


def test_dead_steps_cost_nothing(pool: LocalRanks) -> None:
    for passes in pool.run(_recorded, "contiguous", Mask(causal=True, window=(3, 0))):
        assert [sum(x.startswith("send") for x in events) for events in passes] == [1, 1]
    documents = Mask(cu_seqlens=(0, 12, 24, 36, 48))
    for passes in pool.run(_recorded, "contiguous", documents):
        assert passes == [["kernel"]] * 2


@on_ranks
def test_one_input_alone_asks_for_a_gradient() -> None:
    cp, (q, k, v) = ContextParallel(), qkv()
    made = {name: cp.shard(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    made |= {"sinks": numbers(3, 4), "bias": cp.shard(numbers(4, 1, 1, 48, 48), dim=2)}

    def gradients(*names: str) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in made.items()}
        out: Any = cp.attention(**leaves, causal=True)  # type: ignore[call-overload]
        out.square().sum().backward()
        return {name: x.grad for name, x in leaves.items() if x.grad is not None}

    every = gradients(*made)
    for name in made:
        some = gradients(name)
        assert set(some) == {name}
        torch.testing.assert_close(some[name], every[name], rtol=1e-10, atol=1e-10)


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
