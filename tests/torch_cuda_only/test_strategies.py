"""Strategies over NCCL and peers' memory, on cases of the table, each call checked."""

from __future__ import annotations

from typing import Any

import pytest
from backends.torch_ranks import Arrays, gather, run_rank
from cases import CASES, Case
from tolerances import assert_close

import ring_torch
from ring_core import StrategyConfig
from ring_torch import UnsupportedError
from ring_torch.local import LocalRankError

#: Strategy and transport.
WAYS = {
    "p2p": ("ring", "p2p"), "gather": ("gather", "p2p"), "symm_mem": ("gather", "symm_mem"),
    "ulysses": ("ulysses", "p2p"), "ulysses-symm_mem": ("ulysses", "symm_mem"),
}  # fmt: skip


def cases(way: str) -> list[Case]:
    """Return cases of two ranks that a strategy supports."""
    two = [case for case in CASES.values() if case.cp_size == 2]
    return two if way == "p2p" else [case for case in two if case.strategy == "ring"]


TWO = [(way, case) for way in WAYS for case in cases(way)]


#: Cases of four ranks, in two groups of two; every other one gathers between the groups.
GRIDS = [
    case for case in CASES.values()
    if (case.cp_size, case.strategy) == (4, "ring") and case.layout != "striped"
]  # fmt: skip


def checked(rank: int, case: Case, way: tuple[str | StrategyConfig, str]) -> Arrays | str:
    """Return a rank's part of a case, or the reason of its refusal."""
    with ring_torch.check():
        try:
            return run_rank(rank, case, ("auto", *way), None, True)
        except UnsupportedError as error:
            return str(error)


@pytest.mark.parametrize(("way", "case"), TWO, ids=[f"{way}-{case.name}" for way, case in TWO])
def test_case(way: str, case: Case, backend: Any) -> None:
    strategy, transport = WAYS[way]
    try:
        parts = backend.pool(2).run(checked, case, (case.moved(strategy), transport))
    except LocalRankError:
        backend.discard(2)
        raise
    if any(isinstance(x, str) for x in parts):
        assert "gather" in strategy, parts
        assert all(isinstance(x, str) and f"{strategy!r}" in x for x in parts), parts
    else:
        assert_close(case, gather(case, case.plan, parts))


@pytest.mark.parametrize("case", GRIDS, ids=[case.name for case in GRIDS])
def test_hybrid(case: Case, backend: Any) -> None:
    gathers = GRIDS.index(case) % 2 == 1 and case.mask.predicate is None
    way = StrategyConfig("hybrid", ulysses_size=2, outer="gather" if gathers else "ring")
    try:
        parts = backend.pool(4).run(checked, case, (way, "p2p"))
    except LocalRankError:
        backend.discard(4)
        raise
    assert_close(case, gather(case, case.plan, parts))
