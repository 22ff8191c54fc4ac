"""Attention, movements and recurrent layers in what torch wraps around models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_core import LayoutSpec
from ring_torch import ContextParallel

RANKS = 4

T, DIM = 32, 6
Move = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A layer of projections around a movement."""

    def __init__(self, move: Move, dtype: torch.dtype) -> None:
        super().__init__()
        self.move = move
        torch.manual_seed(7)
        self.before, self.behind = (nn.Linear(DIM, DIM, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.behind(self.move(self.before(x)).tanh())
        return moved


#: Movements. Those of one rank are compared with definitions in the tests of each.
MOVES: dict[str, Callable[[ContextParallel], Move]] = {
    "shift": lambda cp: lambda x: cp.shift(x, 3, fill=0.5),
    "halo": lambda cp: lambda x: cp.join(cp.halo(x, 2, 0).rows.unfold(1, 3, 1).sum(-1)),
    "relayout": lambda cp: lambda x: cp.relayout(x, to="contiguous"),
    "recurrence": lambda cp: lambda x: cp.linear_recurrence(x.sigmoid(), x),
    # Three heads, whose queries are keys and values, too.
    "attention": lambda cp: lambda x: cp.attention(*(x.unflatten(-1, (3, -1)),) * 3, causal=True).flatten(2),
}  # fmt: skip


def _autocast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = layer(x)
    assert result.dtype == torch.bfloat16
    return result


def _compiled(function: Any, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    run: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    return _plain(run, x)


def _plain(layer: Any, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    **dict.fromkeys(("plain", "compiled autograd", "fsdp", "ddp"), _plain),
    "compiled": _compiled, "autocast": _autocast,
    "compiled checkpoint": lambda layer, x: _compiled(lambda x: checkpoint(layer, x, use_reentrant=False), x),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
}  # fmt: skip


@pytest.mark.nightly(unless=[
    "zigzag-autocast", "zigzag-fsdp", "zigzag-ddp", "zigzag-reentrant", "contiguous-checkpoint",
])  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_ranks
def test_a_layer_has_the_results_and_gradients_of_one_process(
    rank: int, way: str, layout: LayoutSpec
) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], layout)
    groups: list[Any] = [dist.new_group([n]) for n in range(RANKS)]
    alone = ContextParallel(groups[rank], layout)
    dtype = torch.float32 if way == "autocast" else torch.float64
    generator = torch.Generator().manual_seed(3)
    batches = torch.randn(2, 1, T, DIM, generator=generator, dtype=dtype)
    near: Any = {"rtol": 0.05, "atol": 0.05} if way == "autocast" else {}
    for name, move in MOVES.items():
        whole = Layer(move(alone), dtype)
        expected = [WAYS["autocast" if way == "autocast" else "plain"](whole, x) for x in batches]
        torch.stack([y.to(dtype).square().mean() for y in expected]).sum().backward()
        layer = Layer(move(cp), dtype)
        if way == "fsdp":
            for part in (layer.before, layer.behind, layer):
                fully_shard(part, mesh=mesh["dp", "cp"]._flatten(f"all of {name}"))
        run = DistributedDataParallel(layer) if way == "ddp" else layer
        x = cp.shard(batches[rank // 2])
        if isinstance(run, DistributedDataParallel):  # gradients without sync count, too
            with run.no_sync():
                (run(x).square().sum() / (T * DIM)).backward()
        out = WAYS[way](run, x.requires_grad_(way == "reentrant"))
        target = ContextParallel(mesh["cp"], "contiguous") if name == "relayout" else cp
        torch.testing.assert_close(out, target.shard(expected[rank // 2].detach()), **near)
        by = compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager"))
        with by if way == "compiled autograd" else nullcontext():
            (out.to(dtype).square().sum() / (T * DIM)).backward()
        if way not in ("fsdp", "ddp"):
            cp.reduce_gradients(layer)
        for weight, like in zip(layer.parameters(), whole.parameters(), strict=True):
            assert weight.grad is not None and like.grad is not None
            grad = (
                weight.grad.full_tensor()
                if isinstance(weight.grad, DTensor)
                else weight.grad.clone()
            )
            if way in ("fsdp", "ddp"):  # they take the mean over all four ranks
                grad *= 4 if way == "fsdp" else 2
            else:
                dist.all_reduce(grad, group=mesh["dp"].get_group())
            torch.testing.assert_close(grad, like.grad, msg=f"{name}: {way}", **near)
