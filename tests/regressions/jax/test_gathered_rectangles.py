"""Tables of gathered keys: touching rectangles are joined, and visible pairs stay the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ring_core import LayoutSpec, Mask, RingProgram, make_plan, ring_program
from ring_core.programs.ring import TABLE_COLUMNS
from ring_jax.rank_view import remote_table, step_table

LOCAL = 12
MASKS = {
    "full": Mask(), "causal": Mask(causal=True), "window": Mask(causal=True, window=(17, 0)),
    "two-sided window": Mask(window=(9, 30)), "chunks": Mask(causal=True, chunk_size=18),
    "documents": Mask(cu_seqlens=(0, 7, 31, 48)),
}  # fmt: skip
LAYOUTS: tuple[LayoutSpec, ...] = ("contiguous", "zigzag", "striped")


def _seen(rows: npt.NDArray[np.int32], shift: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how often a rank's table shows each pair of its queries and all keys, ``[T, S]``."""
    visible = np.zeros((LOCAL, 4 * LOCAL), dtype=np.int64)
    i, j = np.ogrid[: visible.shape[0], : visible.shape[1]]
    for row, before in zip(rows.tolist(), shift.tolist(), strict=True):
        columns = dict(zip(TABLE_COLUMNS, row, strict=True))
        k = j - before - columns["k_start"]
        inside = (columns["q_start"] <= i) & (i < columns["q_stop"])
        inside = inside & (k >= 0) & (k < columns["k_stop"] - columns["k_start"])
        band = (columns["lo"] <= i - columns["q_start"] - k) & (
            i - columns["q_start"] - k <= columns["hi"]
        )
        visible += inside & band
    return visible


def _one_by_one(program: RingProgram, rank: int) -> npt.NDArray[np.int64]:
    visible = np.zeros((LOCAL, 4 * LOCAL), dtype=np.int64)
    for n, step in enumerate(program.steps):
        if step.shift:
            rows = step_table(program, n).own[rank]
            visible += _seen(rows, rows[:, TABLE_COLUMNS.index("kv_rank")].astype(np.int64) * LOCAL)
    return visible


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_joined_rectangles_show_the_same_pairs(name: str, layout: LayoutSpec) -> None:
    program = ring_program(make_plan(MASKS[name], seq_len=4 * LOCAL, cp_size=4, layout=layout))
    others = remote_table(program)
    assert others is not None
    for rank in range(4):
        rows = others.own[rank]
        pairs = _seen(rows, np.zeros(len(rows), dtype=np.int64))
        np.testing.assert_array_equal(pairs, _one_by_one(program, rank))


@pytest.mark.parametrize(
    ("name", "layout", "most"),
    [("causal", "contiguous", 1), ("full", "contiguous", 2), ("full", "zigzag", 2)],
)
def test_rectangles_that_touch_are_one(name: str, layout: LayoutSpec, most: int) -> None:
    program = ring_program(make_plan(MASKS[name], seq_len=64 * LOCAL, cp_size=64, layout=layout))
    others = remote_table(program)
    assert others is not None
    assert others.own.shape[1] <= most
