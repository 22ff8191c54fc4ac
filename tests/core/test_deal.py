"""Chunks are dealt so that ranks see equally many pairs, and alike wherever they are dealt."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import diagonals
from hypothesis import given
from hypothesis import strategies as st

from ring_core import Dealt, Mask, UnsupportedError, deal, layout_of, make_plan, viz
from ring_core.choose.balance import EVEN, _deal, _evened, _hands, schedule_for


def documents(seed: int, seq_len: int, mean: int = 4096) -> tuple[int, ...]:
    """Offsets of documents whose lengths are log-normal."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, 4 * seq_len // mean).astype(int) + 1
    ends = np.cumsum(lengths)
    return (0, *ends[ends < seq_len].tolist(), seq_len)


def balance(mask: Mask, schedule: Any, seq_len: int, cp_size: int) -> float:
    return make_plan(mask, seq_len=seq_len, cp_size=cp_size, schedule=schedule).balance


@given(
    st.integers(0, 999),
    st.sampled_from([2, 3, 4, 6, 8, 16]),
    st.integers(1, 8),
    st.booleans(),
    st.none() | st.integers(0, 5000),
)
def test_never_worse_than_the_others(
    seed: int, cp_size: int, units: int, causal: bool, left: int | None
) -> None:
    seq_len = 2048 * cp_size * units
    window = None if left is None else (left, 0)
    mask = Mask(causal=causal, window=window, cu_seqlens=documents(seed, seq_len))
    dealt = deal(mask, seq_len=seq_len, cp_size=cp_size)
    assert seq_len // (cp_size * dealt.chunks_a_rank) % 128 == 0
    ours = balance(mask, dealt, seq_len, cp_size)
    others = min(balance(mask, name, seq_len, cp_size) for name in ("plain", "zigzag"))
    assert ours <= max(others, EVEN)


@pytest.mark.parametrize(("cp_size", "chunks"), [(2, 2), (4, 4), (8, 4)])
def test_documents_of_the_benchmark(cp_size: int, chunks: int) -> None:
    seq_len = 128 * 1024
    mask = Mask(causal=True, cu_seqlens=documents(0, seq_len))
    dealt = deal(mask, seq_len=seq_len, cp_size=cp_size)
    assert dealt.chunks_a_rank == chunks
    assert balance(mask, dealt, seq_len, cp_size) < EVEN < 1.07 < min(
        balance(mask, name, seq_len, cp_size) for name in ("plain", "zigzag")
    )  # fmt: skip


def test_as_few_chunks_as_are_even() -> None:
    """Where a schedule by name is even, its chunks are dealt."""
    sizes = {"seq_len": 4096, "cp_size": 4}
    assert deal(Mask(causal=True), **sizes) == Dealt(((0, 7), (1, 6), (2, 5), (3, 4)))
    for mask in (Mask(), Mask(causal=True, window=(2, 0)), Mask(causal=True, chunk_size=1024)):
        assert deal(mask, **sizes) == Dealt(((0,), (1,), (2,), (3,)))


def test_the_most_even_where_none_is_even() -> None:
    """Also of the numbers of chunks that divide both lengths."""
    mask = Mask(causal=True)
    assert deal(mask, seq_len=4 * 7, cp_size=4).chunks_a_rank == 1
    assert deal(mask, seq_len=4, cp_size=2, kv_seq_len=2) == Dealt(((0,), (1,)))
    # Four tokens see 4 keys each, the others one: halves see 18 and 6, quarters 12, 6, 3 and 3.
    lumpy = Mask(cu_seqlens=(0, 4, *range(5, 13)))
    dealt = deal(lumpy, seq_len=12, cp_size=2)
    assert dealt == Dealt(((0, 3), (1, 2)))
    assert balance(lumpy, dealt, 12, 2) == 15 / 12


def test_keys_beyond_the_queries() -> None:
    mask = Mask(causal=True)
    dealt = deal(mask, seq_len=2048, cp_size=4, kv_seq_len=8192)
    plan = make_plan(mask, seq_len=2048, cp_size=4, kv_seq_len=8192, schedule=dealt)
    assert plan.balance <= EVEN < make_plan(mask, seq_len=2048, cp_size=4, kv_seq_len=8192).balance


