"""Prefill and decode over a sharded K/V cache, compared with dense attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from served import SIZES, World

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.serving import merging, prefilling


@pytest.fixture(params=[1, 2, 3, 4], ids="{} ranks".format)
def pool(request: Any, pools: dict[int, LocalRanks]) -> LocalRanks:
    return pools[request.param]


WAYS = ("False-None", "True-True", "False-False")
SCHEDULES = [
    (name, seed, by_head, queries)
    for seed, (name, by_head, queries) in enumerate(
        (name, by_head, queries)
        for name in SIZES
        for by_head, queries in ((False, None), (True, True), (False, False))
    )
]


@pytest.mark.nightly(unless=[
    *(f"{ranks} ranks-groups-{n}-{way}" for ranks in (2, 3) for n, way in enumerate(WAYS)),
    "1 ranks-groups-0-False-None", "4 ranks-one K/V head-4-True-True", "3 ranks-latents-6-False-None",
    "2 ranks-latents-8-False-False",
])  # fmt: skip
@pytest.mark.parametrize(("name", "seed", "by_head", "queries"), SCHEDULES)
@on_ranks
def test_random_schedules(name: str, seed: int, by_head: bool, queries: bool | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if by_head:  # each rank merges a part of the heads, of which there may be fewer than ranks
            patch.setattr(merging, "BY_HEAD", 0)
        if queries is not None:
            patch.setattr(prefilling._Part, "queries_travel", queries)
        World(ContextParallel(), SIZES[name], seed).run(25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks
def test_schedules_in_other_dtypes(dtype: torch.dtype) -> None:
    World(ContextParallel(), SIZES["groups"], 31, dtype).run(12)
