"""Every token lies on exactly one rank, where the layout says; strategies are names or configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import RANDOM
from hypothesis import given, strategies as st
from plans import chunk_layouts

from ring_core import (
    LAYOUTS,
    STRATEGIES,
    ChunkLayout,
    Layout,
    LayoutSpec,
    Mask,
    StrategyConfig,
    make_plan,
)
from ring_core.base.config import strategy_config
from ring_core.programs.steps import pairs_of


@given(st.data(), st.integers(1, 16), st.integers(1, 20))
def test_a_partition(data: st.DataObject, cp_size: int, units: int) -> None:
    name: Any = data.draw(
        st.sampled_from(["contiguous", "zigzag", "striped"]) | chunk_layouts(cp_size)
    )
    divisor = cp_size * (1 + (name == "zigzag" and cp_size > 1))
    if isinstance(name, ChunkLayout):
        divisor = cp_size * name.chunks_per_rank
    layout = Layout(name, divisor * units, cp_size)
    assert layout.divisor == divisor
    whole = np.concatenate([layout.positions(rank) for rank in range(cp_size)])
    np.testing.assert_array_equal(np.sort(whole), np.arange(divisor * units))
    for rank in range(cp_size):
        positions = layout.positions(rank)
        assert positions.size == layout.local_len
        for run in layout.runs(rank):
            part = positions[run.local_start : run.local_start + run.length]
            np.testing.assert_array_equal(
                part, run.global_start + run.stride * np.arange(run.length)
            )


def test_by_hand() -> None:
    assert Layout("contiguous", 8, 2).positions(1).tolist() == [4, 5, 6, 7]
    assert Layout("zigzag", 8, 2).positions(0).tolist() == [0, 1, 6, 7]
    assert Layout("striped", 8, 2).positions(1).tolist() == [1, 3, 5, 7]
    assert Layout(ChunkLayout(((1, 2), (0, 3))), 8, 2).positions(0).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", RANDOM[3]])
@pytest.mark.parametrize("seq_len", range(1, 19))
def test_padding_is_least_and_behind_the_tokens(layout: LayoutSpec, seq_len: int) -> None:
    padded = Layout.padded(layout, seq_len, 3)
    assert 0 <= padded.padded_len - seq_len < padded.divisor
    whole = Layout(layout, padded.padded_len, 3)
    for rank in range(3):
        positions, tokens = padded.positions(rank), padded.num_tokens(rank)
        np.testing.assert_array_equal(positions, whole.positions(rank))
        assert (positions[:tokens] < seq_len).all() and (positions[tokens:] >= seq_len).all()


def test_no_padding_is_the_layout_itself() -> None:
    assert Layout.padded("zigzag", 8, 2) == Layout("zigzag", 8, 2)
    sizes = ((8, None), (8, 8), (7, 8), (7, 10))
    plain, *digests = (make_plan(Mask(), seq_len=n, cp_size=2, pad_to=to).digest for n, to in sizes)
    assert plain == digests[0] and len({*digests}) == 3


def test_a_name_stands_for_its_record() -> None:
    for name in ("auto", *STRATEGIES):
        config = strategy_config(name)
        assert config == StrategyConfig(name, outer="ring") == strategy_config(config)
        assert hash(config) == hash(StrategyConfig(name))
        assert config.ring_strategy == ("balanced" if name == "balanced" else "ring")
    assert strategy_config("rdma", ("auto", "rdma")) == StrategyConfig("rdma")
    config = StrategyConfig("hybrid", ulysses_size=4, outer="gather")
    assert (config.ulysses_size, config.outer, config.ring_strategy) == (4, "gather", "ring")
    expected = [("contiguous", "ring"), ("contiguous", "balanced")]
    assert [*pairs_of(LAYOUTS)] == [*expected, *((name, "ring") for name in LAYOUTS[1:])]