def test_the_same_everywhere() -> None:
    """Made anew it is equal, hashes alike and gives the same plan; other chunks give another."""
    mask = Mask(causal=True, cu_seqlens=documents(1, 16384, 700))
    first = deal(mask, seq_len=16384, cp_size=4)
    _deal.cache_clear()
    again = deal(mask, seq_len=np.int64(16384), cp_size=4)  # type: ignore[arg-type]
    assert first == again
    assert hash(first) == hash(again)
    assert repr(first) == str(first) == f"dealt(4x{first.chunks_a_rank})"
    assert layout_of(first) is first
    plan = make_plan(mask, seq_len=16384, cp_size=4, schedule=first)
    assert plan is make_plan(mask, seq_len=16384, cp_size=4, schedule=again)
    moved = Dealt((*first.chunks[1:], first.chunks[0]))
    other = make_plan(mask, seq_len=16384, cp_size=4, schedule=moved)
    assert other.digest != plan.digest
    assert str(first) in viz.describe(plan)


def test_equal_chunks_go_round() -> None:
    """In their order, on every machine."""
    weights = np.tile([1, 2], 32)  # so many that sorts that are not stable mix them up
    heavy, light = range(1, 64, 2), range(0, 64, 2)
    expected = [[*heavy[rank::4], *light[rank::4]] for rank in range(4)]
    assert _hands(weights, 4).tolist() == expected


def test_chunks_move_only_where_that_helps() -> None:
    """Rank 1 is the busiest; given chunk 0 for chunk 1, rank 0 would be as busy."""
    hands = np.array([[0], [1], [2]])
    np.testing.assert_array_equal(_evened(hands, np.array([1, 2, 2])), hands)


def test_a_schedule_by_its_name() -> None:
    mask = Mask(causal=True)
    sizes = {"seq_len": 64, "cp_size": 4, "kv_seq_len": 32}
    assert schedule_for("zigzag", mask, **sizes) == "zigzag"
    found = schedule_for("dealt", mask, **sizes)
    assert found == deal(mask, **sizes) != deal(mask, seq_len=64, cp_size=4)
    names = "plain, zigzag, striped, balanced, dealt"
    with pytest.raises(ValueError, match=f"^unknown schedule 'zigzak'; known: {names}$"):
        schedule_for("zigzak", mask, **sizes)


def test_lists_and_numpy_integers_are_chunks() -> None:
    chunks: Any = [[np.int64(0), np.int32(3)], [1, 2]]
    dealt = Dealt(chunks)
    assert dealt == Dealt(((0, 3), (1, 2)))
    assert all(type(n) is int for row in dealt.chunks for n in row)
    assert all(a < b for row in dealt.chunks for a, b in pairwise(row))


def test_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"cannot count a predicate; deal for the mask without it, or give a ring_core\.Dealt "
        "your own chunks$",
    ):
        deal(Mask(predicate=diagonals), seq_len=64, cp_size=4)
    with pytest.raises(ValueError, match=r"66 is not a positive multiple of 4.*pad to 68"):
        deal(Mask(), seq_len=66, cp_size=4)
    with pytest.raises(ValueError, match="must end at the sequence length 64, got 60"):
        deal(Mask(cu_seqlens=(0, 60)), seq_len=64, cp_size=4)
    with pytest.raises(
        ValueError, match=r"unknown schedule 'dealt'; .*what ring_core\.deal returns"
    ):
        make_plan(Mask(), seq_len=64, cp_size=4, schedule="dealt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunks must ascend on every rank"):
        Dealt(((1, 0),))
    with pytest.raises(ValueError, match=r"chunks must be 0\.\.3, each once, got \[0, 1, 1, 2\]"):
        Dealt(((0, 1), (1, 2)))


def test_many_ranks_stay_cheap() -> None:
    """Plans look at every pair of chunks: there are no more of them than 1,024, or two a rank."""
    mask = Mask(causal=True, cu_seqlens=documents(2, 1 << 20))
    for cp_size, chunks in ((64, 16), (128, 8), (1024, 2)):
        assert deal(mask, seq_len=1 << 20, cp_size=cp_size).chunks_a_rank == chunks
