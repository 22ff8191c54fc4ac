"""Gradients: of ``lse`` in each kernel that has it, in memory of their own, summed exactly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ring_core import UnsupportedError
from ring_torch import ContextParallel, ring_attention
from ring_torch.gradients import reduce
from ring_torch.local import LocalRanks

T = 16


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


def _whole() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, T, 2, 8) for _ in range(3)]


def _expected(of_out: bool, of_lse: bool) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in _whole()]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = q @ k.transpose(2, 3) * 8**-0.5
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v
    loss = out.square().sum() * of_out + (lse * torch.arange(T)).sum() * of_lse
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def _found(rank: int, strategy: str, of_out: bool, of_lse: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    cp = ContextParallel(layout="contiguous")
    leaves = [cp.shard(x).requires_grad_() for x in _whole()]
    assert cp.explain(*leaves, return_lse=True).startswith("kernel sdpa")

    def attend(*qkv: Tensor) -> Any:
        return cp.attention(*qkv, return_lse=True, strategy=strategy)

    call: Any = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    out, lse = call(*leaves)
    positions = torch.arange(T)[rank * T // 2 :][: T // 2]
    loss: Any = (out.square().sum() if of_out else 0) + ((lse * positions).sum() if of_lse else 0)
    loss.backward()
    for leaf, x in zip(leaves, _expected(of_out, of_lse), strict=True):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(grad.double(), cp.shard(x), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly(
    only=[
        "ring-expected3-True",
        "ring-expected5-True",
        "gather-expected7-True",
        "gather-expected9-True",
    ]
)
@pytest.mark.parametrize(
    ("strategy", "expected", "compiled"),
    list(product(["ring", "gather"], [(True, False), (False, True), (True, True)], [False, True])),
)
def test_lse_takes_fast_kernels_until_it_has_a_gradient(
    strategy: str, expected: tuple[bool, bool], compiled: bool, pool: LocalRanks
) -> None:
    pool.run(_found, strategy, *expected, compiled)


def _on_one_rank(rank: int) -> None:
    cp = ContextParallel(layout="contiguous")
    leaves = [cp.shard(x).requires_grad_() for x in _whole()]
    out, lse = cp.attention(*leaves, return_lse=True, strategy="ring")
    (out.square().sum() + (lse.sum() if rank else 0)).backward()
    reference = [x.double().requires_grad_() for x in _whole()]
    q, k, v = (x.transpose(1, 2) for x in reference)
    scores = q @ k.transpose(2, 3) * 8**-0.5
    whole = scores.softmax(-1) @ v
    (whole.square().sum() + scores.logsumexp(-1)[..., T // 2 :].sum()).backward()
    for leaf, x in zip(leaves, reference, strict=True):
        assert leaf.grad is not None
        assert x.grad is not None
        torch.testing.assert_close(leaf.grad.double(), cp.shard(x.grad), rtol=1e-4, atol=1e-5)


def test_lse_may_have_a_gradient_on_some_ranks(pool: LocalRanks) -> None:
    pool.run(_on_one_rank)


def test_a_named_kernel_without_that_gradient_says_so() -> None:
    x = torch.ones(1, T, 2, 8, requires_grad=True)
    _, lse = ring_attention(x, x, x, kernel="sdpa", return_lse=True)
    with pytest.raises(UnsupportedError, match="gradient through lse"):
        lse.sum().backward()


def _storages(_: int, strategy: str, dtype: torch.dtype) -> bool:
    leaves = [x.to(dtype).requires_grad_() for x in _whole()]
    ring_attention(*leaves, strategy=strategy).sum().backward()
    grads = [x.grad for x in leaves if x.grad is not None]
    sizes = [x.untyped_storage().nbytes() == x.nbytes for x in grads]
    return all(sizes) and len({x.untyped_storage().data_ptr() for x in grads}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_gradients_share_no_memory(strategy: str, dtype: torch.dtype, pool: LocalRanks) -> None:
    assert pool.run(_storages, strategy, dtype) == [True] * 2


#: Each rank's gradient. The first two sum to a tie, which rounds down to 1; the last breaks the
#: tie, but adds nothing to either of them in their dtype.
HALVES = {torch.bfloat16: (1.0, 2**-8, 2**-17), torch.float16: (1.0, 2**-11, 2**-23)}


def _summed(rank: int, dtype: torch.dtype) -> float:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    model.weight.grad = torch.full((1, 1), HALVES[dtype][rank], dtype=dtype)
    ContextParallel().reduce_gradients(model)
    return float(model.weight.grad)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_gradients_are_summed_in_float32(dtype: torch.dtype) -> None:
    """A sum in the own dtype is 1 in any order; in float32 it is the next larger number."""
    gradients = torch.tensor(HALVES[dtype], dtype=dtype)
    assert all(a + b + c == 1 for a, b, c in permutations(gradients))
    with LocalRanks(3) as ranks:
        assert set(ranks.run(_summed, dtype)) == {1 + torch.finfo(dtype).eps}


def test_buckets_look_at_each_gradient_once() -> None:
    class Counted:
        dtype, device, looked = torch.float32, torch.device("cpu"), 0

        @property
        def nbytes(self) -> int:
            Counted.looked += 1
            return 4

    count = 2000
    buckets: Any = list(reduce._each_bucket([Counted() for _ in range(count)]))  # type: ignore[misc]  # stands in for a tensor
    assert [len(bucket) for bucket in buckets] == [count]
    assert Counted.looked <= 3 * count
