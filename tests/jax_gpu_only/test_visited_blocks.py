"""Blocks that the Hopper kernels visit with packed documents agree with a dense mask."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from triton.experimental.gluon import language as gl

from ring_core import Mask, Plan, balanced_layout, make_plan
from ring_core.layouts.layout import LayoutName
from ring_core.plan.item import WorkItem
from ring_jax_gpu.block_index import segment_cells
from ring_jax_gpu.hopper import common

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
FAR = 1 << 29
#: Documents that end within blocks, at their edges, and before a token.
DOCUMENTS = (0, 1, 40, 128, 129, 150, 256, 300, 301, 470, 512, 700)


def random_documents(seed: int) -> Mask:
    """Return a mask of random documents, for odd seeds with a window."""
    rng = np.random.default_rng(seed)
    ends = np.unique(rng.integers(1, 700, rng.integers(1, 30))).tolist()
    window = (int(rng.integers(0, 200)), int(rng.integers(0, 200))) if seed % 2 else None
    return Mask(window=window, cu_seqlens=(0, *ends, 700))


MASKS = {
    "causal": Mask(causal=True, cu_seqlens=DOCUMENTS),
    "full": Mask(cu_seqlens=DOCUMENTS),
    "window": Mask(causal=True, window=(30, 0), cu_seqlens=DOCUMENTS),
    "window-both": Mask(window=(20, 90), cu_seqlens=DOCUMENTS),
    "chunks": Mask(causal=True, chunk_size=90, cu_seqlens=(0, 333, 700)),
    **{f"random-{n}": random_documents(n) for n in range(4)},
}
PLANS = {
    **{f"{name}-alone": make_plan(mask, seq_len=700, cp_size=1) for name, mask in MASKS.items()},
    **{
        f"{name}-{layout}": make_plan(mask, seq_len=700, pad_to=720, cp_size=2, layout=layout)
        for name, mask in MASKS.items()
        for layout in get_args(LayoutName)
    },
    "causal-balanced": make_plan(
        MASKS["causal"],
        seq_len=700,
        cp_size=2,
        layout=balanced_layout(MASKS["causal"], seq_len=700, cp_size=2),
    ),
}


class Pointer:
    """Pointer to memory that a kernel loads, by scalars or vectors."""

    def __init__(self, numbers: Ints, offset: Any = 0) -> None:
        self.numbers, self.offset = numbers.reshape(-1), offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.numbers, self.offset + more)

    def load(self, mask: Any = True, other: int = 0) -> Any:
        """Load where the mask is True; an address out of bounds is an error."""
        wanted = np.where(mask, self.offset, 0)
        assert ((wanted >= 0) & (wanted < self.numbers.size)).all()
        return np.where(mask, self.numbers[wanted], other)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the kernels' module with its functions running as Python."""
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
    """Return the document numbers of one rank's queries and another's keys."""
    assert plan.boundaries is not None
    positions = plan.positions(q_rank), plan.k_positions(kv_rank)
    q_cells, k_cells = (np.searchsorted(plan.boundaries, x, "right") for x in positions)
    return q_cells, k_cells


def shown(item: WorkItem, q_cells: Ints, k_cells: Ints) -> Flags:
    """Return the dense mask of an item, ``[queries, keys]``."""
    i, j = np.arange(q_cells.size)[:, None], np.arange(k_cells.size)[None]
    inside = (i >= item.q_start) & (i < item.q_stop) & (j >= item.k_start) & (j < item.k_stop)
    distance = (i - item.q_start) - (j - item.k_start)
    lo, hi = bounds_of(item)[4:]
    inside &= (distance >= lo) & (distance <= hi)
    visible: Flags = inside & (q_cells[:, None] == k_cells[None])
    return visible


def bounds_of(item: WorkItem) -> tuple[int, ...]:
    """Return the numbers of an item in the order in which a kernel reads them."""
    lo, hi = (-FAR if item.lo is None else item.lo), (FAR if item.hi is None else item.hi)
    return item.q_start, item.q_stop, item.k_start, item.k_stop, lo, hi


