"""Balanced chunk layouts give all ranks equally many pairs, and are equal on every rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import diagonals
from hypothesis import given, strategies as st

from ring_core import (
    ChunkLayout,
    Mask,
    UnsupportedError,
    balanced_layout,
    make_plan,
    ring_program,
    viz,
)
from ring_core.choose.balance import EVEN, _assign, _balance, _swap_until_even, layout_for


def documents(seed: int, seq_len: int, mean: int = 4096) -> tuple[int, ...]:
    """Return ``cu_seqlens`` of documents with log-normal lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, 4 * seq_len // mean).astype(int) + 1
    ends = np.cumsum(lengths)
    return (0, *ends[ends < seq_len].tolist(), seq_len)


def balance(mask: Mask, layout: Any, seq_len: int, cp_size: int) -> float:
    return ring_program(make_plan(mask, seq_len=seq_len, cp_size=cp_size, layout=layout)).imbalance


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
    balanced = balanced_layout(mask, seq_len=seq_len, cp_size=cp_size)
    assert seq_len // (cp_size * balanced.chunks_per_rank) % 128 == 0
    ours = balance(mask, balanced, seq_len, cp_size)
    others = min(balance(mask, name, seq_len, cp_size) for name in ("contiguous", "zigzag"))
    assert ours <= max(others, EVEN)


@pytest.mark.parametrize(("cp_size", "chunks"), [(2, 2), (4, 4), (8, 4)])
def test_documents_of_the_benchmark(cp_size: int, chunks: int) -> None:
    seq_len = 128 * 1024
    mask = Mask(causal=True, cu_seqlens=documents(0, seq_len))
    balanced = balanced_layout(mask, seq_len=seq_len, cp_size=cp_size)
    assert balanced.chunks_per_rank == chunks
    assert balance(mask, balanced, seq_len, cp_size) < EVEN < 1.07 < min(
        balance(mask, name, seq_len, cp_size) for name in ("contiguous", "zigzag")
    )  # fmt: skip


def test_as_few_chunks_as_are_even() -> None:
    """Balanced layouts use the chunks of a named layout if that one is even."""
    sizes = {"seq_len": 4096, "cp_size": 4}
    assert balanced_layout(Mask(causal=True), **sizes) == ChunkLayout(
        ((0, 7), (1, 6), (2, 5), (3, 4))
    )
    for mask in (Mask(), Mask(causal=True, window=(2, 0)), Mask(causal=True, chunk_size=1024)):
        assert balanced_layout(mask, **sizes) == ChunkLayout(((0,), (1,), (2,), (3,)))


def test_the_most_even_where_none_is_even() -> None:
    """The most even candidate wins; chunks have to divide both the query and the key length."""
    mask = Mask(causal=True)
    assert balanced_layout(mask, seq_len=4 * 7, cp_size=4).chunks_per_rank == 1
    assert balanced_layout(mask, seq_len=4, cp_size=2, kv_seq_len=2) == ChunkLayout(((0,), (1,)))
    # Four tokens see 4 keys each, the others one: halves see 18 and 6, quarters 12, 6, 3 and 3.
    lumpy = Mask(cu_seqlens=(0, 4, *range(5, 13)))
    balanced = balanced_layout(lumpy, seq_len=12, cp_size=2)
    assert balanced == ChunkLayout(((0, 3), (1, 2)))
    assert balance(lumpy, balanced, 12, 2) == 15 / 12


def test_keys_beyond_the_queries() -> None:
    mask = Mask(causal=True)
    balanced = balanced_layout(mask, seq_len=2048, cp_size=4, kv_seq_len=8192)
    program = ring_program(
        make_plan(mask, seq_len=2048, cp_size=4, kv_seq_len=8192, layout=balanced)
    )
    assert (
        program.imbalance
        <= EVEN
        < ring_program(make_plan(mask, seq_len=2048, cp_size=4, kv_seq_len=8192)).imbalance
    )


