"""Shifts, halos and relayouts, compared with one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_ranks, on_three_ranks
from torch import Tensor

from ring_core import ChunkLayout, LayoutSpec, RankMismatchError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

T = 48
CHUNKS = {
    2: ChunkLayout(((0, 1, 5), (2, 3, 4))), 4: ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5))),
}  # fmt: skip
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30, T)


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def pool(request: Any) -> Iterator[LocalRanks]:
    with LocalRanks(request.param) as ranks:
        yield ranks


def layouts(size: int) -> list[LayoutSpec]:
    return ["contiguous", "zigzag", "striped", CHUNKS[size]]


def shifted(x: Tensor, n: int, dim: int, fill: float, offsets: tuple[int, ...] | None) -> Tensor:
    """Return the shifted tensor by definition: ``out[t] = x[t - n]`` within documents."""
    rows = x.movedim(dim, 0)
    out = []
    for start, stop in pairwise(offsets or (0, len(rows))):
        for t in range(start, stop):
            there = start <= t - n < stop
            out.append(rows[t - n] if there else 0 * rows[t] + fill)
    return torch.stack(out).movedim(0, dim)


def _at(x: Tensor, positions: Tensor, dim: int) -> Tensor:
    """Return the rows of a halo: the tokens at positions, and 0 outside of the sequence."""
    dim %= x.ndim
    x = x.movedim(dim, -1)
    x = torch.cat([x, torch.zeros_like(x[..., :1])], -1)
    runs = len(positions) // (len(x) if dim else 1)
    rows = [(x[n // runs] if dim else x)[..., places] for n, places in enumerate(positions)]
    return torch.stack(rows).movedim(-1, dim or 1)


Move = Callable[[Tensor], Tensor]


def _moves(cp: ContextParallel, size: int, length: int, dim: int) -> Iterator[tuple[Move, Move]]:
    """Yield movements of a slice, and what they are of the whole sequence: this rank's part."""
    half = (0, length // 2, length)
    for n, offsets in product(
        (0, 1, -1, -2, 5, 25, -37, 60), (None, DOCUMENTS if length == T else half)
    ):
        options: Any = {"dim": dim, "fill": 0.5, "cu_seqlens": offsets, "seq_len": length}

        def whole(x: Tensor, n: int = n, cu: Any = offsets) -> Tensor:
            return cp.shard(shifted(x, n, dim, 0.5, cu), dim=dim, pad=True, fill=0.5)

        yield partial(cp.shift, n=n, **options), whole
    for to in layouts(size):
        other = ContextParallel(layout=to)
        yield (
            partial(cp.relayout, to=other if dim else to, dim=dim, seq_len=length),
            partial(other.shard, dim=dim, pad=True),
        )
    for sides in ((0, 0), (3, 0), (1, 2), (20, 30), (0, 70)) if cp.layout != "striped" else ():
        options = {"dim": dim, "cu_seqlens": half, "seq_len": length}
        halo = partial(cp.halo, left=sides[0], right=sides[1], **options)

        def rows(x: Tensor, halo: Any = halo) -> Tensor:
            of_slice: Tensor = halo(x).rows
            return of_slice

        def of_positions(x: Tensor, halo: Any = halo) -> Tensor:
            return _at(x, halo(cp.shard(x.detach(), dim=dim, pad=True)).positions, dim)

        yield rows, of_positions


@pytest.mark.nightly(
    unless=["2 ranks-zigzag-False", "4 ranks-chunks-False", "2 ranks-striped-False"]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "chunks"])
@on_ranks
def test_a_movement_is_that_of_the_whole_sequence(rank: int, layout: Any, compiled: bool) -> None:
    """In value and gradient, along each dimension, of any length: padding moves nowhere."""
    size = dist.get_world_size()
    cp = ContextParallel(layout=CHUNKS[size] if layout == "chunks" else layout)
    shapes = [(1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))]
    shapes += [(1, (2, length, 3)) for length in range(1, 3 * size + 1)]
    for dim, shape in shapes[:1] if compiled else shapes:
        for move, of_whole in _moves(cp, size, shape[dim], dim):
            torch._dynamo.reset()
            run = torch.compile(move, backend="aot_eager", fullgraph=True) if compiled else move
            whole = numbers(0, *shape).requires_grad_()
            results = run(cp.shard(whole, dim=dim, pad=True, fill=7)), of_whole(whole)
            assert torch.equal(*results), (dim, shape, move)
            by_way = (torch.autograd.grad(y, whole, numbers(rank, *y.shape)) for y in results)
            grads = torch.stack([grad for (grad,) in by_way])
            dist.all_reduce(grads)
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (1, 2), (20, 30), (0, 70)])
@on_ranks
def test_a_halo_says_what_it_holds(left: int, right: int) -> None:
    """Positions, documents and widths are as documented; own tokens come back by ``join``."""
    size = dist.get_world_size()
    for layout in (x for x in layouts(size) if x != "striped"):
        cp = ContextParallel(layout=layout)
        runs = cp.layout_of(T).num_runs
        for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
            seq_dim = dim % len(shape)
            x = cp.shard(numbers(0, *shape), dim=dim)
            rows, positions, documents = cp.halo(x, left, right, dim=dim, cu_seqlens=DOCUMENTS)
            width = left + T // size // runs + right
            assert positions.shape == documents.shape == ((shape[0] if dim else 1) * runs, width)
            inside = positions >= 0
            assert torch.equal(inside, documents >= 0)
            ends = torch.tensor(DOCUMENTS).unique()
            assert torch.equal(
                torch.bucketize(positions[inside], ends, right=True) - 1, documents[inside]
            )
            middle = rows.narrow(seq_dim if dim else 1, left, width - left - right)
            assert torch.equal(cp.join(middle, dim=dim), x)


DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


@on_three_ranks
def test_rows_of_every_dtype_move() -> None:
    for number, dtype in enumerate(DTYPES):
        cp = ContextParallel(layout=("zigzag", "contiguous", "striped")[number % 3])
        whole = torch.arange(2 * T * 3).reshape(2, T, 3).remainder(2).to(dtype)
        # Views that are not contiguous.
        x = cp.shard(whole).transpose(0, 2).contiguous().transpose(0, 2)
        plain = ContextParallel(layout="contiguous")
        back = plain.relayout(cp.relayout(x, to=plain), to=cp)
        assert torch.equal(back.view(torch.uint8), x.contiguous().view(torch.uint8)), dtype
        if dtype != torch.float8_e4m3fn:
            like = cp.shard(torch.cat([torch.ones_like(whole[:, :1]), whole[:, :-1]], 1))
            out = cp.shift(x, 1, fill=1)
            assert out.dtype == dtype
            assert torch.equal(out, like), dtype


def _one_graph(rank: int) -> int:
    """Return the number of graphs compiled for documents and steps that change in each call."""
    torch._dynamo.reset()
    cp, graphs = ContextParallel(), []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def both(x: Tensor, n: int, offsets: tuple[int, ...]) -> tuple[Tensor, ...]:
        return cp.shift(x, n, cu_seqlens=offsets), *cp.halo(x, n, 2, cu_seqlens=offsets)

    run: Any = torch.compile(both, backend=keep, fullgraph=True)
    x = numbers(rank, 2, T // 2, 3)
    for n, stop in ((2, 5), (3, 9), (4, 30), (5, 31)):
        actual, like = run(x, n, (0, stop, T)), both(x, n, (0, stop, T))
        for result, expected in zip(actual, like, strict=True):
            assert torch.equal(result, expected)
    return len(graphs)


def test_a_graph_takes_all_steps_and_documents() -> None:
    with LocalRanks(2) as ranks:
        assert max(ranks.run(_one_graph)) <= 2


def _shift(cp: Any, x: Tensor, n: Any = 1, **options: Any) -> Tensor:
    moved: Tensor = cp.shift(x, n, **options)
    return moved


def _to_striped(cp: Any, x: Tensor, to: Any = "striped", **options: Any) -> Tensor:
    moved: Tensor = cp.relayout(x, to=to, **options)
    return moved


def _halo(cp: Any, x: Tensor, left: int = 0, right: int = 1, **options: Any) -> Tensor:
    rows: Tensor = cp.halo(x, left, right, **options).rows
    return rows


OTHER: dict[str, Any] = {"cu_seqlens": (0, 3, 12)}
#: A call of all ranks but the last, what rank 2 does instead, and a pattern of the error.
UNLIKE: dict[str, tuple[Any, Any, str]] = {
    "n": (_shift, partial(_shift, n=2), r"n is [12] there"),
    "fill": (_shift, partial(_shift, fill=7), r"fill is [07].0 there"),
    "documents": (_shift, partial(_shift, **OTHER), r"cu_seqlens is "),
    "layout": (
        _shift, lambda cp, x: ContextParallel(cp.group, "striped").shift(x, 1),
        "layout is '(striped|zigzag)' there",
    ),
    "movement": (_shift, _halo, r"pass is '(halo|shift)' there"),
    "to": (_shift, _to_striped, r"pass is '(relayout|shift)' there"),
    "dim": (_shift, partial(_shift, dim=2), "dim is [12] there"),
    "shape": (_shift, lambda cp, x: _shift(cp, x[:, :2]), r"shape is \[1, [24], 4\] there"),
    "no part": (_shift, lambda cp, x: _shift(cp, x[:, :3]), r"shape is \[1, [34], 4\] there"),
    "dtype": (_shift, lambda cp, x: _shift(cp, x.double()), "dtype is 'float(32|64)' there"),
    "gradient": (
        _shift, lambda cp, x: _shift(cp, x.requires_grad_()), "needs_grad is (True|False)"
    ),
    "left": (_halo, partial(_halo, left=2), "left is [02] there"),
    "right": (_halo, partial(_halo, right=2), "right is [12] there"),
    "halo's documents": (_halo, partial(_halo, **OTHER), "cu_seqlens is "),
    "target": (
        _to_striped, partial(_to_striped, to="contiguous"), "to is '(striped|contiguous)' there"
    ),
    "relayout's dim": (_to_striped, partial(_to_striped, dim=2), "dim is [12] there"),
    "length": (_to_striped, partial(_to_striped, seq_len=12), "tokens is (12|None) there"),
}  # fmt: skip


def _unlike(rank: int, name: str) -> tuple[str, bool]:
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    cp, x = ContextParallel(group), torch.ones(1, 4, 4)
    message = "a result"
    try:
        call, other, _ = UNLIKE[name]
        (other if rank == 2 else call)(cp, x)
    except (RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    # Nothing was sent: the group stays usable.
    return message, bool((cp.shift(torch.full((1, 4, 4), 1.0), 0) == 1).all())


def test_unlike_movements_are_named_on_all_ranks() -> None:
    with LocalRanks(3) as ranks:
        for name, (*_, expected_message) in UNLIKE.items():
            for message, is_usable in ranks.run(_unlike, name):
                assert message.startswith(RankMismatchError.__name__), (name, message)
                assert re.search(expected_message, message), (name, message)
                assert is_usable


WRONG: dict[str, tuple[Any, str]] = {
    "n": (lambda cp, x: cp.shift(x, 1.0), "n must be an integer"),
    "a flag": (lambda cp, x: cp.shift(x, True), "n must be an integer"),
    "dim": (lambda cp, x: cp.shift(x, 1, dim=3), "dim must be a dimension of x"),
    "no tensor": (lambda cp, _: cp.shift([1], 1), "x must be a torch.Tensor"),
    "fill": (lambda cp, x: cp.shift(x, 1, fill="0"), "fill must be a number"),
    "a fraction": (lambda cp, x: cp.shift(x.int(), 1, fill=0.5), "fill must be an integer"),
    "a large fill": (lambda cp, x: cp.shift(x.to(torch.uint8), 1, fill=-100), r"in \[0, 255\]"),
    "documents": (lambda cp, x: cp.shift(x, 1, cu_seqlens=(1, 4)), "cu_seqlens must start at 0"),
    "their end": (lambda cp, x: cp.shift(x, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
    "end in halo": (lambda cp, x: cp.halo(x, 1, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
    "left": (lambda cp, x: cp.halo(x, -1, 0), "left must be at least 0"),
    "right": (lambda cp, x: cp.halo(x, 0, None), "right must be at least 0"),
    "striped": (
        lambda _, x: ContextParallel(layout="striped").halo(x, 1, 0), r"Instead: relayout to"
    ),
    "rows": (lambda cp, x: cp.join(x), "y must have a row for each of the 2 runs"),
    "rows of dim 0": (lambda cp, x: cp.join(x.repeat(4, 1, 1), dim=0), "y must have a row for"),
    "to": (lambda cp, x: cp.relayout(x, to="zag"), "unknown layout"),
    "to chunks": (lambda cp, x: cp.relayout(x, to=CHUNKS[4]), "chunks for 4 ranks"),
    "no part": (lambda cp, x: cp.shift(x[:, :3], 1), "is not a positive multiple of 4"),
    "no part there": (
        lambda _, x: ContextParallel(layout="contiguous").relayout(x[:, :3], to="zigzag"),
        "is not a positive multiple of 4",
    ),
}  # fmt: skip


def _refused(_: int) -> list[str]:
    cp, unexpected = ContextParallel(), []
    for name, (call, message) in WRONG.items():
        try:
            call(cp, torch.ones(1, 4, 3))
        except ValueError as error:
            unexpected += [] if re.search(message, str(error)) else [f"{name}: {error}"]
        else:
            unexpected.append(f"{name}: no error")
    assert cp.shift(torch.ones(1, 4), 0).sum() == 4
    return unexpected


def test_wrong_arguments_are_refused() -> None:
    with LocalRanks(2) as ranks:
        assert ranks.run(_refused) == [[], []]


def test_one_process_moves_rows_too() -> None:
    for layout in ("contiguous", "zigzag", "striped"):
        cp, x = ContextParallel(layout=layout), numbers(0, 2, 5, 3)
        for n in (0, 2, -7):
            assert torch.equal(cp.shift(x, n), shifted(x, n, 1, 0, (0, 5)))
        rows, positions, documents = cp.halo(x, 2, 1, cu_seqlens=(0, 2, 5))
        assert torch.equal(rows[:, 2:-1], x)
        assert positions.tolist() == [[-1, -1, 0, 1, 2, 3, 4, -1]] * 2
        assert documents.tolist() == [[-1, -1, 0, 0, 1, 1, 1, -1]] * 2
        assert torch.equal(cp.join(rows)[:, 2:-1], x)
        assert torch.equal(cp.relayout(x, to="contiguous"), x)
