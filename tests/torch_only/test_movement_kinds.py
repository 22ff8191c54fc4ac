"""Movements under ``create_graph=True``, with fill values of every dtype, and dims in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dense import numbers
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ring_core import LayoutSpec
from ring_torch import ContextParallel

T = 24
Move = Callable[[Tensor], Tensor]


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
@on_ranks
def test_second_derivatives_are_exact(rank: int, name: str, layout: LayoutSpec) -> None:
    """Compare a gradient penalty and a Hessian product with those on whole sequences."""
    cp = ContextParallel(layout=layout)
    local, of_whole = MOVES[name]
    whole = numbers(0, 1, T, 2).requires_grad_()
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


@on_ranks
def test_second_derivatives_of_slices_stay_on_their_rank() -> None:
    """Check second derivatives of a loss that all ranks compute whole, on each rank's slice."""
    cp = ContextParallel()
    whole = numbers(0, 1, T, 2).requires_grad_()
    (grad,) = torch.autograd.grad(whole.pow(3).sum(), whole)
    x = cp.shard(whole.detach()).requires_grad_()
    (own,) = torch.autograd.grad(cp.unshard(x, grad="slice").pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(own.detach(), cp.shard(grad))
    (second_grad,) = torch.autograd.grad(own.sum(), x)
    torch.testing.assert_close(second_grad, cp.shard(6 * whole.detach()))


@on_ranks
def test_derivatives_of_every_order_are_exact() -> None:
    cp, whole = ContextParallel(), numbers(0, 1, T, 2)
    x = cp.shard(whole).requires_grad_()
    (first_grad,) = torch.autograd.grad(cp.shift(x, 1).pow(4).sum(), x, create_graph=True)
    (two,) = torch.autograd.grad(first_grad.sum(), x, create_graph=True)
    (three,) = torch.autograd.grad(two.sum(), x)
    inside = cp.positions(T) < T - 1  # the last token is shifted out of the sequence
    torch.testing.assert_close(three, 24 * x.detach() * inside[None, :, None])


@on_ranks
def test_batches_of_gradients_are_refused_by_name() -> None:
    cp = ContextParallel()
    calls: list[Move] = [move(cp) for move, _ in MOVES.values()]
    compiled = torch.compile(MOVES["shift"][0](cp), backend="aot_eager", fullgraph=True)
    for call in [*calls, compiled]:
        x = cp.shard(numbers(0, 1, T, 2)).requires_grad_()
        out = call(x)
        grads = torch.stack([torch.ones_like(out)] * 2)
        with pytest.raises(ValueError, match=r"^the backward of ring attention, of unshard and of"):
            torch.autograd.grad(out, x, grads, is_grads_batched=True)


@on_ranks
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


@on_ranks
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
@on_ranks
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
