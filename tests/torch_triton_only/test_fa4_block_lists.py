"""The block lists of FlashAttention-4, compared with the mask element by element."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from ring_core import Mask, WorkItem, make_plan, ring_program
from ring_core.base.arguments import FULL, PARTIAL
from ring_torch.kernels.block_index import Grid, kinds_on
from ring_torch.kernels.fa4.block_lists import BlockLists, block_lists

Q_LEN, K_LEN = 420, 650
SIZES = [(128, 128), (128, 96), (128, 80), (128, 112), (128, 64)]
BANDS = {"full": (None, None), "causal": (-200, None), "window": (-30, 90)}
IDS: dict[str, Callable[[Any, int], Any]] = {
    "sorted": lambda rng, n: np.sort(rng.integers(0, 5, (2, n)), axis=1),
    "scattered": lambda rng, n: rng.integers(-1, 3, (2, n)),
    "padded": lambda _, n: np.where(np.arange(n) < n // 2, 3, -1)[None].repeat(2, axis=0),
    "alike": lambda _, n: np.full((2, n), 7),
}


def _shown(item: WorkItem, q_ids: Any, k_ids: Any) -> Any:
    apart = np.arange(Q_LEN)[:, None] - np.arange(K_LEN)
    shown = np.ones((1, Q_LEN, K_LEN), bool)
    shown &= apart >= (-9999 if item.lo is None else item.lo)
    shown &= apart <= (9999 if item.hi is None else item.hi)
    if q_ids is None:
        return shown
    return shown & (q_ids[:, :, None] == k_ids[:, None, :]) & (q_ids[:, :, None] >= 0)


def _check(lists: BlockLists, shown: Any, size: tuple[int, int], *, by_columns: bool) -> None:
    """Check that each visible pair is in a block listed once, and that full blocks are full."""
    batch, down, across = len(shown), -(-Q_LEN // size[0]), -(-K_LEN // size[1])
    outer, inner = (across, down) if by_columns else (down, across)
    for b, o in product(range(batch), range(outer)):
        listed: dict[int, bool] = {}
        for full in (False, True):
            counts, blocks = lists[2:] if full else lists[:2]
            numbers = blocks[b, o, : int(counts[b, o])].tolist()
            assert numbers == sorted(numbers)
            assert not listed.keys() & set(numbers)
            listed |= dict.fromkeys(numbers, full)
        for i in range(inner):
            row, column = (i, o) if by_columns else (o, i)
            down_slice, across_slice = (
                slice(n * s, (n + 1) * s) for n, s in zip((row, column), size, strict=True)
            )
            cells = shown[b, down_slice, across_slice]
            assert i in listed or not cells.any(), (b, o, i)
            assert not listed.get(i, False) or (cells.all() and cells.shape == size), (b, o, i)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("size", SIZES[:3])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("kind", IDS)
def test_segments(kind: str, band: Any, size: tuple[int, int], by_columns: bool) -> None:
    """Lists from segment ids are made on the device, from each block's least and largest id."""
    rng = np.random.default_rng(1)
    q_ids, k_ids = (IDS[kind](rng, n).astype(np.int32) for n in (Q_LEN, K_LEN))
    item = WorkItem(0, 0, 0, 0, Q_LEN, 0, K_LEN, *band)
    grid = Grid(*size, False, by_columns, torch.device("cpu"), None)
    lists = block_lists(item, grid, (torch.as_tensor(q_ids), torch.as_tensor(k_ids)))
    _check(lists, _shown(item, q_ids, k_ids), size, by_columns=by_columns)
    if kind == "alike":  # as good as those of the band
        kinds = kinds_on(item, grid)
        partial_counts, _, full_counts, _ = lists
        assert int(full_counts[0].sum()) == int((kinds == FULL).sum())
        assert int(partial_counts[0].sum()) == int((kinds == PARTIAL).sum())


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_predicate(size: tuple[int, int], by_columns: bool) -> None:
    """Lists of a predicate come from the plan's tiles, also if block sizes do not divide them."""

    def rule(i: Any, j: Any) -> Any:
        return (i >= j) & ((i - j < 150) | (j % 256 < 32))

    program = ring_program(
        make_plan(Mask(predicate=rule), seq_len=Q_LEN, cp_size=1, kv_seq_len=K_LEN)
    )
    (item,) = program.items(0, 0)
    grid = Grid(*size, False, by_columns, torch.device("cpu"), program.plan.blocks)
    lists = block_lists(item, grid, None)
    rows, columns = (
        program.plan.q_positions(0)[item.q_slice],
        program.plan.k_positions(0)[item.k_slice],
    )
    shown = np.zeros((1, Q_LEN, K_LEN), bool)
    shown[0, : len(rows), : len(columns)] = rule(rows[:, None], columns)
    assert (len(rows), len(columns)) == (Q_LEN, K_LEN)
    _check(lists, shown, size, by_columns=by_columns)
