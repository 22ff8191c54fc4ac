"""Rank grids: groups, a group's tokens, even work on all ranks, and refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ring_core import (
    Layout,
    Mask,
    UnsupportedError,
    balanced_layout,
    head_plan,
    make_plan,
    ring_program,
)
from ring_core.programs.grid import RankGrid, rank_grid

GRIDS = [(2, 1), (2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (12, 4)]
MASK = Mask(causal=True, window=(20, 0))


def _layout(name: str, ranks: int) -> Any:
    if name != "chunks":
        return name
    return balanced_layout(MASK, seq_len=16 * ranks, cp_size=ranks)


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
    grid: tuple[int, int], layout: str, padding: int
) -> None:
    ranks, size = grid
    length, grid_of, spec = 16 * ranks, RankGrid(ranks, size), _layout(layout, ranks)
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ulysses_size": 3}, "ulysses_size=3: it does not divide 8 ranks.* one of 1, 2, 4$"),
        ({"ulysses_size": 8}, "8: q has 6 heads, so at most 6 ranks can split them, not 8.* 1, 2, 4$"),
        ({"hosts": [*"aaabbbbb"]}, "unlike numbers of ranks: a 3, b 5.* by ulysses_size$"),
        ({"hosts": [*"abababab"]}, "not consecutive: a, b, a, .* by ulysses_size$"),
        ({"layout": "striped"}, "'striped' gives .* outer='ring' .* use layout='zigzag'"),
        ({"layout": "striped", "outer": "gather"}, "'striped' gives .* outer='gather'"),
    ],
    ids=["divides", "heads", "unlike", "interleaved", "striped", "striped gather"],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        rank_grid(8, 6, **{"layout": "zigzag"} | given)


def test_wrong_values_are_named() -> None:
    wrong: Any = "balanced"
    with pytest.raises(ValueError, match=f"outer '{wrong}'"):
        rank_grid(8, 8, "zigzag", outer=wrong)
    with pytest.raises(ValueError, match="ulysses_size"):
        rank_grid(8, 8, "zigzag", ulysses_size=0)
