"""Gathers whose items begin at whole tiles of keys: exact, with few bytes more."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st
from plans import chunk_layouts, plans

from benchmarks.common.cases import SHORT_SETTINGS, mask_of
from ring_core import (
    GatherProgram,
    Mask,
    Plan,
    divisor_of,
    gather_program,
    gather_refusals,
    longest_gather,
    make_plan,
)
from ring_core.reference.item_kernel import Params, QueryRows, Side, backward, forward


@st.composite
def windowed(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """Draw a plan, a tile and a rank: most plans have windows whose runs are whole tiles."""
    if draw(st.integers(0, 3)) == 0:
        plan, tile = draw(plans().filter(lambda plan: not gather_refusals(plan))), 2
        return plan, tile, draw(st.integers(0, plan.cp_size - 1))
    cp_size, tile = draw(st.integers(1, 4)), draw(st.sampled_from([2, 4, 8]))
    layout: Any = draw(st.sampled_from(["contiguous", "zigzag"]) | chunk_layouts(cp_size))
    unit = tile * divisor_of(layout, cp_size)
    seq_len = kv_seq_len = unit * draw(st.integers(1, 4))
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=3))
    if cuts is None:
        kv_seq_len = unit * draw(st.integers(1, 4))
    mask = Mask(
        causal=draw(st.booleans()),
        window=(draw(st.integers(1, 3 * tile)), draw(st.none() | st.integers(0, 2 * tile))),
        cu_seqlens=None if cuts is None else (0, *sorted(cuts), seq_len),
    )
    plan = make_plan(mask, seq_len=seq_len, cp_size=cp_size, layout=layout, kv_seq_len=kv_seq_len)
    return plan, tile, draw(st.integers(0, cp_size - 1))


Arrays = dict[str, npt.NDArray[Any]]
HEADS, DIM = 2, 4


def computed(plan: Plan, rank: int, gather: GatherProgram, x: Arrays) -> list[npt.NDArray[Any]]:
    """Return ``(out, lse, dq, dk, dv)`` of a rank's rows, item by item; dK/dV at all keys."""
    params = Params(plan.mask, 0.5, None, 0.0, None, "float64")
    q_positions = plan.positions(rank)
    rows = QueryRows(Side(q_positions, plan.q_positions(rank), None), None, None, None)
    q, dout = x["q"][:, q_positions], x["dout"][:, q_positions]
    out, dq, lse = (
        np.zeros_like(q),
        np.zeros_like(q),
        np.full((1, HEADS, q_positions.size), -np.inf),
    )
    dk, dv = np.zeros_like(x["k"]), np.zeros_like(x["v"])
    work = [(gather.positions, item) for item in gather.items]
    work += [(plan.k_positions(rank), item) for item in gather.in_place]
    for positions, item in work:
        keys, part = positions[item.k_slice], item.q_slice
        columns, item_rows = Side(keys, keys, None), rows.take(part)
        k, v = x["k"][:, keys], x["v"][:, keys]
        out[:, part], lse[:, :, part] = forward(q[:, part], k, v, item_rows, columns, item, params)
        dead = np.isneginf(lse[:, :, part]).swapaxes(1, 2)
        out[:, part][dead] = 0
        delta = (dout[:, part] * out[:, part]).sum(-1).swapaxes(1, 2)
        grads = backward(
            dout[:, part], q[:, part], k, v, lse[:, :, part], delta, item_rows, columns, item,
            params,
        )  # fmt: skip
        dq[:, part] = grads[0]
        dk[:, keys] += grads[1]
        dv[:, keys] += grads[2]
    return [out, lse, dq, dk, dv]


