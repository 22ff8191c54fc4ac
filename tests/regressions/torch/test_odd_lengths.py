"""Lengths that no layout divides: following the error's advice gives exact results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (4, 7)}, "chunks": {"chunk_size": 5},
    "capped": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    with LocalRanks(3) as ranks:
        yield ranks


def _qkv(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, length, 2, 8, dtype=torch.float64) for _ in range(3)]


def _as_it_says(error: str) -> tuple[int, int]:
    said = re.search(
        r"pad to (\d+) with zeros at the end, as shard\(x, pad=True\) does, and pass seq_len=(\d+)",
        error,
    )
    assert said is not None
    return int(said[1]), int(said[2])


def _padded(_: int, name: str, layout: Any, length: int) -> None:
    cp = ContextParallel(layout=layout)
    with pytest.raises(ValueError, match="pad to") as error:
        cp.shard(_qkv(length)[0])
    to, seq_len = _as_it_says(str(error.value))
    assert seq_len == length
    leaves, expected = ([x.requires_grad_() for x in _qkv(length)] for _ in range(2))
    shards = [cp.shard(x, pad=True) for x in leaves]
    for x, shard in zip(leaves, shards, strict=True):
        assert torch.equal(shard, cp.shard(pad(x, (0, 0, 0, 0, 0, to - length))))
    local = cp.attention(*shards, seq_len=seq_len, **OPTIONS[name])
    out = cp.unshard(local, grad="slice")[:, :length]
    out.square().sum().backward()
    alone = ContextParallel(_single(), layout="contiguous")
    whole = alone.attention(*expected, **OPTIONS[name])
    whole.square().sum().backward()
    torch.testing.assert_close(out, whole)
    for x, y in zip(leaves, expected, strict=True):
        assert x.grad is not None
        torch.distributed.all_reduce(x.grad)  # each rank has the gradient from its own shard
        torch.testing.assert_close(x.grad, y.grad)


def _single() -> Any:
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([n]) for n in range(torch.distributed.get_world_size())]
    return groups[rank]


@pytest.mark.parametrize(
    ("layout", "length"), [("zigzag", 17), ("contiguous", 19), ("striped", 23)]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_error_says_is_exact(
    name: str, layout: str, length: int, pool: LocalRanks
) -> None:
    pool.run(_padded, name, layout, length)


def test_a_length_of_nothing_is_no_advice() -> None:
    with pytest.raises(ValueError, match=r"pad to 1$"):
        ContextParallel().layout_of(0)
