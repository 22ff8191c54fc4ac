"""The blocks that the kernels for Hopper visit for a plan with documents, against a dense mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from triton.experimental.gluon import language as gl

from ring_core import Mask, Plan, balanced_layout, make_plan
from ring_core.plan.plan import WorkItem
from ring_jax_gpu.hopper import common

Ints = npt.NDArray[np.int64]
FAR = 1 << 29
#: Documents that end within blocks, at their edges, and before a token.
DOCUMENTS = (0, 1, 40, 128, 129, 150, 256, 300, 301, 470, 512, 700)
MASKS = {
    "causal": Mask(causal=True, cu_seqlens=DOCUMENTS),
    "full": Mask(cu_seqlens=DOCUMENTS),
    "window": Mask(causal=True, window=(30, 0), cu_seqlens=DOCUMENTS),
    "window-both": Mask(window=(20, 90), cu_seqlens=DOCUMENTS),
    "chunks": Mask(causal=True, chunk_size=90, cu_seqlens=(0, 333, 700)),
}
PLANS = {
    **{f"{name}-alone": make_plan(mask, seq_len=700, cp_size=1) for name, mask in MASKS.items()},
    **{
        f"{name}-{layout}": make_plan(mask, seq_len=700, pad_to=720, cp_size=2, layout=layout)
        for name, mask in MASKS.items()
        for layout in ("contiguous", "zigzag", "striped")
    },
    "causal-balanced": make_plan(
        MASKS["causal"],
        seq_len=700,
        cp_size=2,
        layout=balanced_layout(MASKS["causal"], seq_len=700, cp_size=2),
    ),
}


class Pointer:
    """Memory that a kernel reads, one number or several at once."""

    def __init__(self, numbers: Ints, offset: Any = 0) -> None:
        self.numbers, self.offset = numbers.reshape(-1), offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.numbers, self.offset + more)

    def load(self, mask: Any = True, other: int = 0) -> Any:
        """Read where the mask says so; what is beyond the memory is an error."""
        wanted = np.where(mask, self.offset, 0)
        assert ((wanted >= 0) & (wanted < self.numbers.size)).all()
        return np.where(mask, self.numbers[wanted], other)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels' functions, run as Python."""
    for name in ("sides_of", "document_of", "visited", "seen_by"):
        monkeypatch.setattr(common, name, getattr(common, name).fn)
    for name, x in vars(common).copy().items():
        if isinstance(x, gl.constexpr):
            monkeypatch.setattr(common, name, x.value)
    functions = SimpleNamespace(
        load=Pointer.load, minimum=np.minimum, maximum=np.maximum, where=np.where
    )
    monkeypatch.setattr(common, "gl", functions)
    return common


def cells_of(plan: Plan, q_rank: int, kv_rank: int) -> tuple[Ints, Ints]:
    """The documents of a rank's queries and of another's keys."""
    assert plan.boundaries is not None
    positions = plan.positions(q_rank), plan.k_positions(kv_rank)
    q_cells, k_cells = (np.searchsorted(plan.boundaries, x, "right") for x in positions)
    return q_cells, k_cells


def shown(item: WorkItem, q_cells: Ints, k_cells: Ints) -> npt.NDArray[np.bool_]:
    """The dense mask of an item, ``[queries, keys]``."""
    i, j = np.arange(q_cells.size)[:, None], np.arange(k_cells.size)[None]
    inside = (i >= item.q_start) & (i < item.q_stop) & (j >= item.k_start) & (j < item.k_stop)
    distance = (i - item.q_start) - (j - item.k_start)
    lo, hi = (-FAR if item.lo is None else item.lo), (FAR if item.hi is None else item.hi)
    inside &= (distance >= lo) & (distance <= hi)
    return inside & (q_cells[:, None] == k_cells[None])


@pytest.mark.parametrize("rows_outside", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize("name", PLANS)
def test_against_a_dense_mask(name: str, rows_outside: bool, kernel: Any) -> None:
    """Blocks seen whole are visited without a mask, all that are seen are visited."""
    plan, outer_size, inner_size = PLANS[name], 128, 128 if rows_outside else 64
    several = 0
    for q_rank in range(plan.cp_size):
        for kv_rank in range(plan.cp_size):
            cells = cells_of(plan, q_rank, kv_rank)
            outer_cells, inner_cells = cells if rows_outside else cells[::-1]
            assert (np.diff(outer_cells) >= 0).all()
            ends = [np.searchsorted(inner_cells, outer_cells, x) for x in ("left", "right")]
            items = plan.items(q_rank, kv_rank)
            bounds = [
                (
                    x.q_start,
                    x.q_stop,
                    x.k_start,
                    x.k_stop,
                    -FAR if x.lo is None else x.lo,
                    FAR if x.hi is None else x.hi,
                )
                for x in items
            ]
            rows = np.array([*bounds, (0,) * 6])  # an item of no queries, as short ranks have
            bands = kernel.Bands(Pointer(rows), Pointer(np.stack(ends)), outer_cells.size)
            outer_len, inner_len = outer_cells.size, inner_cells.size
            inner = np.arange(inner_len)
            for n, item in enumerate([*items, None]):
                dense = np.zeros((outer_len, inner_len), bool)
                if item is not None:
                    several += item.cu_q is not None
                    of_item = shown(item, *cells)
                    dense = of_item if rows_outside else of_item.T
                for start in range(0, outer_len, outer_size):
                    stop = min(start + outer_size, outer_len)
                    # A block beyond the end has tokens that are none, and see nothing.
                    tokens = np.arange(start, start + outer_size)
                    first, last = kernel.seen_by(bands, n, tokens, ROWS_OUTSIDE=rows_outside)
                    seen = (inner >= first[:, None]) & (inner < last[:, None])
                    expected = dense[start:stop]
                    np.testing.assert_array_equal(seen[: stop - start], expected)
                    assert not seen[stop - start :].any()
                    blocks = kernel.visited(
                        bands, n, start, stop, BLOCK=inner_size, ROWS_OUTSIDE=rows_outside
                    )
                    low, whole_low, whole_high, high = map(int, blocks)
                    assert (
                        0 <= low <= whole_low <= whole_high <= high <= -(-inner_len // inner_size)
                    )
                    columns = np.flatnonzero(expected.any(axis=0))
                    if columns.size:
                        assert low == columns[0] // inner_size
                        assert high == columns[-1] // inner_size + 1
                    whole = expected.all(axis=0)
                    full = [
                        x
                        for x in range(inner_len // inner_size)
                        if whole[x * inner_size : (x + 1) * inner_size].all()
                    ]
                    assert full == [*range(whole_low, whole_high)]
    assert several > 0
