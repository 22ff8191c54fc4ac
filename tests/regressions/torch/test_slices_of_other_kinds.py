"""Movements and ``unshard`` take every dense tensor, and refuse the others by name.

Refused, with nothing sent, are DTensors, sparse and nested tensors. Dense ones of any dtype, layout
in memory or lazy form (torch keeps conjugates and negatives as views with a bit) move exactly, and
so do their gradients; backends know few dtypes and none of these bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ring_torch import ContextParallel
from ring_torch.local import LocalRanks

CALLS: dict[str, Callable[[ContextParallel, Tensor], object]] = {
    "shift": lambda cp, x: cp.shift(x, 1), "halo": lambda cp, x: cp.halo(x, 1, 0),
    "relayout": lambda cp, x: cp.relayout(x, to="contiguous"),
    "unshard": lambda cp, x: cp.unshard(x),
}  # fmt: skip


def _refused(_: int) -> list[str]:
    cp, whole, messages = ContextParallel(), torch.ones(1, 8, 2), []
    mesh = init_device_mesh("cpu", (2,))
    kinds = {
        "a DTensor": distribute_tensor(whole, mesh, [Shard(1)]),
        "a sparse_coo one": whole[:, :4].to_sparse(),
        "a nested one": torch.nested.nested_tensor([whole[0, :4]] * 2, layout=torch.jagged),
    }
    for name, call in CALLS.items():
        for words, x in kinds.items():
            try:
                call(cp, x)
            except ValueError as error:
                messages += [] if words in str(error) else [f"{name}, {words}: {error}"]
            else:
                messages.append(f"{name}, {words}: no error")
        call(cp, whole[:, :4])  # the group stays usable
    return messages


def test_other_kinds_of_tensors_are_refused() -> None:
    with LocalRanks(2, timeout=20) as ranks:
        assert ranks.run(_refused) == [[], []]


def _numbers(dtype: torch.dtype) -> Tensor:
    """Return a whole tensor ``[2, 8, 4]`` with another number in each place, as far as it can."""
    return torch.arange(64.0).view(2, 8, 4).to(dtype)


def _complex() -> Tensor:
    return torch.complex(_numbers(torch.float64), _numbers(torch.float64).flip(1) + 1)


#: Dense tensors ``[2, 8, 4]`` of other kinds.
DENSE: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: _complex().conj(),
    "negative": lambda: _complex().conj().imag,
    "complex": lambda: _complex().to(torch.complex64),
    "half complex": lambda: _complex().to(torch.complex32),
    "expanded": lambda: torch.arange(8.0)[None, :, None].expand(2, 8, 4),
    "transposed": lambda: _numbers(torch.float32).mT.contiguous().mT,
    "empty": lambda: torch.zeros(2, 8, 0),
    "inference": torch.inference_mode()(lambda: _numbers(torch.float32)),
    **{
        str(dtype): partial(_numbers, dtype)
        for dtype in (
            torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint64, torch.bfloat16,
            torch.float8_e4m3fn, torch.float8_e5m2,
        )
    },
}  # fmt: skip
#: Calls that give back the whole tensor.
MOVES: dict[str, Callable[[ContextParallel, Tensor], Tensor]] = {
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


def _moved(_: int, kind: str) -> None:
    cp, whole = ContextParallel(), DENSE[kind]()
    x = cp.shard(whole)
    if whole.is_conj() or whole.is_neg():  # `shard` copies: views with the same bits
        x = x.conj().resolve_conj().conj() if whole.is_conj() else _negative(x)
        assert x.is_conj() or x.is_neg()
    for name, move in MOVES.items():
        torch.testing.assert_close(
            _like(move(cp, x)), _like(whole), msg=partial("{} {}".format, name)
        )
    if not (whole.is_floating_point() or whole.is_complex()) or whole.dtype.itemsize < 2:
        return
    if whole.dtype == torch.complex32 or whole.is_inference():
        return
    for name, move in MOVES.items():
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


def _negative(x: Tensor) -> Tensor:
    """Return numbers as torch's lazy negative of their negatives."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    with LocalRanks(2, timeout=20) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", DENSE)
def test_dense_tensors_of_every_kind_are_exact(kind: str, pool: LocalRanks) -> None:
    pool.run(_moved, kind)
