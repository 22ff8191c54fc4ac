"""Models of transformers on two rings at once, inside torch's wrappers: DDP, FSDP, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import BYTES, LENGTH, Wide, build, same
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

RANKS = 4


def sequences() -> dict[str, Tensor]:
    """Return a batch with one sequence for each ring."""
    tokens = torch.randint(BYTES, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": tokens, "labels": tokens}


def _trained(rank: int, kind: str) -> list[Tensor]:
    """Return the gradient of the mean loss over both sequences, as the wrapper leaves it."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], layout="zigzag")
    row = slice(rank // 2, rank // 2 + 1)
    model = build("Llama", hf.register())
    wrapped: Any = model
    if kind == "fsdp":
        ranks = mesh["dp", "cp"]._flatten("all")
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=ranks)
    else:
        wrapped = DistributedDataParallel(model)
    batch = {name: x[row] for name, x in sequences().items()}
    shard = hf.shard_batch(cp, batch, model=wrapped)
    labels = 2 * (LENGTH - 1)  # of both sequences
    with torch.autocast("cpu", torch.bfloat16) if kind == "ddp in autocast" else Wide():
        loss = wrapped(**shard | {"num_items_in_batch": labels}).loss
    (RANKS * loss).backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [x.full_tensor() if kind == "fsdp" else x for x in grads]


def whole_model(context: Any) -> list[Tensor]:
    """Return the gradients of the mean loss without a ring."""
    model = build("Llama")
    with context:
        loss = model(**sequences(), use_cache=False).loss
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_the_whole_models(kind: str, pool: LocalRanks) -> None:
    expected = whole_model(Wide())
    for grads in pool.run(_trained, kind):
        for n, (grad, expected_grad) in enumerate(zip(grads, expected, strict=True)):
            same(grad, expected_grad, f"gradient {n}")


@pytest.mark.nightly
def test_under_autocast(pool: LocalRanks) -> None:
    """Errors against float64 are at most twice those of the whole model under autocast."""
    exact = torch.cat([x.flatten() for x in whole_model(Wide())])
    plain = torch.cat([x.flatten() for x in whole_model(torch.autocast("cpu", torch.bfloat16))])
    for grads in pool.run(_trained, "ddp in autocast"):
        flat_grads = torch.cat([x.flatten() for x in grads])
        assert 0 < (flat_grads - exact).norm() <= 2 * (plain - exact).norm()


def wrap(model: nn.Module, *, use_orig_params: bool, nested: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params,
        auto_wrap_policy=_is_layer if nested else None,
    )  # fmt: skip


def _is_layer(module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or "DecoderLayer" in type(module).__name__


def norm_of_gradients(model: Any) -> float:
    tokens = torch.randint(BYTES, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    with Wide():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    square = torch.zeros((), dtype=torch.float64)
    for weight in model.parameters():
        square += 0 if weight.grad is None else weight.grad.square().sum()
    if isinstance(model, FullyShardedDataParallel):  # each rank holds other shards
        dist.all_reduce(square)
    return float(square.sqrt())


def _trained_by_fsdp1(
    rank: int, reduction: Any, first: str, orig: bool, nested: bool
) -> float | str:
    del rank
    model: Any = build("Llama")
    if first == "ring":
        hf.parallelize(model, ContextParallel(), reduction=reduction)
    wrapped = wrap(model, use_orig_params=orig, nested=nested)
    if first == "fsdp":
        hf.parallelize(wrapped, ContextParallel(), reduction=reduction)
    try:
        return norm_of_gradients(wrapped)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("first", ["ring", "fsdp"])
def test_a_sum_is_refused_and_a_mean_is_the_whole_models(
    pools: dict[int, LocalRanks], first: str, orig: bool, nested: bool
) -> None:
    for message in pools[2].run(_trained_by_fsdp1, "sum", first, orig, nested):
        assert "FullyShardedDataParallel takes the mean" in message, message
        assert "reduction='mean'" in message
    whole = norm_of_gradients(build("Llama"))
    for norm in pools[2].run(_trained_by_fsdp1, "mean", first, orig, nested):
        assert norm == pytest.approx(whole, rel=1e-9)
