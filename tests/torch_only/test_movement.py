"""Movements of slices, compared with one process, for tensors of every kind and to other ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from messages import Sent
from on_ranks import on_four_ranks, on_ranks, on_three_ranks, on_two_ranks
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ring_torch
from ring_core import ChunkLayout, LayoutSpec, RankMismatchError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.training import sum_by_sequence

T = 48
CHUNKS = {
    1: ChunkLayout(((0, 1, 2),)), 2: ChunkLayout(((0, 1, 5), (2, 3, 4))), 4: ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5))),
}  # fmt: skip
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30, T)
Move = Callable[[Tensor], Tensor]


@pytest.fixture(params=[1, 2, 4], ids="{} ranks".format)
def pool(request: Any, pools: dict[int, LocalRanks]) -> LocalRanks:
    return pools[request.param]


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

        def at_positions(x: Tensor, halo: Any = halo) -> Tensor:
            return _at(x, halo(cp.shard(x.detach(), dim=dim, pad=True)).positions, dim)

        yield cast("Move", lambda x, halo=halo: halo(x).rows), at_positions


@pytest.mark.nightly(
    unless=["1 ranks-chunks", "2 ranks-zigzag", "2 ranks-striped", "4 ranks-chunks"]
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "chunks"])
@on_ranks
def test_a_movement_is_that_of_the_whole_sequence(rank: int, layout: Any) -> None:
    """In value and gradient, along each dimension, of any length: padding moves nowhere."""
    size = dist.get_world_size()
    cp = ContextParallel(layout=CHUNKS[size] if layout == "chunks" else layout)
    shapes = [(1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))]
    shapes += [(1, (2, length, 3)) for length in range(1, 3 * size + 1)]
    for dim, shape in shapes:
        for move, of_whole in _moves(cp, size, shape[dim], dim):
            whole = numbers(0, *shape).requires_grad_()
            results = move(cp.shard(whole, dim=dim, pad=True, fill=7)), of_whole(whole)
            assert torch.equal(*results), (dim, shape, move)
            by_way = (torch.autograd.grad(y, whole, numbers(rank, *y.shape)) for y in results)
            grads = torch.stack([grad for (grad,) in by_way])
            dist.all_reduce(grads)
            torch.testing.assert_close(*grads)


@on_two_ranks
def test_a_graph_takes_all_steps_documents_and_dimensions(rank: int) -> None:
    cp, graphs = ContextParallel(), []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def moves(x: Tensor, n: int, offsets: tuple[int, ...] | None, dim: int) -> tuple[Tensor, ...]:
        options: Any = {"cu_seqlens": offsets, "dim": dim}
        return (
            cp.shift(x, n, **options), *cp.halo(x, n, 2, **options),
            cp.relayout(x, to="contiguous", dim=dim), cp.unshard(x, dim=dim),
        )  # fmt: skip

    steps: list[tuple[Any, ...]] = [
        (n, (0, stop, T), 1) for n, stop in ((2, 5), (3, 9), (4, 30), (5, 31))
    ]
    for calls in (steps, [(1, None, dim) for dim in (0, 1, 2, -1, -2)]):
        torch._dynamo.reset()
        run: Any = torch.compile(moves, backend=keep, fullgraph=True)
        for call in calls:
            x = numbers(rank, 4, T // 2, 4)
            for result, expected in zip(run(x, *call), moves(x, *call), strict=True):
                assert torch.equal(result, expected), call
        if calls is steps:
            assert len(graphs) <= 2


# What differs between ranks, and what is wrong.


def cp_over(ranks: tuple[int, ...], layout: LayoutSpec = "zigzag") -> ContextParallel:
    """Return context parallelism over some ranks; every rank has to call this."""
    if list(ranks) != sorted(ranks):
        options: Any = {"sort_ranks": False}
        group: Any = dist.new_group(list(ranks), **options)
        return ContextParallel(group, layout)
    return ContextParallel(DeviceMesh("cpu", list(ranks)), layout)


def _move(
    name: str, *arguments: Any, change: Any = lambda x: x, agreed: int = 0, **options: Any
) -> Callable[[ContextParallel, Tensor], Any]:
    """Return a call of a movement with a changed tensor, behind agreed ones with the tensor."""

    def call(cp: ContextParallel, x: Tensor) -> Any:
        for _ in range(agreed):
            getattr(cp, name)(x, *arguments)
        return getattr(cp, name)(change(x), *arguments, **options)

    return call


def _to_all(
    cp: Any, _: Tensor, layout: Any = "zigzag", change: Any = None, length: int = T
) -> Tensor:
    """Move a sequence of ranks 0 and 2 to all; rank 1 has no token."""
    x = torch.ones(2, T // 2 if dist.get_rank() != 1 else 0, 3)
    to = ContextParallel(cp.group, layout)
    return cp_over((0, 2)).relayout(change(x) if change else x, to=to, seq_len=length)


def _to_some(cp: Any, _: Tensor, to: int = 2, tokens: int = T // 3) -> Tensor:
    targets = {other: cp_over((0, other)) for other in (1, 2)}
    moved: Tensor = cp.relayout(torch.ones(2, tokens, 3), to=targets[to], seq_len=T)
    return moved


def _layer(cp: Any, x: Tensor, check: int = 0, **changes: Any) -> Tensor:
    """Run a recurrent layer."""
    heads = x[..., None, :]
    with ring_torch.check(every=check):
        out: Tensor = cp.simple_gla(
            **{"q": heads, "k": heads, "v": heads, "g": x[..., :1], **changes}
        )
    return out


def _sum(cp: Any, x: Tensor, *, rows: int = 1, **documents: Any) -> Tensor:
    return sum_by_sequence(cp, x[:, :, 0].repeat(rows, 1), **documents)


def _reduce(*sizes: int, frozen: str = "", dtype: Any = torch.float32) -> Any:
    """Return a sum of the gradients of layers of these sizes."""
    model = nn.Sequential(*(nn.Linear(*pair, dtype=dtype) for pair in pairwise(sizes)))
    for name, weight in model.named_parameters():
        weight.requires_grad_(name != frozen).grad = torch.ones_like(weight)
    return lambda cp, _: cp.reduce_gradients(model)


OTHER: dict[str, Any] = {"cu_seqlens": (0, 3, 12)}
ONES = torch.ones(1, 4, 1, 4)
SHIFT, HALO, TO_STRIPED = _move("shift", 1), _move("halo", 0, 1), _move("relayout", to="striped")
UNSHARD, AGREED = _move("unshard"), _move("unshard", agreed=2)
#: A call of all ranks but one, what rank 1 does instead, and a pattern of the error.
UNLIKE: dict[str, tuple[Any, Any, str]] = {
    "n": (SHIFT, _move("shift", 2), "n is [12] there"),
    "fill": (SHIFT, _move("shift", 1, fill=7), "fill is [07].0 there"),
    "documents": (SHIFT, _move("shift", 1, **OTHER), "cu_seqlens is "),
    "layout": (SHIFT, lambda cp, x: ContextParallel(cp.group, "striped").shift(x, 1), "layout is '(striped|zigzag)' there"),
    "movement": (SHIFT, HALO, "pass is '(halo|shift)' there"),
    "to": (SHIFT, TO_STRIPED, "pass is '(relayout|shift)' there"),
    "dim": (SHIFT, _move("shift", 1, dim=2), "dim is [12] there"),
    "shape": (SHIFT, _move("shift", 1, change=lambda x: x[:, :2]), r"shape is \[1, [24], 4\] there"),
    "no part": (SHIFT, _move("shift", 1, change=lambda x: x[:, :3]), r"shape is \[1, [34], 4\] there"),
    "dtype": (SHIFT, _move("shift", 1, change=Tensor.double), "dtype is 'float(32|64)' there"),
    "gradient": (SHIFT, _move("shift", 1, change=Tensor.requires_grad_), "needs_grad is (True|False)"),
    "left": (HALO, _move("halo", 2, 1), "left is [02] there"),
    "right": (HALO, _move("halo", 0, 2), "right is [12] there"),
    "halo's documents": (HALO, _move("halo", 0, 1, **OTHER), "cu_seqlens is "),
    "target": (TO_STRIPED, _move("relayout", to="contiguous"), "to is '(striped|contiguous)' there"),
    "relayout's dim": (TO_STRIPED, _move("relayout", to="striped", dim=2), "dim is [12] there"),
    "length": (TO_STRIPED, _move("relayout", to="striped", seq_len=12), "tokens is (12|None) there"),
    "a longer slice": (UNSHARD, _move("unshard", change=lambda x: x.repeat(1, 2, 1)), r"shape is \[1, [48], 4\] there and \[1, [48], 4\]"),
    "no slice": (UNSHARD, _move("unshard", change=lambda x: x[:, :3]), r"shape is \[1, [34], 4\] there"),
    "a wider slice": (UNSHARD, _move("unshard", change=lambda x: x[..., :3]), r"shape is \[1, 4, [34]\] there"),
    "dimensions": (UNSHARD, _move("unshard", change=lambda x: x[..., None]), r"shape is \[1, 4, 4(, 1)?\] there"),
    "a slice's dtype": (UNSHARD, _move("unshard", change=Tensor.double), "dtype is 'float(32|64)' there"),
    "a slice's dim": (UNSHARD, _move("unshard", dim=2), "dim is [12] there"),
    "grad": (UNSHARD, _move("unshard", change=Tensor.requires_grad_, grad="sum"), "sums_gradients is (True|False) there"),
    "a new shape": (AGREED, _move("unshard", agreed=2, change=lambda x: x.repeat(1, 2, 1)), r"shape is \[1, [48], 4\] there"),
    "a new dtype": (AGREED, _move("unshard", agreed=2, change=Tensor.double), "dtype is 'float(32|64)' there"),
    "another length": (_to_all, partial(_to_all, length=2 * T), "tokens is (48|96) there"),
    "another layout": (_to_all, partial(_to_all, layout="striped"), "to is '(striped|zigzag)' there"),
    "another dtype": (_to_all, partial(_to_all, change=Tensor.double), "dtype is 'float(32|64)' there"),
    "another gradient": (_to_all, partial(_to_all, change=Tensor.requires_grad_), "needs_grad is (True|False) there"),
    "tokens outside": (_to_all, partial(_to_all, change=lambda _: torch.ones(2, 1, 3)), r"shape is \[2, (1|48), 3\] there"),
    "a layer's documents": (_layer, partial(_layer, **OTHER), "cu_seqlens is"),
    "a layer's scale": (_layer, partial(_layer, scale=0.7), "kernel is"),
    "a layer's norm": (_layer, partial(_layer, use_qk_l2norm=True), "kernel is"),
    "a layer's final states": (_layer, partial(_layer, output_final_state=True), "output_final_state is"),
    "a layer's gradients": (_layer, lambda cp, x: _layer(cp, x.requires_grad_()), "needs_grad is"),
    "a layer's dtype": (_layer, partial(_layer, g=torch.ones(1, 4, 1).double()), "g is"),
    "a layer's heads": (_layer, partial(_layer, v=ONES.repeat(1, 1, 2, 1), g=torch.ones(1, 4, 2)), "[vg] is"),
    "a layer's check": (partial(_layer, check=1), partial(_layer, check=2), "check is"),
    "sums' documents": (partial(_sum, **OTHER), partial(_sum, cu_seqlens=(0, 4, 12)), "is"),
    "sums' kind": (partial(_sum, **OTHER), partial(_sum, segment_ids=torch.zeros(1, 4, dtype=torch.int32)), "is"),
    "sums' rows": (_sum, partial(_sum, rows=2), "is"),
    "a parameter's shape": (_reduce(3, 4), _reduce(3, 5), r"0\.weight \[[45], 3\] float32"),
    "a parameter's dtype": (_reduce(3, 4), _reduce(3, 4, dtype=torch.float64), r"0\.weight \[4, 3\] float(32|64)"),
    "more parameters": (_reduce(3, 4), _reduce(3, 4, 4), "parameters is [24] there and [24] here"),
    "frozen": (_reduce(3, 4), _reduce(3, 4, frozen="0.bias"), "parameters is [12] there and [12] here"),
    "no parameters": (_reduce(3, 4), _reduce(), "parameters is [02] there and [02] here"),
    "deep": (_reduce(*[4] * 41), _reduce(*[4] * 40, 5), r"parameters 70 to 79 is '.?35\.weight"),
    "ranks": (_to_some, partial(_to_some, to=1), r"target_ranks is \[0, [12]\] there"),
    "tokens": (_to_some, partial(_to_some, tokens=15), r"shape is \[2, (15|16|48), 3\] there"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
@on_three_ranks
def test_unlike_movements_are_named_on_all_ranks(rank: int, name: str) -> None:
    group: Any = dist.new_group(timeout=timedelta(seconds=20))
    cp, x = ContextParallel(group), torch.ones(1, 4, 4)
    call, other, message = UNLIKE[name]
    with pytest.raises(RankMismatchError, match=message):
        (other if rank == 1 else call)(cp, x)
    if call is not AGREED:  # nothing was sent: the group is usable
        whole = cp.unshard(torch.full((1, 4, 2), float(rank)))
        assert torch.equal(cp.shard(whole), torch.full((1, 4, 2), float(rank)))


OUTSIDE, MULTIPLE = (
    r"this rank is not in the DeviceMesh of the ranks \[0, 2\]",
    "is not a positive multiple of 8",
)
MOVES: dict[str, Callable[[ContextParallel, Tensor], Tensor]] = {
    "shift": lambda cp, x: cp.shift(x, 5), "halo": lambda cp, x: cp.halo(x, 3, 2).rows,
    "relayout": lambda cp, x: cp.relayout(x, to="contiguous"),
    "unshard": lambda cp, x: cp.unshard(x, grad="sum"),
}  # fmt: skip
#: Calls with ``ones(1, 4, 3)``, and words of their errors.
WRONG: tuple[tuple[Callable[[ContextParallel, Tensor], object], str], ...] = (
    (lambda cp, x: cp.shift(x.int(), 1, fill=0.5), "fill must be an integer"),
    (lambda cp, x: cp.shift(x.to(torch.uint8), 1, fill=-100), r"in \[0, 255\]"),
    (lambda cp, x: cp.shift(x, 1, cu_seqlens=(1, 4)), "cu_seqlens must start at 0"),
    (lambda cp, x: cp.shift(x, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
    (lambda cp, x: cp.halo(x, 1, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
    (lambda _, x: ContextParallel(layout="striped").halo(x, 1, 0), "Instead: relayout to"),
    (lambda cp, x: cp.join(x), "y must have a row for each of the 2 runs"),
    (lambda cp, x: cp.join(x.repeat(4, 1, 1), dim=0), "y must have a row for"),
    (lambda cp, x: cp.relayout(x, to="zag"), "unknown layout"),  # type: ignore[arg-type]  # wrong
    (lambda cp, x: cp.relayout(x, to=CHUNKS[2]), "chunks for 2 ranks"),
    (lambda cp, x: cp.shift(x[:, :3], 1), MULTIPLE),
    (lambda _, x: ContextParallel(layout="contiguous").relayout(x[:, :3], to="zigzag"), MULTIPLE),
    (lambda cp, x: cp.unshard(x.clone().requires_grad_()), "(?s)^.*x requires a gradient.*\ngrad='sum': .*\ngrad='slice'"),
    (lambda cp, x: torch.compile(cp.unshard, backend="eager")(x.clone().requires_grad_()), "x requires a gradient"),
    (lambda cp, _: cp.unshard(torch.ones(1, 5, 2)), "^sequence length 20 is not a positive multiple"),
    (lambda cp, _: cp.unshard(torch.ones(1, 4, device="meta")), r"^the process group \(gloo\) sends no tensors of"),
    (lambda cp, x: cp_over((0, 2)).relayout(x, to=cp), "Give seq_len"),
    (
        lambda _, x: cp_over((0, 2)).relayout(x, to=cp_over((1, 2, 3), "contiguous"), seq_len=T),
        "go through a ContextParallel over a group that has all of them",
    ),
    (lambda cp, x: cp.relayout(x, to=cp_over((0, 2)), seq_len=T), "x has 4 tokens, and the part that this rank holds"),
    (lambda cp, x: cp.relayout(x[:, :1], to=cp_over((0, 2)), seq_len=4), "and the part that this rank holds of a sequence of 4 is 2"),
    (lambda cp, x: cp.relayout(x, to=cp_over((0, 2)), seq_len=0.5), "seq_len must be at least 1, and an integer"),  # type: ignore[arg-type]  # wrong
    *((lambda cp, x, f=f, kind=kind: f(cp, kind(x)), words) for f in MOVES.values() for kind, words in (
        (lambda _: distribute_tensor(torch.ones(1, 16, 2), init_device_mesh("cpu", (4,)), [Shard(1)]), "a DTensor"),
        (lambda x: torch.nested.nested_tensor([x[0]] * 2, layout=torch.jagged), "a nested one"),
        (Tensor.to_sparse, "a sparse_coo one"),
    )),
)  # fmt: skip


@on_four_ranks
def test_wrong_arguments_are_refused(rank: int) -> None:
    cp, x = ContextParallel(), torch.ones(1, 4, 3)
    for call, message in WRONG:
        with pytest.raises(ValueError, match=message):
            call(cp, x)
    some = cp_over((0, 2))
    uses: list[Callable[[], Any]] = [
        lambda: some.shard(torch.ones(2, T, 3)), lambda: some.cp_rank,
        lambda: some.attention(*[torch.ones(1, 4, 1, 4)] * 3),
    ]  # fmt: skip
    for use in uses if rank not in (0, 2) else ():
        with pytest.raises(ValueError, match=OUTSIDE):
            use()
    assert cp.shift(torch.ones(1, 4), 0).sum() == 4  # nothing was sent


# Derivatives.


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", MOVES)
@on_two_ranks
def test_second_derivatives_are_exact(rank: int, name: str, layout: LayoutSpec) -> None:
    """Compare them with movements and first derivatives, which they are of a linear map."""
    cp, weight = ContextParallel(layout=layout), rank + 1
    move, x = partial(MOVES[name], cp), cp.shard(numbers(0, 1, T, 2)).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        """Return a cubic loss, which each rank weights by another number."""
        return weight * move(x).pow(3).sum()

    def back(upstream: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(move(x), x, upstream)
        return grad

    moved = move(x).detach()
    (own,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(own.detach(), back(3 * weight * moved**2))
    direction = 2 * own.detach()
    expected = back(6 * weight * moved * move(direction))
    (second_grad,) = torch.autograd.grad(own.square().sum(), x)
    torch.testing.assert_close(second_grad, expected)
    _, product = functional.hvp(loss, x.detach(), direction)
    torch.testing.assert_close(product, expected)


@on_two_ranks
def test_derivatives_of_every_order_are_exact() -> None:
    """Also of a loss that all ranks compute whole, on each rank's slice or summed."""
    cp, whole = ContextParallel(), numbers(0, 1, T, 2)
    x, inside = cp.shard(whole).requires_grad_(), cp.positions(T)[None, :, None] < T - 1
    for move, factor in (
        (cp.shift(x, 1), inside), (cp.unshard(x, grad="slice"), 1), (cp.unshard(x, grad="sum"), 2),
    ):  # fmt: skip
        grad = move.pow(4).sum()
        for expected in (4 * x**3, 12 * x**2, 24 * x):
            (grad,) = torch.autograd.grad(grad.sum(), x, create_graph=True)
            torch.testing.assert_close(grad, expected * factor)  # one token is shifted out


