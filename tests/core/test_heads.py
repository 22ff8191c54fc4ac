"""Head plans and rank grids of Ulysses: every head gets its slots, and groups share tokens."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import pytest
from cases import Case

from ring_core import Layout, Mask, balanced_layout, head_plan
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
def test_every_head_has_its_places_and_few_are_padding(ranks: int) -> None:
    """Padding is at most that of copies to a common multiple, or of whole groups on fewer ranks."""
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
        copies = ranks // gcd(ranks, kv_heads)
        of_copies = kv_heads * copies * -(-group // copies)
        of_groups = -(-kv_heads // ranks) * ranks * group
        assert plan.q.size <= (of_groups if kv_heads > ranks else of_copies)
        assert plan.padding_share == pytest.approx(1 - q_heads / plan.q.size)
        if kv_heads % ranks == 0:  # heads that ranks divide stay side by side
            assert (plan.q.ravel() == np.arange(q_heads)).all()
            assert (plan.kv.ravel() == np.arange(kv_heads)).all()
            assert plan.describe() == ""


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


@pytest.mark.parametrize(
    ("q_heads", "hosts", "named", "size"),
    [
        (32, 8, None, 8), (6, 8, None, 4), (1, 8, None, 1), (32, "aaaabbbb", None, 4), (3, "aaaabbbb", None, 2),
        (32, "abcdefgh", None, 1), (32, "aaabbb", None, 3), (2, "aaabbb", None, 1),
        (8, "aaabbbbb", 2, 2), (8, "aaabbbbb", 8, 8),
    ],
)  # fmt: skip
def test_a_group_is_the_largest_within_a_host_or_has_the_size_that_is_named(
    q_heads: int, hosts: str | int, named: int | None, size: int
) -> None:
    ranks, hosts_of = (hosts, None) if isinstance(hosts, int) else (len(hosts), [*hosts])
    grid = rank_grid(ranks, q_heads, "zigzag", ulysses_size=named, hosts=hosts_of)
    assert grid == RankGrid(ranks, size)
