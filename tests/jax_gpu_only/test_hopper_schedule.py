"""Schedules of the Hopper kernels: who computes which tile, and which blocks of it are visited.

Their device functions run as Python here, one program at a time.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from triton.experimental.gluon import language as gl

from ring_core import Mask, balanced_layout, make_plan
from ring_core.layouts.layout import LayoutName
from ring_core.plan.item import WorkItem
from ring_core.programs.ring import TABLE_UNBOUNDED
from ring_jax.records import Item
from ring_jax_gpu.block_index import segment_cells
from ring_jax_gpu.hopper import backward, common, forward, run, stream_k as schedules
from ring_jax_gpu.hopper.common import Sizes

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Pointer:
    """Pointer to memory that a kernel loads, by scalars or vectors."""

    def __init__(self, numbers: Any, offset: Any = 0) -> None:
        self.numbers, self.offset = np.ravel(numbers), offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.numbers, self.offset + more)

    def load(self, mask: Any = True, other: int = 0) -> Any:
        """Load where the mask is True; an address out of bounds is an error."""
        wanted = np.where(mask, self.offset, 0)
        assert ((wanted >= 0) & (wanted < self.numbers.size)).all()
        return np.where(mask, self.numbers[wanted], other)[()]


def as_python(module: Any, patched: pytest.MonkeyPatch) -> Any:
    """Return a module of kernels, whose functions run as Python."""
    for name, x in vars(module).copy().items():
        if hasattr(x, "fn"):
            patched.setattr(module, name, x.fn)
        elif isinstance(x, gl.constexpr):
            patched.setattr(module, name, x.value)
    functions = {"minimum": np.minimum, "maximum": np.maximum, "where": np.where}
    patched.setattr(module, "gl", SimpleNamespace(load=Pointer.load, **functions))
    return module


BATCH, HEADS, GROUP = 2, 4, 2
LENGTHS = (1000, 5000)  # of queries and keys
BOUNDS = {
    "all": (0, 1000, 0, 5000), "first-keys": (0, 1000, 0, 2500), "last-queries": (500, 1000, 0, 5000),
    "inside": (300, 700, 200, 4000), "nothing": (0, 0, 0, 0),
}  # fmt: skip
SEEN = {name: Item(*x, -TABLE_UNBOUNDED, TABLE_UNBOUNDED) for name, x in BOUNDS.items()}


def seen_by_tiles(outer: tuple[int, int], inner: tuple[int, int]) -> Any:
    """Return a stand-in for the kernels' ``visited``: the blocks that an outer tile sees."""

    def visited(_i: Any, _n: Any, start: int, stop: int, size: int, **_: Any) -> tuple[int, ...]:
        if max(start, outer[0]) >= min(stop, outer[1]):
            return 0, 0, 0, 0
        first, last = inner
        return first // size, -(-first // size), last // size, -(-last // size)

    return visited