@on_two_ranks
def test_batches_of_gradients_are_refused_by_name() -> None:
    cp = ContextParallel()
    compiled: Any = torch.compile(MOVES["shift"], backend="aot_eager", fullgraph=True)
    for call in [*MOVES.values(), compiled]:
        x = cp.shard(numbers(0, 1, T, 2)).requires_grad_()
        out = call(cp, x)
        grads = torch.stack([torch.ones_like(out)] * 2)
        with pytest.raises(ValueError, match=r"^the backward of ring attention, of unshard and of"):
            torch.autograd.grad(out, x, grads, is_grads_batched=True)


# Tensors of every kind.


def _counted(dtype: torch.dtype) -> Tensor:
    """Return a whole tensor ``[2, 8, 4]`` with another number in each place, as far as it can."""
    return torch.arange(64.0).view(2, 8, 4).to(dtype)


def _complex() -> Tensor:
    return torch.complex(_counted(torch.float64), _counted(torch.float64).flip(1) + 1)


#: Dense tensors ``[2, 8, 4]`` of other kinds.
DENSE: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: _complex().conj(), "negative": lambda: _complex().conj().imag,
    "complex": lambda: _complex().to(torch.complex64), "half complex": lambda: _complex().to(torch.complex32),
    "expanded": lambda: torch.arange(8.0)[None, :, None].expand(2, 8, 4),
    "transposed": lambda: _counted(torch.float32).mT.contiguous().mT,
    "reversed": lambda: _counted(torch.float32).transpose(0, 2).contiguous().transpose(0, 2),
    "empty": lambda: torch.zeros(2, 8, 0),
    "inference": torch.inference_mode()(lambda: _counted(torch.float32)),
    **{
        str(dtype): partial(_counted, dtype)
        for dtype in (
            torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint64, torch.float16,
            torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        )
    },
}  # fmt: skip
#: Calls that give back the whole tensor.
WHOLE_MOVES: dict[str, Callable[[ContextParallel, Tensor], Tensor]] = {
    "unshard": lambda cp, x: cp.unshard(x, grad="sum"),
    "shift": lambda cp, x: cp.unshard(cp.shift(x, 0), grad="sum"),
    "halo": lambda cp, x: cp.unshard(cp.join(cp.halo(x, 0, 0).rows), grad="sum"),
    "relayout": lambda cp, x: ContextParallel(layout="contiguous").unshard(cp.relayout(x, to="contiguous"), grad="sum"),
}  # fmt: skip


