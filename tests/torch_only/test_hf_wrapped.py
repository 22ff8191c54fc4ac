"""Models of transformers on two rings at once, inside torch's wrappers: DDP, FSDP, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import BYTES, LENGTH, Wide, build
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ring_torch import ContextParallel, hf
from ring_torch.local import LocalRanks

RANKS = 4


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
