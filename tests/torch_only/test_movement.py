"""Shifts, halos and relayouts, compared with one process, for tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_ranks, on_three_ranks, on_two_ranks
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ring_core import ChunkLayout, LayoutSpec, RankMismatchError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

T = 48
CHUNKS = {
    1: ChunkLayout(((0, 1, 2),)), 2: ChunkLayout(((0, 1, 5), (2, 3, 4))), 4: ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5))),
}  # fmt: skip
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30, T)


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} ranks".format)
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
    unless=[
        "1 ranks-chunks-False",
        "2 ranks-zigzag-False",
        "2 ranks-striped-False",
        "4 ranks-chunks-False",
    ]
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


@on_two_ranks
def test_a_graph_takes_all_steps_and_documents(rank: int) -> None:
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
    assert len(graphs) <= 2


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


@pytest.mark.parametrize("name", UNLIKE)
@on_three_ranks
def test_unlike_movements_are_named_on_all_ranks(rank: int, name: str) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    cp, x = ContextParallel(group), torch.ones(1, 4, 4)
    call, other, message = UNLIKE[name]
    with pytest.raises(RankMismatchError, match=message):
        (other if rank == 2 else call)(cp, x)
    assert (cp.shift(torch.ones(1, 4, 4), 0) == 1).all()  # nothing was sent: it is usable


WRONG: dict[str, tuple[Any, str]] = {
    "a fraction": (lambda cp, x: cp.shift(x.int(), 1, fill=0.5), "fill must be an integer"),
    "a large fill": (lambda cp, x: cp.shift(x.to(torch.uint8), 1, fill=-100), r"in \[0, 255\]"),
    "documents": (lambda cp, x: cp.shift(x, 1, cu_seqlens=(1, 4)), "cu_seqlens must start at 0"),
    "their end": (lambda cp, x: cp.shift(x, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
    "end in halo": (lambda cp, x: cp.halo(x, 1, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
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


@on_two_ranks
def test_wrong_arguments_are_refused() -> None:
    cp = ContextParallel()
    for call, message in WRONG.values():
        with pytest.raises(ValueError, match=message):
            call(cp, torch.ones(1, 4, 3))
    assert cp.shift(torch.ones(1, 4), 0).sum() == 4


LENGTH = 24


def _shifted(x: Tensor, n: int, fill: float) -> Tensor:
    filled = torch.full_like(x[:, : abs(n)], fill)
    return torch.cat([filled, x[:, :-n]] if n > 0 else [x[:, -n:], filled], 1)


#: A movement of a rank's slice, and its equivalent on the whole sequence.
MOVES: dict[str, tuple[Callable[[ContextParallel], Move], Callable[[ContextParallel], Move]]] = {
    "shift": (
        lambda cp: lambda x: cp.shift(x, 5, fill=0.5),
        lambda cp: lambda x: cp.shard(_shifted(x, 5, 0.5)),
    ),
    "halo": (
        lambda cp: lambda x: cp.halo(x, 3, 2).rows.flatten(0, 1)[None],
        lambda cp: lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1))[:, cp.halo(cp.shard(x), 3, 2).positions.flatten()],
    ),
    "relayout": (
        lambda cp: lambda x: cp.relayout(x, to="contiguous"),
        lambda _: lambda x: ContextParallel(layout="contiguous").shard(x),
    ),
    "unshard": (lambda cp: lambda x: cp.unshard(x, grad="sum"), lambda _: lambda x: x),
}  # fmt: skip


def _weighted(move: Move, rank: int) -> Move:
    """Return a cubic loss, which each rank weights by another number."""
    return lambda x: (rank + 1) * move(x).pow(3).sum()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", MOVES)
@on_two_ranks
def test_second_derivatives_are_exact(rank: int, name: str, layout: LayoutSpec) -> None:
    cp = ContextParallel(layout=layout)
    local, of_whole = MOVES[name]
    whole = numbers(0, 1, LENGTH, 2).requires_grad_()
    # The loss summed over ranks, which every rank computes from whole sequences.
    of_rank = _weighted(of_whole(cp), rank)(whole)
    (grad,) = torch.autograd.grad(of_rank, whole, create_graph=True)
    total = grad.detach().clone()
    dist.all_reduce(total)
    (penalty,) = torch.autograd.grad((grad * 2 * total).sum(), whole)  # the square of the sum
    dist.all_reduce(penalty)
    x = cp.shard(whole.detach()).requires_grad_()
    loss = _weighted(local(cp), rank)
    (own,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(own.detach(), cp.shard(total))
    (second_grad,) = torch.autograd.grad(own.square().sum(), x)
    torch.testing.assert_close(second_grad, cp.shard(penalty))
    _, product = functional.hvp(loss, x.detach(), 2 * own.detach())
    torch.testing.assert_close(product, cp.shard(penalty))


@on_two_ranks
def test_second_derivatives_of_slices_stay_on_their_rank() -> None:
    """Check second derivatives of a loss that all ranks compute whole, on each rank's slice."""
    cp = ContextParallel()
    whole = numbers(0, 1, LENGTH, 2).requires_grad_()
    (grad,) = torch.autograd.grad(whole.pow(3).sum(), whole)
    x = cp.shard(whole.detach()).requires_grad_()
    (own,) = torch.autograd.grad(cp.unshard(x, grad="slice").pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(own.detach(), cp.shard(grad))
    (second_grad,) = torch.autograd.grad(own.sum(), x)
    torch.testing.assert_close(second_grad, cp.shard(6 * whole.detach()))


@on_two_ranks
def test_derivatives_of_every_order_are_exact() -> None:
    cp, whole = ContextParallel(), numbers(0, 1, LENGTH, 2)
    x = cp.shard(whole).requires_grad_()
    (first_grad,) = torch.autograd.grad(cp.shift(x, 1).pow(4).sum(), x, create_graph=True)
    (two,) = torch.autograd.grad(first_grad.sum(), x, create_graph=True)
    (three,) = torch.autograd.grad(two.sum(), x)
    inside = cp.positions(LENGTH) < LENGTH - 1  # the last token is shifted out of the sequence
    torch.testing.assert_close(three, 24 * x.detach() * inside[None, :, None])


@on_two_ranks
def test_batches_of_gradients_are_refused_by_name() -> None:
    cp = ContextParallel()
    calls: list[Move] = [move(cp) for move, _ in MOVES.values()]
    compiled = torch.compile(MOVES["shift"][0](cp), backend="aot_eager", fullgraph=True)
    for call in [*calls, compiled]:
        x = cp.shard(numbers(0, 1, LENGTH, 2)).requires_grad_()
        out = call(x)
        grads = torch.stack([torch.ones_like(out)] * 2)
        with pytest.raises(ValueError, match=r"^the backward of ring attention, of unshard and of"):
            torch.autograd.grad(out, x, grads, is_grads_batched=True)


@on_two_ranks
def test_a_dimension_may_change_from_call_to_call_of_a_graph(rank: int) -> None:
    cp = ContextParallel()
    torch._dynamo.reset()

    def moves(x: Tensor, dim: int) -> tuple[Tensor, ...]:
        return (
            cp.shift(x, 1, dim=dim), cp.halo(x, 1, 0, dim=dim).rows,
            cp.relayout(x, to="contiguous", dim=dim), cp.unshard(x, dim=dim),
        )  # fmt: skip

    run = torch.compile(moves, backend="eager", fullgraph=True)
    x = numbers(rank, 4, 8, 4)
    for dim in (0, 1, 2, -1, -2):
        for moved, expected in zip(run(x, dim), moves(x, dim), strict=True):
            assert torch.equal(moved, expected), dim


MOVE_CALLS: dict[str, Callable[[ContextParallel, Tensor], object]] = {
    "shift": lambda cp, x: cp.shift(x, 1), "halo": lambda cp, x: cp.halo(x, 1, 0),
    "relayout": lambda cp, x: cp.relayout(x, to="contiguous"),
    "unshard": lambda cp, x: cp.unshard(x),
}  # fmt: skip


@on_two_ranks
def test_other_kinds_of_tensors_are_refused() -> None:
    cp, whole = ContextParallel(), torch.ones(1, 8, 2)
    kinds = {
        "a DTensor": distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(1)]),
        "a sparse_coo one": whole[:, :4].to_sparse(),
        "a nested one": torch.nested.nested_tensor([whole[0, :4]] * 2, layout=torch.jagged),
    }
    for call in MOVE_CALLS.values():
        for words, x in kinds.items():
            with pytest.raises(ValueError, match=words):
                call(cp, x)
        call(cp, whole[:, :4])  # the group stays usable