def _like(x: Tensor) -> Tensor:
    """Return a copy that may be compared: without bits, of a dtype that has operations."""
    x = x.resolve_conj().resolve_neg().clone()
    if x.dtype == torch.complex32:
        return torch.view_as_real(x).float()
    is_wide = x.dtype.is_floating_point and x.dtype.itemsize > 1
    return x if is_wide or x.is_complex() else x.float()


@pytest.mark.parametrize("kind", DENSE)
@on_two_ranks
def test_dense_tensors_of_every_kind_are_exact(kind: str) -> None:
    cp, whole = ContextParallel(), DENSE[kind]()
    x = cp.shard(whole)
    if whole.is_conj():  # `shard` copies: views with the same bits
        x = x.conj().resolve_conj().conj()
    if whole.is_neg():
        x = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert (x.is_conj(), x.is_neg()) == (whole.is_conj(), whole.is_neg())
    for name, move in WHOLE_MOVES.items():
        torch.testing.assert_close(_like(move(cp, x)), _like(whole), msg=f"{name} of {kind}")
    if (
        whole.dtype.itemsize > 1 or not whole.is_floating_point()
    ):  # others have no number to fill in
        filled, like = cp.unshard(cp.shift(x, 1, fill=1), grad="sum"), _like(whole).roll(1, 1)
        like[:, 0] = _like(torch.ones((), dtype=whole.dtype))
        torch.testing.assert_close(_like(filled), like)
        assert filled.dtype == whole.dtype
    if not (whole.is_floating_point() or whole.is_complex()) or whole.dtype.itemsize < 2:
        return
    if whole.dtype == torch.complex32 or whole.is_inference():
        return
    for name, move in WHOLE_MOVES.items():
        leaf = x.detach().resolve_conj().resolve_neg().clone().requires_grad_()
        move(cp, leaf).backward(whole)  # a conjugate, a negative, a view
        assert leaf.grad is not None
        like = _like(cp.shard(whole) * 2)
        torch.testing.assert_close(_like(leaf.grad), like, msg=f"gradient of {name} of {kind}")
    total = ContextParallel(layout="contiguous").unshard(_like(x)[None], dim=0).sum(0)
    weight = nn.Parameter(torch.zeros_like(_like(x)))
    weight.grad = x
    cp.reduce_gradients(nn.ParameterList([weight]))
    torch.testing.assert_close(_like(weight.grad), total)


