"""Stream-K schedules of the Hopper kernels: tiles of the last round are split among programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from triton.experimental.gluon import language as gl

from ring_core.programs.ring import TABLE_UNBOUNDED
from ring_jax.records import Item
from ring_jax_gpu.hopper import backward, forward, run
from ring_jax_gpu.hopper.common import Sizes
from ring_jax_gpu.hopper.stream_k import (
    backward_schedule,
    forward_schedule,
    split_tiles,
    split_tiles_backward,
)

PROGRAMS = 132
BATCH, HEADS, GROUP = 2, 4, 2
LENGTHS = (1000, 5000)  # of queries and keys
FULL = (-TABLE_UNBOUNDED, TABLE_UNBOUNDED)
SEEN = {
    "all": Item(0, 1000, 0, 5000, *FULL),
    "first-keys": Item(0, 1000, 0, 2500, *FULL),
    "last-queries": Item(500, 1000, 0, 5000, *FULL),
    "inside": Item(300, 700, 200, 4000, *FULL),
    "nothing": Item(0, 0, 0, 0, *FULL),
}


#: Functions by which programs find their share of the work.
NAMES = (
    "decode_tile", "seen_in_part", "work_of", "piece_of", "stream_k_of", "keys_of",
    "swizzled_block_and_head", "parts_of", "turn_of", "turned", "nth_block",
)  # fmt: skip


@dataclass(frozen=True)
class Pointer:
    """Pointer to scalars that a kernel loads."""

    numbers: tuple[int, ...]
    at: int = 0

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.numbers, self.at + more)


def as_python(module: Any, patched: pytest.MonkeyPatch, seen: Any) -> None:
    """Run the scheduling functions of a kernel as Python, one program at a time."""
    for name in NAMES:
        if hasattr(module, name):
            patched.setattr(module, name, getattr(module, name).fn)
    constants = {name: x.value for name, x in vars(module).items() if isinstance(x, gl.constexpr)}
    for name, value in constants.items():
        patched.setattr(module, name, value)
    patched.setattr(module, "visited", seen)
    numbers = {
        "load": lambda pointer: pointer.numbers[pointer.at], "minimum": min, "maximum": max,
        "where": lambda yes, a, b: a if yes else b,
    }  # fmt: skip
    patched.setattr(module, "gl", SimpleNamespace(**numbers))


def seen_by_tiles(outer: tuple[int, int], inner: tuple[int, int]) -> Callable[..., Any]:
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
    stream_k = forward_schedule(seen, BATCH * HEADS, programs)
    assert stream_k.split > 0 or programs == 132 or name == "nothing"
    visited = seen_by_tiles((seen.q_start, seen.q_stop), (seen.k_start, seen.k_stop))
    as_python(forward, monkeypatch, visited)
    kernel: Any = forward
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
        parts[split_index] += split_index >= 0
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
    stream_k = backward_schedule(seen, len(heads), GROUP, programs)
    assert stream_k.split > 0 or name != "all"
    visited = seen_by_tiles((seen.k_start, seen.k_stop), (seen.q_start, seen.q_stop))
    as_python(backward, monkeypatch, visited)
    kernel: Any = backward
    consts = SimpleNamespace(STREAM_K=True, BLOCK=64)
    sizes = Sizes(*LENGTHS, BATCH, HEADS, GROUP, heads_per_swizzle, Pointer(stream_k))
    columns = range(-(-LENGTHS[1] // 128))
    whole, split, _, helpers = kernel.stream_k_of(sizes)
    done: list[tuple[int, int, int, int]] = []
    first: list[tuple[int, int]] = []
    parts: Counter[int] = Counter()
    launched = len(columns) * len(heads) + helpers + 5  # another rank may have more helpers
    for program in range(launched):
        kernel.gl.program_id = dict.fromkeys([0], program).get
        tile, pieces, *work = kernel.work_of(sizes, consts)
        for n in range(pieces):
            block, head, part, part_stop = kernel.piece_of(n, tile, *work, sizes, consts)
            for member in range(GROUP):
                low, whole_low, whole_high, high = kernel.seen_in_part(
                    None, 0, block * 128, part, part_stop, member, sizes, consts
                )
                assert low <= whole_low <= whole_high <= high
                # Behind the last keys lie those of the next batch row, which the mask has to hide.
                assert whole_high == whole_low or block * 128 + 128 <= LENGTHS[1]
                turn, whole_blocks = (
                    kernel.turn_of(block, whole_low, whole_high, consts), whole_high - whole_low
                )  # fmt: skip
                bounds = (low, whole_low, whole_high, high)
                fetched = [kernel.nth_block(i, *bounds, turn) for i in range(high - low)]
                # The consumers compute them in the order in which the producer fetches them.
                partial = (
                    kernel.nth_block(i, *bounds, 0) for i in range(high - low - whole_blocks)
                )
                turned = (kernel.turned(i, *bounds[1:3], turn) for i in range(whole_blocks))
                assert fetched == [*partial, *turned]
                done += [(block, head, member, i) for i in fetched]
            is_helped = program >= whole + split and whole <= tile + n < whole + split
            first += [] if is_helped else [(block, head)]
            parts[tile + n - whole] += whole <= tile + n < whole + split
    blocks = {x: visited(None, 0, x * 128, x * 128 + 128, 64) for x in columns}
    assert sorted(done) == [
        (b, h, m, i)
        for (b, x), h, m in product(blocks.items(), heads, range(GROUP))
        for i in range(x[0], x[3])
    ]
    assert sorted(first) == list(product(columns, heads))
    assert +parts == Counter(
        {split_index: kernel.parts_of(split_index, sizes) for split_index in range(split)}
    )


@dataclass(frozen=True)
class Registers:
    """Stand-in for the rows of a matrix product in registers."""

    rows: np.ndarray[Any, Any]

    def reshape(self, shape: list[int]) -> Registers:
        return Registers(self.rows.reshape(shape))

    def permute(self, dims: tuple[int, ...]) -> Registers:
        return Registers(self.rows.transpose(dims))


def test_even_queries_come_first_and_leave_in_order() -> None:
    kernel: Any = backward
    consts = SimpleNamespace(BLOCK=64, D=1)
    tokens = np.arange(150)
    fetched = run._row_tiles(jnp.asarray(tokens)[None, None], 64).array
    places = np.asarray(fetched).reshape(3, 64)
    offsets = [kernel.offset_of.fn(place, consts) for place in range(64)]
    assert places[1].tolist() == [64 + offset for offset in offsets] != sorted(places[1])
    stored = kernel.in_order.fn(Registers(places[1][:, None]), consts).rows
    assert stored.ravel().tolist() == tokens[64:128].tolist()


@pytest.mark.parametrize(
    ("tiles", "length", "expected"),
    [
        (132, 32, (0, 0, 1)),  # one tile per program
        (1024, 32, (0, 0, 1)),  # 100 tiles left: too few programs are idle to help
        (2048, 64, (68, 42, 3)),
        (4096, 128, (4, 13, 10)),  # no helper has more than one part
        (66, 16, (66, 8, 2)),
        (68, 11, (0, 0, 1)),
    ],
)
def test_examples(tiles: int, length: int, expected: tuple[int, int, int]) -> None:
    assert split_tiles(tiles, length, PROGRAMS) == expected


@pytest.mark.parametrize("programs", [1, 5, 78, 132])
def test_what_is_shared_is_shorter(programs: int) -> None:
    for tiles in range(1, 3 * programs):
        for length in (1, 4, 12, 33, 256):
            split, own, each = split_tiles(tiles, length, programs)
            if split == 0:
                continue
            assert split == tiles % programs and each > 1 and 0 < own < length
            rounds = -(-split * (each - 1) // (programs - split))
            assert max(own, rounds * -(-(length - own) // (each - 1))) < length


@pytest.mark.parametrize("programs", [1, 5, 78, 132])
def test_who_helps_has_as_much_as_who_is_helped(programs: int) -> None:
    for tiles in range(1, 3 * programs):
        for length in (1, 4, 12, 33, 512):
            split, own, helpers = split_tiles_backward(tiles, length, programs)
            if split == 0:
                continue
            assert split == tiles % programs and split + helpers <= programs and 0 < own < length
            helped = split * (length - own) / helpers
            assert helped <= own <= helped + 5 * (split / helpers + 1)


def test_examples_of_the_backward() -> None:
    assert split_tiles_backward(132, 512, PROGRAMS) == (0, 0, 0)
    assert split_tiles_backward(512, 512, PROGRAMS) == (116, 454, 16)
    assert split_tiles_backward(1024, 1024, PROGRAMS) == (100, 779, 32)
    assert split_tiles_backward(4, 512, PROGRAMS) == (4, 129, 12)  # at most three helpers per tile
    assert split_tiles_backward(12, 4, PROGRAMS) == (12, 2, 36)
