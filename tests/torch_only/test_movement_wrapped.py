"""Attention, movements and recurrent layers in what torch wraps around models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import sdpa
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
    """A layer of projections around a movement and around its inverse."""

    def __init__(self, move: Move, dtype: torch.dtype) -> None:
        super().__init__()
        self.move = move
        self.before, self.behind = (nn.Linear(DIM, DIM, dtype=dtype) for _ in range(2))
        generator = torch.Generator().manual_seed(7)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.4, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.behind(self.move(self.before(x)).tanh())
        return moved


def _taps(rows: Tensor, size: int) -> Tensor:
    """Return a weighted sum of each token and the two before it; rows begin two tokens earlier."""
    return sum(((n + 1) * rows[:, n : n + size] for n in range(3)), torch.zeros(()))


def _convolve(cp: ContextParallel) -> Move:
    def move(x: Tensor) -> Tensor:
        rows = cp.halo(x, 2, 0).rows
        return cp.join(_taps(rows, rows.shape[1] - 2))

    return move


def _return(cp: ContextParallel) -> Move:
    plain = ContextParallel(cp.group, "contiguous")
    return lambda x: plain.relayout(cp.relayout(x, to=plain).sin(), to=cp)


class Scan(nn.Module):
    """A short convolution and Mamba-2's scan, with weights of their own; whole without ranks."""

    def __init__(self, cp: ContextParallel | None) -> None:
        super().__init__()
        self.cp = cp
        self.taps, self.rate, self.skip, self.bias = (
            nn.Parameter(torch.empty(shape, dtype=torch.float64)) for shape in ((DIM, 3), 2, 2, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.cp is None:
            rows = nn.functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)
            x = (rows.to(self.taps) * self.taps).sum(-1).to(x.dtype)
        else:
            x = self.cp.causal_conv1d(x, self.taps)
        values, keys, queries = (
            part.unsqueeze(n) for part, n in zip(x.split(2, -1), (3, 2, 2), strict=True)
        )
        options: dict[str, Any] = {"D": self.skip, "dt_bias": self.bias, "dt_softplus": True}
        inputs = values, x[..., :2], -self.rate.exp(), keys, queries
        y = (self.cp.ssd if self.cp else _by_token)(*inputs, **options)
        return torch.cat([y.flatten(2), x[..., 2:]], -1)


def _by_token(
    x: Tensor, dt: Tensor, rate: Tensor, keys: Tensor, queries: Tensor, *, D: Tensor,  # noqa: N803
    dt_bias: Tensor, dt_softplus: bool,
) -> Tensor:  # fmt: skip
    """Return Mamba-2's scan of a whole sequence, token by token."""
    assert dt_softplus
    wide = torch.promote_types(x.dtype, D.dtype)
    steps = nn.functional.softplus(dt.to(wide) + dt_bias)
    state, out = x.new_zeros(1, 2, 1, 2, dtype=wide), []
    for t in range(T):
        added = (steps[:, t, :, None] * x[:, t])[..., None] * keys[:, t, :, None]
        state = (steps[:, t] * rate).exp()[..., None, None] * state + added
        out.append((state * queries[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1).to(x.dtype)


def _attend(attention: Any) -> Move:
    """Return causal attention of three heads, whose queries are keys and values, too."""
    return lambda x: attention(*(x.unflatten(-1, (3, -1)),) * 3).flatten(2)


#: Movements of a rank's slice, and the equivalent on whole sequences.
MOVES: dict[str, tuple[Callable[[ContextParallel], Move], Move]] = {
    "shift": (
        lambda cp: lambda x: cp.shift(x, 3, fill=0.5),
        lambda x: torch.cat([torch.full_like(x[:, :3], 0.5), x[:, :-3]], 1),
    ),
    "halo": (_convolve, lambda x: _taps(nn.functional.pad(x, (0, 0, 2, 0)), T)),
    "relayout": (lambda cp: lambda x: cp.relayout(x, to="contiguous"), lambda x: x),
    "there and back": (_return, torch.sin),
    "recurrence": (Scan, Scan(None)),
    "attention": (
        lambda cp: _attend(lambda *qkv: cp.attention(*qkv, causal=True)),
        _attend(lambda *qkv: sdpa(*qkv, is_causal=True)),
    ),
}  # fmt: skip


def _plain(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


def _compiled(layer: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    result: Tensor = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    return result


def _compiled_checkpoint(layer: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    run = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    result: Tensor = run(x)
    return result


def _autocast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = layer(x)
    assert result.dtype == torch.bfloat16
    return result


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": _plain, "compiled": _compiled, "compiled checkpoint": _compiled_checkpoint,
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "autocast": _autocast, "compiled autograd": _plain, "fsdp": _plain, "ddp": _plain,
}  # fmt: skip


def _backward(loss: Tensor, way: str) -> None:
    if way != "compiled autograd":
        loss.backward()
        return
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager")):
        loss.backward()


# Compiled movements are in test_movement: of predictions, of convolutions, of a relayout.
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
    dtype = torch.float32 if way == "autocast" else torch.float64
    generator = torch.Generator().manual_seed(3)
    batches = torch.randn(2, 1, T, DIM, generator=generator, dtype=dtype)
    near: Any = {"rtol": 0.05, "atol": 0.05} if way == "autocast" else {}
    for name, (move, of_whole) in MOVES.items():
        whole = Layer(copy.deepcopy(of_whole), dtype)
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
        _backward(out.to(dtype).square().sum() / (T * DIM), way)
        if way not in ("fsdp", "ddp"):
            cp.reduce_gradients(layer)
        for weight, like in zip(layer.parameters(), whole.parameters(), strict=True):
            assert weight.grad is not None and like.grad is not None
            grad = weight.grad
            if way in ("fsdp", "ddp"):  # they take the mean over all four ranks
                grad = 4 * (grad.full_tensor() if isinstance(grad, DTensor) else grad / 2)
            else:
                grad = grad.clone()
                dist.all_reduce(grad, group=mesh["dp"].get_group())
            torch.testing.assert_close(grad, like.grad, msg=f"{name}: {way}", **near)