# To other ranks.

#: Ranks that hold the sequence, and ranks that get it. ``(2, 0, 3, 1)`` is a group in that order.
PAIRS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "to some": ((0, 1, 2, 3), (1, 3)), "from some": ((0, 2), (0, 1, 2, 3)),
    "to one": ((0, 1, 2, 3), (2,)), "from one": ((3,), (0, 1, 2, 3)),
    "another order": ((0, 1, 2, 3), (2, 0, 3, 1)), "among some": ((1, 2), (2,)),
}  # fmt: skip
LAYOUTS: dict[str, tuple[LayoutSpec, LayoutSpec]] = {
    "zigzag-contiguous": ("zigzag", "contiguous"), "striped-zigzag": ("striped", "zigzag"),
}  # fmt: skip
#: Pairs of which this torch can make groups: one may sort the ranks of every group.
NAMES = [
    x for x in PAIRS
    if x != "another order" or "sort_ranks" in inspect.signature(dist.new_group).parameters
]  # fmt: skip


def part(cp: ContextParallel, ranks: tuple[int, ...], rank: int, x: Tensor, dim: int) -> Tensor:
    """Return this rank's part of a whole tensor; ranks outside of the group get no tokens."""
    return cp.shard(x, dim=dim) if rank in ranks else x.narrow(dim, 0, 0).contiguous()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@on_four_ranks
