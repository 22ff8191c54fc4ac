"""Ring attention inside what torch wraps around models: FSDP, DDP, hooks, modes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_torch import ContextParallel, ring_attention
from ring_torch.local import LocalRanks

RANKS = 4

LENGTH, DIM = 16, 16


class Layer(nn.Module):
    """A layer of projections around causal attention; ``cp`` splits the sequence."""

    def __init__(self, cp: ContextParallel | None) -> None:
        super().__init__()
        self.cp = cp
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM).double(), nn.Linear(DIM, DIM).double()
        generator = torch.Generator().manual_seed(7)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).chunk(3, dim=2)
        attend: Any = ring_attention if self.cp is None else self.cp.attention
        y: Tensor = self.out(attend(q, k, v, causal=True).flatten(-2))
        return y


def batches() -> list[Tensor]:
    """Return a whole sequence for each of the two rings."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, LENGTH, DIM, generator=generator, dtype=torch.float64) for _ in range(2)]


def expected(steps: int = 1) -> list[Tensor]:
    """Return gradients of the mean loss of the ranks, computed without a process group."""
    assert not dist.is_initialized()
    whole = Layer(None)
    for _ in range(steps):
        (sum(whole(x).square().sum() for x in batches()) / 4).backward()
    return [weight.grad for weight in whole.parameters() if weight.grad is not None]


def mesh_and_shard(rank: int) -> tuple[Any, ContextParallel, Tensor]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"])
    return mesh, cp, cp.shard(batches()[rank // 2])


def same(results: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def _fsdp(rank: int, expected: list[Tensor]) -> None:
    mesh, cp, x = mesh_and_shard(rank)
    model = Layer(cp)
    for part in (model.qkv, model.out, model):
        fully_shard(part, mesh=mesh["dp", "cp"]._flatten("all"))
    model(x).square().sum().backward()
    grads = [weight.grad for weight in model.parameters()]
    same([grad.full_tensor() for grad in grads if isinstance(grad, DTensor)], expected)


def test_fully_sharded(pool: LocalRanks) -> None:
    """FSDP splits weights over all four ranks, and rings of two split sequences."""
    pool.run(_fsdp, expected())


def _ddp(rank: int, expected: list[Tensor]) -> None:
    _, cp, x = mesh_and_shard(rank)
    model = DistributedDataParallel(Layer(cp))
    with model.no_sync():
        model(x).square().sum().backward()
    model(x).square().sum().backward()
    same([weight.grad for weight in model.parameters() if weight.grad is not None], expected)


def test_gradients_gathered_without_and_then_with_sync(pool: LocalRanks) -> None:
    pool.run(_ddp, expected(steps=2))


@on_ranks
def test_checkpointed_and_hooked(rank: int) -> None:
    """Check that checkpointing calls the ring again on all ranks, and that hooks run."""
    _, cp, x = mesh_and_shard(rank)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(Layer(cp)(x).square().sum(), x)
    model, recorded = Layer(cp), []
    model.qkv.register_forward_hook(lambda *_: recorded.append("forward"))
    model.register_full_backward_hook(lambda *_: recorded.append("backward"))
    x.register_hook(lambda grad: 2 * grad)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert x.grad is not None
    same([x.grad], [2 * expected])
    assert recorded == ["forward", "forward", "backward"]


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


def _destroyed(_: int) -> bool:
    """Return True if a destroyed group is freed, though calls that used it are cached."""
    group = dist.new_group([0, 1, 2, 3])
    assert isinstance(group, dist.ProcessGroup)
    gone = weakref.ref(group)
    x = torch.zeros(1, 4, 1, 8, requires_grad=True)
    out = ring_attention(x, x, x, group=group, causal=True)
    out.sum().backward()
    dist.destroy_process_group(group)
    del group, out
    gc.collect()
    return gone() is None


def test_a_group_that_is_destroyed_is_gone(pool: LocalRanks) -> None:
    """The group's threads end with it: they may hold Python objects, and must end before Python."""
    assert pool.run(_destroyed) == [True] * 4
