"""A ``ContextParallel`` can be pickled and copied, also as part of an object such as a model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ring_core import Mask, UnsupportedError, balanced_layout
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

LAYOUTS: list[Any] = [
    "zigzag", "striped", "contiguous",
    balanced_layout(Mask(causal=True), seq_len=16, cp_size=2),
]  # fmt: skip


def _is_alike(cp: ContextParallel, copied: ContextParallel) -> bool:
    x = torch.arange(32.0).view(1, 16, 2)
    return (
        cp is not copied
        and (cp.group, cp.layout, cp.cp_size, cp.cp_rank)
        == (copied.group, copied.layout, copied.cp_size, copied.cp_rank)
        and torch.equal(cp.shard(x), copied.shard(x))
        and torch.equal(copied.unshard(copied.shard(x)), x)
    )


def _default_group(_: int, layout: Any) -> list[bool]:
    cp = ContextParallel(layout=layout)
    return [
        _is_alike(cp, read)
        for read in (pickle.loads(pickle.dumps(cp)), copy.copy(cp), copy.deepcopy(cp))
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_over_the_default_group_it_round_trips(layout: Any) -> None:
    with LocalRanks(2, timeout=20) as pool:
        assert pool.run(_default_group, layout) == [[True] * 3] * 2


def test_it_travels_to_the_ranks() -> None:
    with LocalRanks(2, timeout=20) as pool:
        assert pool.run(_sizes, ContextParallel(layout="striped")) == [(2, 0), (2, 1)]


def _sizes(_: int, cp: ContextParallel) -> tuple[int, int]:
    return cp.cp_size, cp.cp_rank


class _Model(nn.Module):
    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.weight, self.cp = nn.Linear(2, 2), cp


def _groups(_: int) -> list[bool]:
    alike: list[bool] = []
    groups: list[Any] = [dist.new_group(), init_device_mesh("cpu", (2,))]
    for group in groups:
        cp = ContextParallel(group)
        with pytest.raises(UnsupportedError, match=f"{type(group).__name__} cannot be pickled"):
            pickle.dumps(_Model(cp))
        alike += [_is_alike(cp, x) for x in (copy.copy(cp), copy.deepcopy(_Model(cp)).cp)]
    return alike


def test_over_a_group_it_is_copied_and_not_pickled() -> None:
    with LocalRanks(2, timeout=20) as pool:
        assert pool.run(_groups) == [[True] * 4] * 2