def test_other_ranks_get_the_tokens_of_their_layout(rank: int, layouts: str, name: str) -> None:
    (source_ranks, target_ranks), (layout, to) = PAIRS[name], LAYOUTS[layouts]
    source, target = cp_over(source_ranks, layout), cp_over(target_ranks, to)
    if rank not in {*source_ranks, *target_ranks}:
        return
    before, behind = (
        partial(part, source, source_ranks, rank),
        partial(part, target, target_ranks, rank),
    )
    for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
        move = partial(source.relayout, to=target, dim=dim, seq_len=T)
        whole, grad, tokens = numbers(0, *shape), numbers(1, *shape), torch.arange(T)
        x = before(whole, dim).requires_grad_()
        out = move(x)
        assert torch.equal(out, behind(whole, dim))
        (actual,) = torch.autograd.grad(out, x, behind(grad, dim))
        assert torch.equal(actual, before(grad, dim))
        moved = source.relayout(before(tokens, 0), to=target, dim=0, seq_len=T)
        assert torch.equal(moved, behind(tokens, 0))
        # Where ranks have agreed, rows that change rank are all that is sent.
        own, others = ({*f(tokens, 0).tolist()} for f in (before, behind))
        with Sent() as forward:
            out = move(x)
        with Sent() as backward:
            torch.autograd.grad(out, x, behind(grad, dim))
        sent = [len(rows) * whole.nbytes // T for rows in (own - others, others - own)]
        assert [forward.sent, backward.sent] == sent