def test_the_same_everywhere() -> None:
    """A recomputed layout is equal, hashes alike and gives the same plan; others differ."""
    mask = Mask(causal=True, cu_seqlens=documents(1, 16384, 700))
    first = balanced_layout(mask, seq_len=16384, cp_size=4)
    _balance.cache_clear()
    again = balanced_layout(mask, seq_len=np.int64(16384), cp_size=4)  # type: ignore[arg-type]  # numpy's integers are taken, too
    assert first == again
    assert hash(first) == hash(again)
    assert repr(first) == str(first) == f"chunks(4x{first.chunks_per_rank})"
    plan = make_plan(mask, seq_len=16384, cp_size=4, layout=first)
    assert plan is make_plan(mask, seq_len=16384, cp_size=4, layout=again)
    moved = ChunkLayout((*first.chunks[1:], first.chunks[0]))
    other = make_plan(mask, seq_len=16384, cp_size=4, layout=moved)
    assert other.digest != plan.digest
    assert str(first) in viz.describe(ring_program(plan))


def test_equal_chunks_go_round() -> None:
    """Chunks of equal weight are dealt out in order, on every machine."""
    weights = np.tile([1, 2], 32)  # enough that an unstable sort would permute them
    heavy, light = range(1, 64, 2), range(0, 64, 2)
    expected = [[*heavy[rank::4], *light[rank::4]] for rank in range(4)]
    assert _assign(weights, 4).tolist() == expected


def test_chunks_move_only_where_that_helps() -> None:
    """Chunks 0 and 1 stay: after swapping them rank 0 would be as busy as rank 1 is."""
    chunks = np.array([[0], [1], [2]])
    np.testing.assert_array_equal(_swap_until_even(chunks, np.array([1, 2, 2])), chunks)


def test_a_layout_by_its_name() -> None:
    mask = Mask(causal=True)
    sizes = {"seq_len": 64, "cp_size": 4, "kv_seq_len": 32}
    assert layout_for("zigzag", mask, **sizes) == "zigzag"
    layout = layout_for("chunks", mask, **sizes)
    assert layout == balanced_layout(mask, **sizes) != balanced_layout(mask, seq_len=64, cp_size=4)
    names = "contiguous, zigzag, striped, chunks"
    with pytest.raises(ValueError, match=f"^unknown layout 'zigzak'; known: {names}$"):
        layout_for("zigzak", mask, **sizes)


def test_lists_and_numpy_integers_are_chunks() -> None:
    chunks: Any = [[np.int64(0), np.int32(3)], [1, 2]]
    layout = ChunkLayout(chunks)
    assert layout == ChunkLayout(((0, 3), (1, 2)))
    assert all(type(n) is int for row in layout.chunks for n in row)
    assert all(a < b for row in layout.chunks for a, b in pairwise(row))


def test_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"cannot count a predicate; balance for the mask without it, or give a "
        r"ring_core\.ChunkLayout your own chunks$",
    ):
        balanced_layout(Mask(predicate=diagonals), seq_len=64, cp_size=4)
    with pytest.raises(ValueError, match=r"66 is not a positive multiple of 4.*pad to 68"):
        balanced_layout(Mask(), seq_len=66, cp_size=4)
    with pytest.raises(ValueError, match="must end at the sequence length 64, got 60"):
        balanced_layout(Mask(cu_seqlens=(0, 60)), seq_len=64, cp_size=4)
    with pytest.raises(
        ValueError, match=r"unknown layout 'chunks'; .*what ring_core\.balanced_layout returns"
    ):
        make_plan(Mask(), seq_len=64, cp_size=4, layout="chunks")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="chunks must ascend on every rank"):
        ChunkLayout(((1, 0),))
    with pytest.raises(ValueError, match=r"chunks must be 0\.\.3, each once, got \[0, 1, 1, 2\]"):
        ChunkLayout(((0, 1), (1, 2)))


def test_many_ranks_stay_cheap() -> None:
    """At most 1,024 chunks, or two a rank, are made: a plan looks at every pair of chunks."""
    mask = Mask(causal=True, cu_seqlens=documents(2, 1 << 20))
    for cp_size, chunks in ((64, 16), (128, 8), (1024, 2)):
        assert balanced_layout(mask, seq_len=1 << 20, cp_size=cp_size).chunks_per_rank == chunks