def _counted(dtype: torch.dtype) -> Tensor:
    """Return a whole tensor ``[2, 8, 4]`` with another number in each place, as far as it can."""
    return torch.arange(64.0).view(2, 8, 4).to(dtype)


def _complex() -> Tensor:
    return torch.complex(_counted(torch.float64), _counted(torch.float64).flip(1) + 1)


#: Dense tensors ``[2, 8, 4]`` of other kinds.
DENSE: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: _complex().conj(),
    "negative": lambda: _complex().conj().imag,
    "complex": lambda: _complex().to(torch.complex64),
    "half complex": lambda: _complex().to(torch.complex32),
    "expanded": lambda: torch.arange(8.0)[None, :, None].expand(2, 8, 4),
    "transposed": lambda: _counted(torch.float32).mT.contiguous().mT,
    "empty": lambda: torch.zeros(2, 8, 0),
    "inference": torch.inference_mode()(lambda: _counted(torch.float32)),
    **{
        str(dtype): partial(_counted, dtype)
        for dtype in (
            torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint64, torch.bfloat16,
            torch.float8_e4m3fn, torch.float8_e5m2,
        )
    },
}  # fmt: skip
#: Calls that give back the whole tensor.
WHOLE_MOVES: dict[str, Callable[[ContextParallel, Tensor], Tensor]] = {
    "unshard": lambda cp, x: cp.unshard(x, grad="sum"),
    "shift": lambda cp, x: cp.unshard(cp.shift(x, 0), grad="sum"),
    "halo": lambda cp, x: cp.unshard(cp.join(cp.halo(x, 0, 0).rows), grad="sum"),
    "relayout": lambda cp, x: ContextParallel(layout="contiguous").unshard(
        cp.relayout(x, to="contiguous"), grad="sum"
    ),
}