def poisoned(plan: Plan, rank: int, seed: int) -> tuple[Arrays, npt.NDArray[np.bool_]]:
    """Return tensors, and a mask of the keys that no row of the rank sees: NaN or infinite."""
    rng = np.random.default_rng(seed)
    q_len, k_len = (plan.cp_size * x.local_len for x in (plan.q_layout, plan.k_layout))
    sizes = {"q": q_len, "dout": q_len, "k": k_len, "v": k_len}
    x = {name: rng.standard_normal((1, size, HEADS, DIM)) for name, size in sizes.items()}
    tokens = int(plan.q_layout.num_tokens(rank))  # a rank's padding follows its tokens
    rule = plan.mask.dense(plan.q_positions(rank)[:tokens], np.arange(plan.kv_seq_len))
    unseen = np.ones(k_len, np.bool_)
    unseen[: plan.kv_seq_len] = ~rule.any(axis=0)
    x["k"][:, unseen] = np.resize([np.nan, np.inf, -np.inf], (unseen.sum(), 1, 1))
    x["v"][:, unseen] = np.nan
    return x, unseen


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(windowed(), st.booleans())
def test_results_are_those_of_programs_without_tiles(
    case: tuple[Plan, int, int], splits: bool
) -> None:
    """Results equal those without tiles, also if keys that only fill a tile are NaN or infinite."""
    plan, tile, rank = case
    x, unseen = poisoned(plan, rank, seed=plan.seq_len)
    expected = computed(plan, rank, gather_program(plan, rank, splits=splits), x)
    actual = computed(plan, rank, gather_program(plan, rank, splits=splits, tile=tile), x)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    for grad in actual[3:]:
        assert (grad[:, unseen] == 0).all()


@given(windowed(), st.booleans(), st.booleans())
def test_tiles_cost_less_than_a_tile_for_an_item(
    case: tuple[Plan, int, int], own: bool, splits: bool
) -> None:
    """Tiles add less than a tile per item, and only where a window begins inside of one."""
    plan, tile, rank = case
    plain = gather_program(plan, rank, own=own, splits=splits)
    tiled = gather_program(plan, rank, own=own, splits=splits, tile=tile)
    assert plain.length <= tiled.length <= plain.length + (tile - 1) * len(plain.items)
    if plan.k_layout.run_length % tile:
        assert (tiled.spans, tiled.fetches) == (plain.spans, plain.fetches)
        return
    works = [(tiled.items, tiled.positions), (tiled.in_place, plan.k_positions(rank))]
    for items, positions in works:
        for item in items:
            first = int(positions[item.k_start])
            assert first % tile == 0 or item.hi != 0 or item.cu_q is not None
    if own:
        lengths = [
            gather_program(plan, n, splits=splits, tile=tile).length for n in range(plan.cp_size)
        ]
        assert longest_gather(plan, splits=splits, tile=tile).length == max(lengths)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_window_of_128_fetches_a_key_more(layout: Any) -> None:
    """A window of 128, as in gpt-oss, fetches 128 keys of each run, not the 127 that it needs."""
    setting = SHORT_SETTINGS[1]
    mask = mask_of(setting.mask, setting.seq_len)
    plan = make_plan(mask, seq_len=setting.seq_len, cp_size=4, layout=layout)
    for rank in range(4):
        plain, tiled = (gather_program(plan, rank, splits=False, tile=n) for n in (1, 128))
        sizes = [
            [
                fetch.source.stop - fetch.source.start
                for fetch in gather.fetches
                if fetch.rank != rank
            ]
            for gather in (plain, tiled)
        ]
        assert sizes == [[n] * len(sizes[0]) for n in (127, 128)]
        spans = [span for fetch in tiled.fetches for span in (fetch.source, fetch.target)]
        spans += [item.k_slice for item in tiled.items]
        assert all(span.start % 128 == span.stop % 128 == 0 for span in spans)
        assert {item.window for item in tiled.items} == {(127, 0)}


def test_what_no_window_can_hide_is_not_fetched() -> None:
    """Keys do not fill a tile if a document border, and no window, would have to hide them."""
    for mask in (Mask(cu_seqlens=(0, 13, 32)), Mask(causal=True, cu_seqlens=(0, 13, 32))):
        plan = make_plan(mask, seq_len=32, cp_size=2)
        plain, tiled = (gather_program(plan, 1, tile=n) for n in (1, 8))
        assert tiled.spans == plain.spans == ((13, 32),)


def test_runs_of_no_whole_tiles_have_none() -> None:
    """Runs that are no whole tiles are fetched without tiles: positions would not match indices."""
    plan = make_plan(Mask(causal=True, window=(5, 0)), seq_len=36, cp_size=2)
    plain, tiled = (gather_program(plan, 1, splits=False, tile=n) for n in (1, 4))
    assert plain.fetches == tiled.fetches
    assert gather_program(plan, 1, splits=False, tile=6).fetches != plain.fetches