@pytest.mark.parametrize("heads_per_swizzle", [1, 2, 8])
@pytest.mark.parametrize("programs", [3, 7, 30, 132])
@pytest.mark.parametrize("name", SEEN)
def test_all_is_done_once(
    name: str, programs: int, heads_per_swizzle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SEEN[name]
    stream_k = schedules.forward_schedule(seen, BATCH * HEADS, programs)
    assert stream_k.split > 0 or programs == 132 or name == "nothing"
    kernel = as_python(forward, monkeypatch)
    visited = seen_by_tiles((seen.q_start, seen.q_stop), (seen.k_start, seen.k_stop))
    monkeypatch.setattr(kernel, "visited", visited)
    consts = SimpleNamespace(STREAM_K=True, BLOCK=128)
    sizes = Sizes(*LENGTHS, BATCH, HEADS, GROUP, heads_per_swizzle, Pointer(stream_k))
    rows, heads = range(-(-LENGTHS[0] // 128)), range(BATCH * HEADS)
    done: list[tuple[int, int, int]] = []
    first: list[tuple[int, int]] = []
    parts: Counter[int] = Counter()
    for tile_id in range(len(rows) * len(heads) + stream_k.split * (stream_k.each - 1)):
        block, head, part, split_index = kernel.decode_tile(tile_id, sizes, consts)
        row = (block * 128, min(block * 128 + 128, LENGTHS[0]))
        low, whole_low, whole_high, high = kernel.seen_in_part(
            None, 0, *row, part, split_index, sizes, consts
        )
        assert low <= whole_low <= whole_high <= high
        done += [(block, head, i) for i in range(low, high)]
        first += [(block, head)] if part == 0 else []
        parts[int(split_index)] += split_index >= 0
    blocks = {row: visited(None, 0, row * 128, row * 128 + 128, 128) for row in rows}
    assert sorted(done) == [
        (b, h, i) for b, x in blocks.items() for h in heads for i in range(x[0], x[3])
    ]
    assert sorted(first) == list(product(rows, heads))
    assert +parts == Counter(dict.fromkeys(range(stream_k.split), stream_k.each))


@pytest.mark.parametrize("heads_per_swizzle", [1, 2, 4])
@pytest.mark.parametrize("programs", [3, 7, 13, 30, 132])
@pytest.mark.parametrize("name", SEEN)
def test_all_is_done_once_backwards(
    name: str, programs: int, heads_per_swizzle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, heads = SEEN[name], range(BATCH * HEADS // GROUP)
    stream_k = schedules.backward_schedule(seen, len(heads), GROUP, programs)
    assert stream_k.split > 0 or name != "all"
    kernel = as_python(backward, monkeypatch)
    visited = seen_by_tiles((seen.k_start, seen.k_stop), (seen.q_start, seen.q_stop))
    monkeypatch.setattr(kernel, "visited", visited)
    consts = SimpleNamespace(STREAM_K=True, BLOCK=64)
    sizes = Sizes(*LENGTHS, BATCH, HEADS, GROUP, heads_per_swizzle, Pointer(stream_k))
    columns = range(-(-LENGTHS[1] // 128))
    whole, split, _, helpers = kernel.stream_k_of(sizes)
    done: list[tuple[int, int, int, int]] = []
    first: list[tuple[int, int]] = []
    parts: Counter[int] = Counter()
    # Five more, as another rank may have more helpers.
    for program in range(len(columns) * len(heads) + helpers + 5):
        kernel.gl.program_id = dict.fromkeys([0], program).get
        tile, pieces, *work = kernel.work_of(sizes, consts)
        for n in range(pieces):
            block, head, part, part_stop = kernel.piece_of(n, tile, *work, sizes, consts)
            for member in range(GROUP):
                bounds = kernel.seen_in_part(
                    None, 0, block * 128, part, part_stop, member, sizes, consts
                )
                low, whole_low, whole_high, high = bounds
                assert low <= whole_low <= whole_high <= high
                # Behind the last keys lie those of the next batch row, which the mask has to hide.
                assert whole_high == whole_low or block * 128 + 128 <= LENGTHS[1]
                turn = kernel.turn_of(block, whole_low, whole_high, consts)
                fetched = [kernel.nth_block(i, *bounds, turn) for i in range(high - low)]
                # The consumers compute them in the order in which the producer fetches them.
                num_whole = whole_high - whole_low
                partial = [kernel.nth_block(i, *bounds, 0) for i in range(high - low - num_whole)]
                turned = [kernel.turned(i, *bounds[1:3], turn) for i in range(num_whole)]
                assert fetched == [*partial, *turned]
                done += [(block, head, member, i) for i in fetched]
            is_split = whole <= tile + n < whole + split
            first += [] if program >= whole + split and is_split else [(block, head)]
            parts[int(tile + n - whole)] += is_split
    blocks = {x: visited(None, 0, x * 128, x * 128 + 128, 64) for x in columns}
    assert sorted(done) == [
        (b, h, m, i)
        for (b, x), h, m in product(blocks.items(), heads, range(GROUP))
        for i in range(x[0], x[3])
    ]
    assert sorted(first) == list(product(columns, heads))
    assert +parts == Counter({n: kernel.parts_of(n, sizes) for n in range(split)})


@pytest.mark.parametrize("programs", [1, 5, 78, 132])
def test_split_tiles_take_less_time_than_whole_ones(programs: int) -> None:
    """Also, who helps in the backward has as much to do as who is helped."""
    for tiles, length in product(range(1, 3 * programs), (1, 4, 12, 33, 256, 512)):
        split, own, each = schedules.split_tiles(tiles, length, programs)
        if split > 0:
            assert split == tiles % programs and each > 1 and 0 < own < length
            rounds = -(-split * (each - 1) // (programs - split))
            assert max(own, rounds * -(-(length - own) // (each - 1))) < length
        split, own, helpers = schedules.split_tiles_backward(tiles, length, programs)
        if split > 0:
            assert split == tiles % programs and split + helpers <= programs and 0 < own < length
            helped = split * (length - own) / helpers
            assert helped <= own <= helped + 5 * (split / helpers + 1)


def test_even_queries_come_first_and_leave_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = as_python(backward, monkeypatch)
    consts = SimpleNamespace(BLOCK=64, D=1)
    tokens = np.arange(150)
    fetched = run._row_tiles(jnp.asarray(tokens)[None, None], 64).array
    order = np.asarray(fetched).reshape(3, 64)[1]
    offsets = [kernel.offset_of(row, consts) for row in range(64)]
    assert order.tolist() == [64 + offset for offset in offsets] != sorted(order)

    def rows_of(x: Any) -> Any:
        """Stand in for the rows of a matrix product in registers."""
        return SimpleNamespace(
            rows=x, reshape=lambda shape: rows_of(x.reshape(shape)),
            permute=lambda dims: rows_of(x.transpose(dims)),
        )  # fmt: skip

    stored = kernel.in_order(rows_of(order[:, None]), consts).rows
    assert stored.ravel().tolist() == tokens[64:128].tolist()


FAR = 1 << 29
#: Documents that end within blocks, at their edges, and before a token.
DOCUMENTS = (0, 1, 40, 128, 129, 150, 256, 300, 301, 470, 512, 700)


def random_documents(seed: int) -> Mask:
    """Return a mask of random documents, for odd seeds with a window."""
    rng = np.random.default_rng(seed)
    ends = np.unique(rng.integers(1, 700, rng.integers(1, 30))).tolist()
    window = (int(rng.integers(0, 200)), int(rng.integers(0, 200))) if seed % 2 else None
    return Mask(window=window, cu_seqlens=(0, *ends, 700))


CAUSAL = Mask(causal=True, cu_seqlens=DOCUMENTS)
MASKS = {
    "causal": CAUSAL, "full": Mask(cu_seqlens=DOCUMENTS),
    "window": Mask(causal=True, window=(30, 0), cu_seqlens=DOCUMENTS),
    "window-both": Mask(window=(20, 90), cu_seqlens=DOCUMENTS),
    "chunks": Mask(causal=True, chunk_size=90, cu_seqlens=(0, 333, 700)),
    **{f"random-{n}": random_documents(n) for n in range(4)},
}  # fmt: skip
PLANS = {
    f"{name}-{layout}": make_plan(mask, seq_len=700, pad_to=720, cp_size=2, layout=layout)
    for (name, mask), layout in product(MASKS.items(), get_args(LayoutName))
}
BALANCED = balanced_layout(CAUSAL, seq_len=700, cp_size=2)
PLANS["causal-balanced"] = make_plan(CAUSAL, seq_len=700, cp_size=2, layout=BALANCED)
PLANS["causal-alone"] = make_plan(CAUSAL, seq_len=700, cp_size=1)


def bounds_of(item: WorkItem) -> tuple[int, ...]:
    """Return the numbers of an item in the order in which a kernel reads them."""
    lo, hi = (-FAR if item.lo is None else item.lo), (FAR if item.hi is None else item.hi)
    return item.q_start, item.q_stop, item.k_start, item.k_stop, lo, hi


def shown(item: WorkItem, q_cells: Ints, k_cells: Ints) -> Flags:
    """Return the dense mask of an item, ``[queries, keys]``, with documents' numbers."""
    i, j = np.arange(q_cells.size)[:, None], np.arange(k_cells.size)[None]
    inside = (i >= item.q_start) & (i < item.q_stop) & (j >= item.k_start) & (j < item.k_stop)
    distance = (i - item.q_start) - (j - item.k_start)
    lo, hi = bounds_of(item)[4:]
    same: Flags = q_cells[:, None] == k_cells[None]
    return same & inside & (distance >= lo) & (distance <= hi)


@pytest.mark.parametrize("rows_outside", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize("name", PLANS)
def test_visited_blocks(name: str, rows_outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a kernel sees and visits with packed documents are those of a dense mask."""
    plan, several, kernel = PLANS[name], 0, as_python(common, monkeypatch)
    assert plan.boundaries is not None
    for q_rank, kv_rank in product(range(plan.cp_size), repeat=2):
        positions = plan.positions(q_rank), plan.k_positions(kv_rank)
        q_cells, k_cells = (np.searchsorted(plan.boundaries, x, "right") for x in positions)
        outer, inner = (q_cells, k_cells) if rows_outside else (k_cells, q_cells)
        ranges = np.stack([np.searchsorted(inner, outer, side) for side in ("left", "right")])
        assert (np.diff(ranges) >= 0).all()
        items = plan.items(q_rank, kv_rank)
        # The last item is empty, as on ranks with fewer items than others.
        bounds = np.array([*map(bounds_of, items), (0,) * 6])
        bands = kernel.Bands(Pointer(bounds), Pointer(ranges), outer.size, 0)
        dense = [shown(item, q_cells, k_cells) for item in items]
        dense.append(np.zeros((q_cells.size, k_cells.size), bool))
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
            last = [np.argsort(x == least, axis=1, kind="stable") for x in sides]
            sides = [np.take_along_axis(x, n, axis=1) for x, n in zip(sides, last, strict=True)]
        outer, inner = sides
        cells, ascend = map(np.asarray, jax.jit(segment_cells)(*map(jnp.asarray, sides)))
        first, stop = cells.swapaxes(0, 1)
        keys = np.arange(lengths[1])
        seen = (keys >= first[..., None]) & (keys < stop[..., None])
        if order == "scattered" and not ascend:  # then plain Triton runs
            continue
        assert ascend
        assert (np.diff(first) >= 0).all() and (np.diff(stop) >= 0).all()
        equal = (outer[:, :, None] == inner[:, None]) & (outer[:, :, None] >= 0)
        np.testing.assert_array_equal(seen, equal)
