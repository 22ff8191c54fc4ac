"""Objects that have to be the same on all ranks, and are not, are named on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ring_torch
from ring_core import RankMismatchError
from ring_torch import ContextParallel
from ring_torch.verification.equality import digest_of


def _model(_: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def _changed_weight(rank: int) -> nn.Module:
    model = _model(rank)
    with torch.no_grad():
        model.get_parameter("0.weight")[1, 2] += float(rank)
    return model


def _changed_buffer(rank: int) -> nn.Module:
    model = _model(rank)
    model.get_buffer("1.num_batches_tracked").add_(rank)
    return model


def _optimizer(rank: int) -> torch.optim.Optimizer:
    model = _model(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    (model(torch.randn(3, 4)).square().sum() * (1 + rank)).backward()
    optimizer.step()
    return optimizer


#: Objects by rank, and what is said of them; ``None`` where all ranks have the same.
CASES: dict[str, tuple[Callable[[int], Any], str | None]] = {
    "tensor": (lambda _: torch.arange(6.0), None),
    "nan": (lambda _: torch.tensor([torch.nan, 1.0]), None),
    "model": (_model, None),
    "empty": (lambda _: torch.empty(0, 3), None),
    "bool": (lambda _: {"mask": torch.tensor([True, False]), "seed": 3, "name": "x"}, None),
    "view": (lambda rank: torch.zeros(3, 4).t() if rank else torch.zeros(4, 3), None),
    "weight": (_changed_weight, r"rank 1: x.0.weight: float32 \[3, 4\], 1 of 12 numbers differ from rank 0's, the first at \[1, 2\]"),
    "buffer": (_changed_buffer, r"x.1.num_batches_tracked: int64 \[\], 1 of 1"),
    "optimizer": (_optimizer, r"\['exp_avg'\]"),
    "rows swapped": (lambda rank: torch.arange(4.0).view(2, 2)[[rank, 1 - rank]], r"4 of 4 numbers"),
    "sign of zero": (lambda rank: torch.zeros(2) * (1 - 2 * rank), r"2 of 2 numbers"),
    "dtype": (lambda rank: torch.zeros(2, dtype=(torch.float32, torch.float16)[rank]), r"rank 0: x: float32 \[2\]; rank 1: x: float16 \[2\]"),
    "shape": (lambda rank: torch.zeros(2 + rank), r"rank 1: x: float32 \[3\]"),
    "number": (lambda rank: {"lr": 0.1 * (1 + rank)}, r"rank 0: x\['lr'\] = 0.1; rank 1: x\['lr'\] = 0.2"),
    "keys": (lambda rank: {"a": 1, "bc"[rank]: 2}, r"rank 0: x\['b'\] = 2; rank 1: x\['c'\] = 2"),
    "length": (lambda rank: [1] * (1 + rank), r"rank 1: x, a list of 2"),
    "complex": (lambda rank: torch.full((2,), 1j * (1 + rank)), r"2 of 2 numbers .*: 2j for 1j"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@on_ranks
def test_the_first_difference_is_named(rank: int, case: str) -> None:
    make, message = CASES[case]
    cp = ContextParallel()
    if message is None:
        cp.check_equal(make(rank), what="x")
    else:
        with pytest.raises(RankMismatchError, match=message):
            cp.check_equal(make(rank), what="x")
    cp.check_equal(rank * 0, what="x")  # the group goes on


@on_ranks
def test_each_nth_call_is_compared(rank: int) -> None:
    cp = ContextParallel()
    cp.check_equal(0, what="of some calls", every=2)
    cp.check_equal(rank, what="of some calls", every=2)
    with pytest.raises(RankMismatchError):
        cp.check_equal(rank, what="of some calls", every=2)
    with cp.whole():
        cp.check_equal(rank, what="x")


@on_ranks
def test_shards_are_compared_along_cp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "cp"))
    cp = ContextParallel(mesh["cp"])
    over_tp: Tensor = DTensor.from_local(torch.full((2,), float(rank)), mesh["tp"], [Shard(0)])
    with pytest.raises(RankMismatchError, match=r"placed .*2 of 2 numbers"):
        cp.check_equal(over_tp, what="x")
    cp.check_equal(distribute_tensor(torch.arange(4.0), mesh["cp"], [Shard(0)]), what="x")


def test_what_has_no_bits_is_refused() -> None:
    cp = ContextParallel()
    with pytest.raises(ValueError, match=r"x\['a'\]\[0\] is a object"):
        cp.check_equal({"a": [object()]}, what="x")
    with pytest.raises(ring_torch.UnsupportedError, match="meta"):
        cp.check_equal(torch.empty(2, device="meta"), what="x")


def test_the_digest_sees_every_place() -> None:
    torch.manual_seed(0)
    x = torch.randint(-3, 3, (5000,), dtype=torch.int8)
    digests = {int(digest_of(x))}
    for n in range(0, 4999, 50):
        y = x.clone()
        y[n] += 1
        digests.add(int(digest_of(y)))
    assert len(digests) == 101
    assert digest_of(x) == digest_of(x.view(50, 100).t().contiguous().t())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@on_ranks
def test_the_whole_length_of_a_slice(layout: Any) -> None:
    cp = ContextParallel(layout=layout)
    x = torch.zeros(1, 10, 3)
    shard = cp.shard(x, pad=True)
    assert cp.whole_length(shard) == 10
    assert cp.whole_length(shard * 1) == 2 * shard.shape[1]
    assert cp.whole_length(shard.shape[1], seq_len=10) == 10
    assert cp.whole_length(shard[0], dim=0, seq_len=10) == 10
    with pytest.raises(ValueError, match="seq_len=30 is the length of the whole sequence"):
        cp.whole_length(shard, seq_len=30)
    with cp.whole():
        assert cp.whole_length(x) == 10
