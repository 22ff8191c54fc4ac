"""Movements of slices, compared with one process, for tensors of every kind and to other ranks.

And sequences of any length: from ``shard(pad=True)`` to ``unshard(seq_len=)``.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from functools import partial
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from cases import RANDOM
from dense import numbers, numbers_of, sdpa
from messages import Sent
from on_ranks import on_four_ranks, on_ranks, on_three_ranks, on_two_ranks
from refused import refused
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import ring_torch
from ring_core import ChunkLayout, Layout, LayoutSpec, RankMismatchError
from ring_torch import ContextParallel
from ring_torch.local import LocalRanks
from ring_torch.sharding import UnshardGrad
from ring_torch.training import sum_by_sequence

T = 48
CHUNKS = RANDOM | {1: ChunkLayout(((0, 1, 2),))}
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
    # Along one dimension each other shift is in documents, and along the next one those between.
    for turn, n in enumerate((0, 1, -1, -2, 5, 25, -37, 60), dim + length):
        offsets = (None, DOCUMENTS if length == T else half)[turn % 2]
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
    shapes += [(1, (2, length, 3)) for length in range(1, 3 * size + 1, max(1, size - 1))]
    for dim, shape in shapes:
        for move, of_whole in _moves(cp, size, shape[dim], dim):
            whole = numbers(0, *shape).requires_grad_()
            results = move(cp.shard(whole, dim=dim, pad=True, fill=7)), of_whole(whole)
            assert torch.equal(*results), (dim, shape, move)
            by_way = (torch.autograd.grad(y, whole, numbers(rank, *y.shape)) for y in results)
            grads = torch.stack([grad for (grad,) in by_way])
            dist.all_reduce(grads)
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 2), (0, 70)])
@on_ranks
def test_a_halo_says_what_it_holds(left: int, right: int) -> None:
    """Documents and widths are as documented; own tokens come back by ``join``."""
    size = dist.get_world_size()
    for cp in (ContextParallel(layout=x) for x in layouts(size) if x != "striped"):
        runs = cp.layout_of(T).num_runs
        for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
            x = cp.shard(numbers(0, *shape), dim=dim)
            rows, positions, documents = cp.halo(x, left, right, dim=dim, cu_seqlens=DOCUMENTS)
            width = left + T // size // runs + right
            assert positions.shape == documents.shape == ((shape[0] if dim else 1) * runs, width)
            ends = torch.tensor(DOCUMENTS).unique()
            of_tokens = torch.bucketize(positions, ends, right=True) - 1
            assert torch.equal(documents, of_tokens.where(positions >= 0, -1))
            own = rows.narrow(dim % len(shape) if dim else 1, left, width - left - right)
            assert torch.equal(cp.join(own, dim=dim), x)


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

    steps: list[tuple[Any, ...]] = [(n, (0, stop, T), 1) for n, stop in ((2, 5), (3, 9), (5, 31))]
    for calls in (steps, [(1, None, dim) for dim in (0, 2, -2)]):
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
    "dtype": (SHIFT, _move("shift", 1, change=Tensor.double), "dtype is 'float(32|64)' there"),
    "gradient": (SHIFT, _move("shift", 1, change=Tensor.requires_grad_), "needs_grad is (True|False)"),
    "left": (HALO, _move("halo", 2, 1), "left is [02] there"),
    "right": (HALO, _move("halo", 0, 2), "right is [12] there"),
    "halo's documents": (HALO, _move("halo", 0, 1, **OTHER), "cu_seqlens is "),
    "target": (TO_STRIPED, _move("relayout", to="contiguous"), "to is '(striped|contiguous)' there"),
    "relayout's dim": (TO_STRIPED, _move("relayout", to="striped", dim=2), "dim is [12] there"),
    "length": (TO_STRIPED, _move("relayout", to="striped", seq_len=12), "tokens is (12|None) there"),
    "a longer slice": (UNSHARD, _move("unshard", change=lambda x: x.repeat(1, 2, 1)), r"shape is \[1, [48], 4\] there and \[1, [48], 4\]"),
    "a slice's dtype": (UNSHARD, _move("unshard", change=Tensor.double), "dtype is 'float(32|64)' there"),
    "a slice's dim": (UNSHARD, _move("unshard", dim=2), "dim is [12] there"),
    "grad": (UNSHARD, _move("unshard", change=Tensor.requires_grad_, grad="sum"), "sums_gradients is (True|False) there"),
    "a new shape": (AGREED, _move("unshard", agreed=2, change=lambda x: x.repeat(1, 2, 1)), r"shape is \[1, [48], 4\] there"),
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
    call, other, message = UNLIKE[name]
    # Ranks that have agreed before wait for one that fails until the timeout.
    group: Any = dist.new_group(timeout=timedelta(seconds=5 if call is AGREED else 20))
    cp, x = ContextParallel(group), torch.ones(1, 4, 4)
    refused(message, other if rank == 1 else call, cp, x, error=RankMismatchError)
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
    "unshard a slice": lambda cp, x: cp.unshard(x, grad="slice"),
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
        refused(message, call, cp, x)
    some = cp_over((0, 2))
    uses: list[Callable[[], Any]] = [
        lambda: some.shard(torch.ones(2, T, 3)), lambda: some.cp_rank,
        lambda: some.attention(*[torch.ones(1, 4, 1, 4)] * 3),
    ]  # fmt: skip
    for use in uses if rank not in (0, 2) else ():
        refused(OUTSIDE, use)
    assert cp.shift(torch.ones(1, 4), 0).sum() == 4  # nothing was sent


# Derivatives.


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", MOVES)
@on_two_ranks
def test_derivatives_of_every_order_are_exact(rank: int, name: str, layout: LayoutSpec) -> None:
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
    (second_grad,) = torch.autograd.grad(own.square().sum(), x, create_graph=True)
    torch.testing.assert_close(second_grad.detach(), expected)
    (third_grad,) = torch.autograd.grad(second_grad.sum(), x)
    both = torch.stack([(third_grad * x).sum(), 3 * second_grad.sum()]).detach()
    dist.all_reduce(both)
    torch.testing.assert_close(*both)  # Euler's theorem, of a cubic
    _, product = functional.hvp(loss, x.detach(), direction)
    torch.testing.assert_close(product, expected)


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
    cp, even, whole = ContextParallel(), ContextParallel(layout="contiguous"), DENSE[kind]()
    #: Calls that give back the whole tensor.
    moves: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: cp.unshard(x, grad="sum"),
        lambda x: cp.unshard(cp.shift(x, 0), grad="sum"),
        lambda x: cp.unshard(cp.join(cp.halo(x, 0, 0).rows), grad="sum"),
        lambda x: even.unshard(cp.relayout(x, to="contiguous"), grad="sum"),
    )
    x = cp.shard(whole)
    if whole.is_conj():  # `shard` copies: views with the same bits
        x = x.conj().resolve_conj().conj()
    if whole.is_neg():
        x = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert (x.is_conj(), x.is_neg()) == (whole.is_conj(), whole.is_neg())
    for move in moves:
        torch.testing.assert_close(_like(move(x)), _like(whole))
    is_float, is_wide = whole.dtype.is_floating_point, whole.dtype.itemsize > 1
    if is_wide or not is_float:  # others have no number to fill in
        filled, like = cp.unshard(cp.shift(x, 1, fill=1), grad="sum"), _like(whole).roll(1, 1)
        like[:, 0] = _like(torch.ones((), dtype=whole.dtype))
        torch.testing.assert_close(_like(filled), like)
        assert filled.dtype == whole.dtype
    has_gradient = (is_float and is_wide) or whole.dtype in (torch.complex64, torch.complex128)
    if not has_gradient or whole.is_inference():
        return
    for move in moves:
        leaf = x.detach().resolve_conj().resolve_neg().clone().requires_grad_()
        move(leaf).backward(whole)  # a conjugate, a negative, a view
        assert leaf.grad is not None
        torch.testing.assert_close(_like(leaf.grad), _like(cp.shard(whole) * 2))
    total = even.unshard(_like(x)[None], dim=0).sum(0)
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


# Sequences of any length.


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@on_three_ranks
def test_there_and_back(rank: int, layout: Any) -> None:
    cp = ContextParallel(layout=layout)
    for length in range(1, 3 * cp.cp_size + 1):
        x = numbers_of(2, length, 5).requires_grad_()
        tokens = int(cp.layout_of(length, pad=True).num_tokens(rank))
        for dim, y in ((1, x), (-2, x), (0, x.transpose(0, 1))):
            slice_of_rank = cp.shard(y, dim=dim, pad=True, fill=-3.5)
            rows = slice_of_rank.movedim(dim, 0)
            assert rows[tokens:].eq(-3.5).all() and rows.is_leaf is False
            assert torch.equal(cp.unshard(slice_of_rank.detach(), dim=dim, seq_len=length), y)
        positions = cp.positions(length)
        own = cp.shard(torch.arange(length), dim=0, pad=True, fill=-1)
        assert torch.equal(own[:tokens], positions[:tokens])
        assert (positions[tokens:] >= length).all()
        # The gradient of padding is dropped, for each ``grad=`` of ``unshard``.
        weights = numbers_of(2, length, 5)
        factors: dict[UnshardGrad, int] = {"slice": 1, "sum": cp.cp_size}
        for grad, factor in factors.items():
            whole = cp.unshard(cp.shard(x, pad=True), grad=grad, seq_len=length)
            (grad_of_x,) = torch.autograd.grad((whole * weights).sum(), x)
            dist.all_reduce(grad_of_x)
            torch.testing.assert_close(grad_of_x, factor * weights)
        (grad_of_x,) = torch.autograd.grad(cp.shard(x, pad=True).sum(), x)
        dist.all_reduce(grad_of_x)
        assert grad_of_x.eq(1).all()
    for dtype, fill in ((torch.int64, -100), (torch.bool, False)):
        padded = cp.shard(torch.ones(1, 7, dtype=dtype), pad=True, fill=fill)
        assert padded.dtype == dtype and (padded.eq(1) | padded.eq(fill)).all()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@on_three_ranks
def test_a_padded_shard_is_known_again(layout: Any) -> None:
    """Shift, read neighbours and take losses of shards whose padding nobody names.

    The class is a length that a call reads off a shard, and that is padding's: where the shard is
    the very tensor that ``shard(pad=True)`` returned, its own length is known.
    """
    cp = ContextParallel(layout=layout)
    length, padded = 13, Layout.padded(layout, 13, cp.cp_size).padded_len
    tokens = torch.arange(1, length + 1)[None]
    labels = pad(tokens[:, 1:], (0, 1), value=-100)

    def shift(x: Tensor) -> Tensor:
        return cp.shift(x, -1, fill=-100)

    # Graphs know the length, not the layout: one layout is compiled.
    in_graph: Any = partial(torch.compile, fullgraph=True, backend="aot_eager")
    compiled: Any = in_graph if layout == "zigzag" else lambda function: function

    shard = cp.shard(tokens, pad=True)
    for moved in (
        shift(shard), compiled(shift)(shard), compiled(lambda x: shift(cp.shard(x, pad=True)))(tokens), shift(deepcopy(shard)),
        shift(shard[:]).masked_fill(cp.positions(length) >= length - 1, -100),  # a view is another tensor
    ):  # fmt: skip
        assert torch.equal(cp.unshard(moved, seq_len=length), labels), moved
        assert (cp.unshard(moved)[:, length:] == -100).all()
    # Other tensors are as long as they are, also in the graph that was compiled for this one.
    whole = torch.arange(padded)[None]
    full = compiled(shift)(cp.shard(whole))
    assert torch.equal(cp.unshard(full)[:, :-1], whole[:, 1:])
    if layout != "striped":
        rows = cp.halo(cp.shard(tokens[..., None], pad=True, fill=7), 1, 1)
        assert rows.positions.max() < length and not rows.rows[rows.positions < 0].any()
    logits = numbers_of(1, length, 20)
    part, mine = cp.shard(logits, pad=True), cp.shard(tokens, pad=True, fill=3)
    losses = torch.stack([
        ring_torch.cross_entropy(cp, part, mine),
        ring_torch.linear_cross_entropy(cp, part, torch.eye(20).double(), mine),
    ])  # fmt: skip
    dist.all_reduce(losses)
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[0])
    torch.testing.assert_close(losses, expected.expand(2))
    # A length that is named counts, and one along another dimension, or of other ranks, does not.
    alone = ContextParallel(dist.new_subgroups(1)[0])
    with cp.whole():
        assert torch.equal(cp.shift(shard, 0), shard) and torch.equal(alone.shift(shard, 0), shard)
        assert cp.whole_length(tokens) == length
    assert torch.equal(alone.shift(shard, 0), shard)
    q = alone.shard(numbers_of(1, length, 2, 4))  # one rank splits any length
    torch.testing.assert_close(alone.attention(q, q, q, causal=True), sdpa(q, q, q, is_causal=True))
    assert torch.equal(cp.shift(shard, 0, seq_len=padded), shard)
    assert cp.whole_length(shard) == length and cp.whole_length(shard * 1) == padded
    assert cp.whole_length(shard.shape[1], seq_len=length) == length
    assert cp.whole_length(shard[0], dim=0, seq_len=length) == length
    refused("seq_len=30 is the length of the whole sequence", cp.whole_length, shard, seq_len=30)
    both = cp.shard(numbers_of(length, padded), dim=0, pad=True)[:, : padded // cp.cp_size]
    assert torch.equal(cp.shift(both, 0), both)


class _Attends(nn.Module):
    """A module that shards its input itself, or is given shards, and attends by torch's SDPA."""

    def __init__(self, split: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
        super().__init__()
        self.split, self.options = split, options

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return scaled_dot_product_attention(q, q, q, **self.options)


@on_three_ranks
def test_padding_that_a_replaced_module_sees_is_refused() -> None:
    cp, length = ContextParallel(), 13
    x, shard = numbers_of(1, length, 8), partial(cp.shard, pad=True)
    real = cp.positions(length) < length
    ways: list[tuple[dict[str, Any], tuple[int, ...] | None]] = [
        ({}, None), ({"is_causal": True}, None), ({"attn_mask": real[None, None, None]}, None),
        ({}, (0, length)), ({}, (0, 5, length)),
    ]  # fmt: skip
    for (options, documents), inside in product(ways, (True, False)):
        split, batch = (shard, x) if inside else (lambda y: y, shard(x))
        for compiles in {False, not options and documents != (0, length) and inside}:
            torch._dynamo.reset()  # each model is a graph of its own
            model = _Attends(split, options)
            ring_torch.replace_sdpa(model, cp, documents=documents)
            call: Any = torch.compile(model, backend="aot_eager") if compiles else model
            if not options and documents is None:
                refused("the call would see the padding", call, batch, error=Exception)
                assert cp._split.thread.padded is None
                continue
            out = cp.unshard(call(batch), dim=2, seq_len=length)
            q, causal = x.unflatten(-1, (2, -1)).transpose(1, 2), "is_causal" in options
            want = [
                scaled_dot_product_attention(*(q[:, :, a:b],) * 3, is_causal=causal)
                for a, b in pairwise(documents or (0, length))
            ]
            torch.testing.assert_close(out, torch.cat(want, dim=2))
    # Whole lengths, behind one with padding, and local modules, are as before.
    model = _Attends(lambda y: y, {})
    ring_torch.replace_sdpa(model, cp)
    full = numbers_of(1, cp.cp_size * 6, 8)
    assert cp.unshard(model(cp.shard(full)), dim=2).shape[2] == full.shape[1]
    model = _Attends(shard, {})
    ring_torch.replace_sdpa(model, cp, local=["*"])
    assert model(x).isfinite().all()


@on_three_ranks
def test_padding_of_another_thread_is_not_seen() -> None:
    """Attend while another thread's forward, of a padded sequence, is under way."""
    cp, length = ContextParallel(), 13
    x, full = numbers_of(1, length, 8), numbers_of(1, 6 * cp.cp_size, 8)
    both = threading.Barrier(2, timeout=30)

    def enter(y: Tensor) -> Tensor:
        both.wait()
        both.wait()  # until the other forward is done
        return y

    def wait(y: Tensor) -> Tensor:
        thread.start()
        both.wait()
        return y

    model, beside = _Attends(wait, {}), _Attends(enter, {"is_causal": True})
    for each in (model, beside):
        ring_torch.replace_sdpa(each, cp)
    thread = threading.Thread(target=beside, args=(cp.shard(x, pad=True),))
    try:
        out = cp.unshard(model(cp.shard(full)), dim=2)
    finally:
        both.wait()
        thread.join()
    q = full.unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("strategy", ["ring", "balanced", "gather", "ulysses"])
@on_three_ranks
def test_checks_see_no_sinks_in_padding(strategy: Any) -> None:
    """Padded calls of every kind are cases of the table; these are checked."""
    cp = ContextParallel(layout="contiguous" if strategy == "balanced" else "zigzag")
    for length in (1, 7):
        qkv = (cp.shard(numbers_of(1, length, n, 4), pad=True, fill=9) for n in (6, 3, 3))
        leaves = [x.requires_grad_() for x in qkv]
        with ring_torch.check(every=1):
            out = cp.attention(*leaves, sinks=numbers_of(6), seq_len=length, strategy=strategy)
            out.sum().backward()


@pytest.mark.parametrize(
    ("layout", "length"), [("zigzag", 17), ("contiguous", 19), ("striped", 23)]
)
@on_three_ranks
def test_the_error_says_how_to_pad(layout: Any, length: int) -> None:
    cp, x = ContextParallel(layout=layout), numbers_of(1, length, 2, 8)
    to = cp.layout_of(length, pad=True).padded_len
    how = rf"pad to {to} with zeros at the end, as shard\(x, pad=True\) does, and pass seq_len={length}"
    refused(how, cp.shard, x)
    q = cp.shard(x, pad=True)
    assert torch.equal(q, cp.shard(pad(x, (0, 0, 0, 0, 0, to - length))))
    assert f"seq_len={length} (padded to {to})" in cp.explain(q, q, q, seq_len=length)
    refused(r"pad to 1$", ContextParallel(dist.new_subgroups(1)[0]).layout_of, 0)