def _like(x: Tensor) -> Tensor:
    """Return a copy that may be compared: without bits, of a dtype that has operations."""
    x = x.resolve_conj().resolve_neg().clone()
    if x.dtype == torch.complex32:
        return torch.view_as_real(x).float()
    return (
        x if (x.dtype.is_floating_point and x.dtype.itemsize > 1) or x.is_complex() else x.float()
    )


def _negative(x: Tensor) -> Tensor:
    """Return numbers as torch's lazy negative of their negatives."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


@pytest.mark.parametrize("kind", DENSE)
@on_two_ranks
def test_dense_tensors_of_every_kind_are_exact(kind: str) -> None:
    cp, whole = ContextParallel(), DENSE[kind]()
    x = cp.shard(whole)
    if whole.is_conj() or whole.is_neg():  # `shard` copies: views with the same bits
        x = x.conj().resolve_conj().conj() if whole.is_conj() else _negative(x)
        assert x.is_conj() or x.is_neg()
    for name, move in WHOLE_MOVES.items():
        torch.testing.assert_close(
            _like(move(cp, x)), _like(whole), msg=partial("{} {}".format, name)
        )
    if not (whole.is_floating_point() or whole.is_complex()) or whole.dtype.itemsize < 2:
        return
    if whole.dtype == torch.complex32 or whole.is_inference():
        return
    for name, move in WHOLE_MOVES.items():
        leaf = x.detach().resolve_conj().resolve_neg().clone().requires_grad_()
        upstream = whole  # of the whole: a conjugate, a negative, a view
        move(cp, leaf).backward(upstream)
        assert leaf.grad is not None
        torch.testing.assert_close(
            _like(leaf.grad), _like(cp.shard(upstream) * 2), msg=partial("{} {}".format, name)
        )
    total = ContextParallel(layout="contiguous").unshard(_like(x)[None], dim=0).sum(0)
    weight = nn.Parameter(torch.zeros_like(_like(x)))
    weight.grad = x
    cp.reduce_gradients(nn.ParameterList([weight]))
    torch.testing.assert_close(_like(weight.grad), total)