@pytest.mark.parametrize("rows_outside", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize("name", PLANS)
def test_against_a_dense_mask(name: str, rows_outside: bool, kernel: Any) -> None:
    plan, several = PLANS[name], 0
    for q_rank, kv_rank in product(range(plan.cp_size), repeat=2):
        cells = cells_of(plan, q_rank, kv_rank)
        outer, inner = cells if rows_outside else cells[::-1]
        ranges = np.stack([np.searchsorted(inner, outer, side) for side in ("left", "right")])
        assert (np.diff(ranges) >= 0).all()
        items = plan.items(q_rank, kv_rank)
        # The last item is empty, as on ranks with fewer items than others.
        bounds = np.array([*map(bounds_of, items), (0,) * 6])
        bands = kernel.Bands(Pointer(bounds), Pointer(ranges), outer.size, 0)
        dense = [shown(item, *cells) for item in items]
        dense.append(np.zeros((cells[0].size, cells[1].size), bool))
        for n, mask in enumerate(dense):
            check_item(kernel, bands, n, mask if rows_outside else mask.T, rows_outside)
        several += sum(item.cu_q is not None for item in items)
    assert several > 0


def check_item(kernel: Any, bands: Any, n: int, dense: Flags, rows_outside: bool) -> None:
    """Check what a kernel sees and visits of an item with the mask ``dense [outer, inner]``."""
    (outer_len, inner_len), size = dense.shape, 128 if rows_outside else 64
    inner = np.arange(inner_len)
    for start in range(0, outer_len, 128):
        stop = min(start + 128, outer_len)
        expected = dense[start:stop]
        # Tokens of the last block beyond the end see nothing.
        first, last = kernel.seen_by(bands, n, start + np.arange(128), ROWS_OUTSIDE=rows_outside)
        seen = (inner >= first[:, None]) & (inner < last[:, None])
        np.testing.assert_array_equal(seen[: stop - start], expected)
        assert not seen[stop - start :].any()
        blocks = kernel.visited(bands, n, start, stop, BLOCK=size, ROWS_OUTSIDE=rows_outside)
        low, whole_low, whole_high, high = map(int, blocks)
        assert 0 <= low <= whole_low <= whole_high <= high <= -(-inner_len // size)
        some, whole = expected.any(axis=0), expected.all(axis=0)
        if some.any():  # if nothing is visible, visiting nothing is right, too
            assert low == np.flatnonzero(some)[0] // size
            assert high == np.flatnonzero(some)[-1] // size + 1
        full = whole[: inner_len // size * size].reshape(-1, size).all(axis=1)
        assert [*np.flatnonzero(full)] == [*range(whole_low, whole_high)]


@pytest.mark.parametrize("order", ["ascending", "negative-last", "zero-last", "scattered"])
def test_segments_as_documents(order: str) -> None:
    rng = np.random.default_rng(len(order))
    for lengths in product((1, 7, 40), repeat=2):
        least = {"ascending": 0, "negative-last": -1}.get(order, 0)
        sides = [np.sort(rng.integers(least, 6, (2, n)), axis=1).astype(np.int32) for n in lengths]
        if order == "scattered":
            sides = [rng.permuted(x, axis=1) for x in sides]
        elif order != "ascending":  # the least number comes last
            sides = [
                np.take_along_axis(x, np.argsort(x == least, axis=1, kind="stable"), axis=1)
                for x in sides
            ]
        outer, inner = sides
        (first, stop), ascend = (np.asarray(x) for x in _segment_cells(outer, inner))
        keys = np.arange(lengths[1])
        seen = (keys >= first[..., None]) & (keys < stop[..., None])
        if order != "scattered" or ascend[0]:
            assert ascend[0]
            assert (np.diff(first) >= 0).all()
            assert (np.diff(stop) >= 0).all()
            equal = (outer[:, :, None] == inner[:, None]) & (outer[:, :, None] >= 0)
            np.testing.assert_array_equal(seen, equal)
        else:
            assert not seen.any()


def _segment_cells(outer: Any, inner: Any) -> tuple[Any, Any]:
    cells, ascend = jax.jit(segment_cells)(jnp.asarray(outer), jnp.asarray(inner))
    return cells.swapaxes(0, 1), ascend
