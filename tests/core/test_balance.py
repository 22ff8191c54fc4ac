"""Balanced chunk layouts give all ranks equally many pairs, and packed sequences all rings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from plans import plan_of

from ring_core import ChunkLayout, Mask, balanced_layout, make_plan, pack_sequences, ring_program
from ring_core.choose.balance import EVEN, _assign, _balance, layout_for


def documents(seed: int, seq_len: int, mean: int = 4096) -> tuple[int, ...]:
    """Return ``cu_seqlens`` of documents with log-normal lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, 4 * seq_len // mean).astype(int) + 1
    ends = np.cumsum(lengths)
    return (0, *ends[ends < seq_len].tolist(), seq_len)


def imbalances(mask: Mask, **sizes: int) -> tuple[ChunkLayout, float, float]:
    """Return the balanced layout, its imbalance, and the least one of layouts with a name."""
    layouts = (balanced_layout(mask, **sizes), "contiguous", "zigzag")
    ours, *others = (
        ring_program(make_plan(mask, layout=layout, **sizes)).imbalance  # type: ignore[arg-type]  # names
        for layout in layouts
    )
    return layouts[0], ours, min(others)


LEFT = st.none() | st.integers(0, 5000)


@given(
    st.integers(0, 999),
    st.sampled_from([2, 3, 4, 6, 8, 16]),
    st.integers(1, 8),
    st.booleans(),
    LEFT,
)
def test_never_worse_than_the_others(
    seed: int, cp_size: int, units: int, causal: bool, left: int | None
) -> None:
    seq_len = 2048 * cp_size * units
    window = None if left is None else (left, 0)
    mask = Mask(causal=causal, window=window, cu_seqlens=documents(seed, seq_len))
    balanced, ours, others = imbalances(mask, seq_len=seq_len, cp_size=cp_size)
    assert seq_len // (cp_size * balanced.chunks_per_rank) % 128 == 0
    assert ours <= max(others, EVEN)


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
    balanced, ours, _ = imbalances(lumpy, seq_len=12, cp_size=2)
    assert (balanced, ours) == (ChunkLayout(((0, 3), (1, 2))), 15 / 12)
    assert imbalances(mask, seq_len=2048, cp_size=4, kv_seq_len=8192)[1] <= EVEN  # more keys


def test_the_same_everywhere() -> None:
    """A recomputed layout is equal, hashes alike and gives the same plan; others differ."""
    mask = Mask(causal=True, cu_seqlens=documents(1, 16384, 700))
    first = balanced_layout(mask, seq_len=16384, cp_size=4)
    _balance.cache_clear()
    again = balanced_layout(mask, seq_len=16384, cp_size=4)
    moved = ChunkLayout((*first.chunks[1:], first.chunks[0]))
    assert repr(first) == str(first) == f"chunks(4x{first.chunks_per_rank})"
    plan, same, other = (plan_of(mask, 16384, 4, layout) for layout in (first, again, moved))
    assert plan is same and other.digest != plan.digest


def test_equal_chunks_go_round() -> None:
    """Chunks of equal weight are dealt out in order, on every machine."""
    weights = np.tile([1, 2], 32)  # enough that an unstable sort would permute them
    heavy, light = range(1, 64, 2), range(0, 64, 2)
    expected = [[*heavy[rank::4], *light[rank::4]] for rank in range(4)]
    assert _assign(weights, 4).tolist() == expected


def test_a_layout_by_its_name() -> None:
    mask = Mask(causal=True)
    sizes = {"seq_len": 64, "cp_size": 4, "kv_seq_len": 32}
    assert layout_for("zigzag", mask, **sizes) == "zigzag"
    layout = layout_for("chunks", mask, **sizes)
    assert layout == balanced_layout(mask, **sizes) != balanced_layout(mask, seq_len=64, cp_size=4)


def test_lists_and_numpy_integers_are_chunks() -> None:
    chunks: Any = [[np.int64(0), np.int32(3)], [1, 2]]
    layout = ChunkLayout(chunks)
    assert layout == ChunkLayout(((0, 3), (1, 2)))
    assert all(type(n) is int for row in layout.chunks for n in row)


def test_many_ranks_stay_cheap() -> None:
    """At most 1,024 chunks, or two a rank, are made: a plan looks at every pair of chunks."""
    mask = Mask(causal=True, cu_seqlens=documents(2, 1 << 20))
    for cp_size, chunks in ((64, 16), (128, 8), (1024, 2)):
        assert balanced_layout(mask, seq_len=1 << 20, cp_size=cp_size).chunks_per_rank == chunks


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5), st.integers(50, 90)
)
def test_each_sequence_is_in_one_row_that_holds_it(
    lengths: list[int], rings: int, tokens: int
) -> None:
    steps = pack_sequences(lengths, rings=rings, tokens=tokens)
    rows = [row for step in steps for row in step]
    assert sorted(n for row in rows for n in row) == [*range(len(lengths))]
    assert all(len(step) == rings for step in steps)
    assert all(sum(lengths[n] for n in row) <= tokens for row in rows)
    assert all(row == tuple(sorted(row)) for row in rows)
    # Empty rows are of the last step alone, and there are steps enough for all others only.
    assert all(rows[: len(rows) - rings])
    assert len(steps) <= -(-2 * sum(lengths) // (rings * tokens)) + 1


@pytest.mark.parametrize("hidden_size", [1, 64, 4096])
@pytest.mark.parametrize(("rings", "tokens"), [(2, 32768), (8, 32768), (3, 65536)])
def test_rings_have_equally_much_work(hidden_size: int, rings: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(900), 0.8, 512).astype(int).clip(1, 4096)
    of_sequence = lengths * (lengths + 1) // 2 + 6 * hidden_size * lengths
    of_ring = np.zeros(rings)
    for step in pack_sequences(
        lengths.tolist(), rings=rings, tokens=tokens, hidden_size=hidden_size
    ):
        load = np.array([of_sequence[[*row]].sum() for row in step])
        assert load.max() <= max(1.03 * load.mean(), of_sequence.max())  # or one has more by itself
        of_ring += load
    assert of_ring.max() <= 1.03 * of_ring.mean()


def test_work_is_quadratic_in_a_sequence_and_linear_in_tokens() -> None:
    lengths = [100, 50, 50, 50, 50]
    assert pack_sequences(lengths, rings=2, tokens=400, hidden_size=1)[0] == ((1, 2, 3, 4), (0,))
    by_tokens = pack_sequences(lengths, rings=2, tokens=400, hidden_size=10**6)[0]
    assert [sum(lengths[n] for n in row) for row in by_tokens] == [150, 150]
