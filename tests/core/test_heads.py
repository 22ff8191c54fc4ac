"""Head plans and rank grids of Ulysses: every head gets its slots, and groups share tokens."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import pytest
from cases import Case

from ring_core import Layout, Mask, balanced_layout, head_plan, make_plan, ring_program
from ring_core.programs.grid import RankGrid, rank_grid
from ring_core.programs.heads import PADDING
from ring_core.reference.heads import run_heads

MOST = 16
#: Query heads, K/V heads and ranks: all that can trade.
ALL = [
    (kv_heads * group, kv_heads, ranks)
    for kv_heads in range(1, MOST + 1)
    for group in range(1, MOST // kv_heads + 1)
    for ranks in range(1, kv_heads * group + 1)
]


@pytest.mark.parametrize("ranks", range(1, MOST + 1))
def test_every_head_has_its_places(ranks: int) -> None:
    for q_heads, kv_heads, _ in (x for x in ALL if x[2] == ranks):
        plan, group = head_plan(q_heads, kv_heads, ranks), q_heads // kv_heads
        assert len(plan.q) == len(plan.kv) == ranks
        assert plan.q.dtype == plan.kv.dtype == np.int32
        assert sorted(plan.q[plan.q != PADDING]) == [*range(q_heads)]
        for places, filled in ((plan.q, plan.q_filled), (plan.kv, plan.kv_filled)):
            np.testing.assert_array_equal(filled[places != PADDING], places[places != PADDING])
        assert (plan.q.ravel()[plan.q_slots] == np.arange(q_heads)).all()
        assert (plan.kv.ravel()[plan.kv_slots] == np.arange(kv_heads)[:, None]).all()
        assert plan.copies * kv_heads == np.count_nonzero(plan.kv != PADDING)
        served = plan.q_filled.reshape(ranks, plan.kv.shape[1], -1)
        assert (served // group == plan.kv_filled[..., None]).all()
        for row in plan.kv:
            assert len({*row} - {PADDING}) == np.count_nonzero(row != PADDING), "no copy twice"


def test_padding_is_never_more_than_that_of_copies_to_a_common_multiple() -> None:
    """Padding is also at most that of whole groups if there are more K/V heads than ranks."""
    for q_heads, kv_heads, ranks in ALL:
        plan, group = head_plan(q_heads, kv_heads, ranks), q_heads // kv_heads
        copies = ranks // gcd(ranks, kv_heads)
        most = kv_heads * copies * -(-group // copies)
        if kv_heads > ranks:
            most = -(-kv_heads // ranks) * ranks * group
        assert plan.q.size <= most
        if kv_heads % ranks == 0:  # heads that ranks divide stay side by side
            assert (plan.q.ravel() == np.arange(q_heads)).all()
            assert (plan.kv.ravel() == np.arange(kv_heads)).all()
            assert (plan.describe(), plan.padding_share) == ("", 0)


@pytest.mark.parametrize(
    ("heads", "q_places", "copies", "first"),
    [
        ((40, 8, 16), 48, 2, [0, 1, 2]), ((28, 4, 8), 32, 2, [0, 1, 2, 3]), ((7, 7, 4), 8, 1, [0, 1]),
        ((12, 3, 4), 12, 4, [0, 4, 8]), ((16, 1, 4), 16, 4, [0, 1, 2, 3]), ((6, 3, 4), 8, 1, [0, 1]),
    ],
)  # fmt: skip
def test_some(heads: Any, q_places: int, copies: int, first: list[int]) -> None:
    plan = head_plan(*heads)
    assert (plan.q.size, plan.copies, plan.q[0].tolist()) == (q_places, copies, first)
    assert plan.padding_share == pytest.approx(1 - heads[0] / q_places)


def test_equal_plans_are_one_that_nobody_can_change() -> None:
    plan = head_plan(40, 8, 16)
    assert plan is head_plan(40, 8, 16)
    for heads in (plan.q, plan.kv, plan.q_filled, plan.kv_filled, plan.q_slots, plan.kv_slots):
        with pytest.raises(ValueError, match="read-only"):
            heads[0] = 0


#: Head counts that run per change: each number of query heads and of ranks occurs.
SOME = [
    "-".join(map(str, heads)) for heads in ALL
    if heads in {(n, n, n) for n in range(1, MOST + 1)}
    | {(16, 1, n) for n in range(2, 17)} | {(12, 3, n) for n in range(2, 13)}
    | {(7, 7, 4), (15, 5, 4), (16, 4, 13), (14, 7, 3), (16, 8, 15), (10, 2, 4)}
]  # fmt: skip


@pytest.mark.nightly(unless=SOME)
@pytest.mark.parametrize("heads", ALL, ids=lambda heads: "-".join(map(str, heads)))
def test_ranks_are_exact(heads: tuple[int, int, int]) -> None:
    """Results and all gradients are exact with every option that belongs to single heads."""
    ranks = heads[2]
    case = Case(
        "-".join(map(str, heads)), Mask(causal=True), "zigzag", ranks, 2 * ranks, 4 * ranks, 2,
        heads[:2], (3, 2), sinks=2, alibi=2, bias="heads" if sum(heads) % 2 else "shared",
        dropout_p=0.3, segments="scattered", lse_grad=True,
    )  # fmt: skip
    x: Any = case.inputs
    options = case.options | {name: x[name] for name in ("dout", "dlse")}
    results = run_heads(case.plan, head_plan(*heads), x["q"], x["k"], x["v"], **options)
    for name, expected in case.expected.items():
        result = getattr(results, name)
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-12, err_msg=name)


GRIDS = [(2, 1), (2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (12, 4)]
MASK = Mask(causal=True, window=(20, 0))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_pair_of_ranks_has_one_way(grid: tuple[int, int]) -> None:
    """Groups are consecutive, and a rank communicates with exactly one rank of each other group."""
    ranks, size = grid
    grid_of = RankGrid(ranks, size)
    for rank in range(ranks):
        inner, outer = grid_of.inner_ranks(rank), grid_of.outer_ranks(rank)
        assert len(inner) == size and len(outer) == grid_of.outer_size
        assert {*inner} & {*outer} == {rank}
        assert all(b - a == 1 for a, b in pairwise(inner))
        assert all(grid_of.inner_ranks(peer) == inner for peer in inner)
        assert all(grid_of.outer_ranks(peer) == outer for peer in outer)
        assert outer.index(rank) == rank // size and inner.index(rank) == rank % size


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "chunks"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_group_has_the_tokens_of_one_rank_of_the_layout_over_groups(
    grid: tuple[int, int], layout: Any, padding: int
) -> None:
    ranks, size = grid
    length, grid_of, spec = 16 * ranks, RankGrid(ranks, size), layout
    if spec == "chunks":
        spec = balanced_layout(MASK, seq_len=length, cp_size=ranks)
    pad_to = length if padding else None
    of_ranks = Layout(spec, length - padding, ranks, pad_to)
    of_groups = Layout(grid_of.outer_layout(spec), length - padding, grid_of.outer_size, pad_to)
    for rank in range(ranks):
        positions = np.concatenate([of_ranks.positions(n) for n in grid_of.inner_ranks(rank)])
        in_group = of_groups.positions(rank // size)
        np.testing.assert_array_equal(in_group[grid_of.scatter_indices(of_ranks, rank)], positions)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_causal_work_in_zigzag_is_even_over_all_ranks(grid: tuple[int, int]) -> None:
    ranks, size = grid
    length, q_heads = 32 * ranks, 12
    grid_of, heads = RankGrid(ranks, size), head_plan(q_heads, 3, size)
    plan = make_plan(Mask(causal=True), seq_len=length, cp_size=grid_of.outer_size, layout="zigzag")
    pairs = ring_program(plan).work().sum(axis=0)
    work = [pairs[n // size] * np.count_nonzero(heads.q[n % size] >= 0) for n in range(ranks)]
    assert len({*work}) == 1
    assert sum(work) == q_heads * length * (length + 1) // 2


@pytest.mark.parametrize(
    ("ranks", "q_heads", "hosts", "size"),
    [
        (8, 32, None, 8), (8, 6, None, 4), (8, 1, None, 1), (8, 32, "aaaabbbb", 4),
        (8, 3, "aaaabbbb", 2), (8, 32, "abcdefgh", 1), (6, 32, "aaabbb", 3), (6, 2, "aaabbb", 1),
    ],
)  # fmt: skip
def test_the_largest_group_within_a_host_is_taken(
    ranks: int, q_heads: int, hosts: str | None, size: int
) -> None:
    grid = rank_grid(ranks, q_heads, "zigzag", hosts=None if hosts is None else [*hosts])
    assert grid == RankGrid(ranks, size)


def test_a_size_that_is_named_is_taken_whatever_the_hosts() -> None:
    for size in (1, 2, 4, 8):
        grid = rank_grid(8, 8, "contiguous", ulysses_size=size, hosts=[*"aaabbbbb"])
        assert grid.ulysses_size == size
