"""Gradients: of ``lse`` in each kernel that has it, in memory of their own, of the first order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from dense import numbers, sdpa
from on_ranks import on_two_ranks
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import functional

from ring_core import UnsupportedError
from ring_core.reference import attention, attention_grads
from ring_torch import ContextParallel, compat, ring_attention

T = 16
QKV = [numbers(seed, 1, T, 2, 8) for seed in range(3)]

#: Factors of the gradients of ``out``, and of those of ``lse`` on each rank.
UPSTREAM = {
    "out": (1, (0, 0)), "lse": (0, (1, 1)), "both": (1, (1, 1)), "lse on a rank": (1, (0, 1)),
}  # fmt: skip


@pytest.mark.nightly(only=[
    "ring-lse-True", "ring-both-True", "gather-lse-True", "gather-both-False",
])  # fmt: skip
@pytest.mark.parametrize(("strategy", "upstream", "compiled"), [
    *product(["ring", "gather"], ["out", "lse", "both"], [False, True]), ("ring", "lse on a rank", False),
])  # fmt: skip
@on_two_ranks
def test_lse_takes_fast_kernels_until_it_has_a_gradient(
    rank: int, strategy: str, upstream: str, compiled: bool
) -> None:
    torch._dynamo.reset()
    cp, (of_out, of_lse) = ContextParallel(layout="contiguous"), UPSTREAM[upstream]
    leaves = [cp.shard(x.float()).requires_grad_() for x in QKV]
    assert cp.explain(*leaves, return_lse=True).startswith("kernel sdpa")

    def attend(*qkv: Tensor) -> Any:
        return cp.attention(*qkv, return_lse=True, strategy=strategy)

    call: Any = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    out, lse = call(*leaves)
    positions = torch.arange(T).float()
    parts = [out.square().sum()] * of_out + [(lse * cp.shard(positions, dim=0)).sum()] * of_lse[
        rank
    ]
    torch.stack(parts).sum().backward()
    qkv = [x.numpy() for x in QKV]
    dlse = positions.unflatten(0, (2, -1)) * torch.tensor(of_lse)[:, None]
    grads = attention_grads(
        2 * of_out * attention(qkv[0], qkv[1], qkv[2])[0], qkv[0], qkv[1], qkv[2],
        dlse=dlse.flatten().expand(1, 2, T).double().numpy(),
    )  # fmt: skip
    for leaf, x in zip(leaves, grads[:3], strict=True):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        like = cp.shard(torch.from_numpy(x))
        torch.testing.assert_close(grad.double(), like, rtol=1e-4, atol=1e-5)


def test_a_named_kernel_without_that_gradient_says_so() -> None:
    x = torch.ones(1, T, 2, 8, requires_grad=True)
    _, lse = ring_attention(x, x, x, kernel="sdpa", return_lse=True)
    with pytest.raises(UnsupportedError, match="gradient through lse"):
        lse.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@on_two_ranks
def test_gradients_share_no_memory(strategy: str, dtype: torch.dtype) -> None:
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in QKV]
    ring_attention(*leaves, strategy=strategy).sum().backward()
    grads = [x.grad for x in leaves if x.grad is not None]
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in grads)
    assert len({x.untyped_storage().data_ptr() for x in grads}) == 3


Attend = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """The way a call is made, as a function of ``q``."""

    strategy: str = "ring"
    backend: str | None = None  # for torch.compile
    scale: float = 1.0  # multiplies q within the graph: of a product no leaf is saved

    def attend(self, q: Tensor) -> Tensor:
        """Return this rank's part of causal attention."""
        k, v = (ContextParallel().shard(x) for x in QKV[1:])
        if self.strategy == "compat":
            out: Tensor = compat.zigzag_ring_flash_attn_func(q, k, v, causal=True)
            return out
        strategy, scale = self.strategy, self.scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q if scale == 1 else q * scale
            return ring_attention(q, k, v, causal=True, layout="zigzag", strategy=strategy)

        if self.backend is not None:
            torch.compiler.reset()
            attend = torch.compile(attend, backend=self.backend, fullgraph=True)
        return attend(q, k, v)

    def check(self, kind: str = "plain") -> None:
        """Check that a call and its gradient equal those of full attention."""
        cp, q = ContextParallel(), QKV[0].clone().requires_grad_()
        whole = sdpa(q * self.scale, *QKV[1:], is_causal=True)
        (dq,) = torch.autograd.grad(whole.sum(), q)
        shard = cp.shard(q.detach()).requires_grad_()
        out = ALLOWED[kind](self.attend, shard)
        torch.testing.assert_close((out, shard.grad), (cp.shard(whole.detach()), cp.shard(dq)))


WAYS = {
    "ring": Way(), "gather": Way("gather"), "ulysses": Way("ulysses"), "compat": Way("compat"),
    "eager graph": Way(backend="eager"), "aot graph": Way(backend="aot_eager"),
    "eager graph of a product": Way(backend="eager", scale=2.0),
    "aot graph of a product": Way(backend="aot_eager", scale=2.0),
}  # fmt: skip


def _penalty(attend: Attend, q: Tensor) -> None:
    out = attend(q)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (out.sum() + dq.pow(2).sum()).backward()


def _accumulated(attend: Attend, q: Tensor) -> None:
    torch.autograd.backward([attend(q).sum()], create_graph=True)
    assert q.grad is not None
    q.grad.pow(2).sum().backward()


def _by(transform: Any, *more: Any) -> Callable[[Attend, Tensor], Any]:
    """Return a derivative of the sum of squares by a function of torch.autograd.functional."""
    return lambda attend, q: transform(lambda x: attend(x).pow(2).sum(), q.detach(), *more)


ONES = torch.ones(1, T // 2, 2, 8, dtype=torch.float64)
SECOND: dict[str, Callable[[Attend, Tensor], Any]] = {
    "penalty": _penalty, "accumulated": _accumulated, "hvp": _by(functional.hvp, ONES),
    "vhp": _by(functional.vhp, ONES), "hessian": _by(functional.hessian),
    "jvp": lambda attend, q: functional.jvp(attend, q.detach(), ONES),
}  # fmt: skip


def _vmap(attend: Attend, q: Tensor) -> None:
    out, douts = attend(q), torch.stack([ONES, ONES])
    torch.func.vmap(lambda dout: torch.autograd.grad(out, q, dout))(douts)


BATCHED: dict[str, Callable[[Attend, Tensor], Any]] = {
    "is_grads_batched": lambda attend, q: torch.autograd.grad(attend(q), q, torch.stack([ONES, ONES]), is_grads_batched=True),
    "vmap": _vmap,
    "jacobian": lambda attend, q: functional.jacobian(attend, q.detach(), vectorize=True),
}  # fmt: skip


def _backward(out: Tensor) -> Tensor:
    out.sum().backward()
    return out.detach()


def _twice(attend: Attend, q: Tensor) -> Tensor:
    out = attend(q)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    return _backward(out)


def _vjp(attend: Attend, q: Tensor) -> Tensor:
    out: Tensor
    out, q.grad = functional.vjp(attend, q.detach(), ONES)
    return out


def _rows(attend: Attend, q: Tensor) -> Tensor:
    rows = functional.jacobian(lambda q: attend(q).sum(dim=(0, 2, 3)), q.detach())
    q.grad = rows.sum(dim=0)
    return attend(q).detach()


ALLOWED: dict[str, Callable[[Attend, Tensor], Tensor]] = {
    "plain": lambda attend, q: _backward(attend(q)), "twice": _twice, "vjp": _vjp, "jacobian": _rows,
}  # fmt: skip


#: Errors of Ring, and of torch.
SECONDS = (
    "UnsupportedError: .*second derivative.*create_graph",
    "RuntimeError: torch.compile with aot_autograd does not .* double backward",
)
BATCHES = (
    "UnsupportedError: .*is_grads_batched",
    "RuntimeError: .*a compiled backward function within vmap",
)


def _pairs(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return all ways with the first kind, and all kinds with a plain call and with a graph."""
    first, *rest = kinds
    return [(way, first) for way in WAYS] + [
        (way, kind) for way in ("ring", "aot graph of a product") for kind in rest
    ]


@pytest.mark.nightly(only=[
    *(f"aot graph of a product-{x}" for x in ("hessian", "jvp", "hvp", "accumulated", "vhp", "jacobian", "vmap")),
    *(f"{graph} graph of a product-{x}" for graph in ("eager", "aot") for x in ("penalty", "is_grads_batched")),
])  # fmt: skip
@pytest.mark.parametrize(("way", "asked"), [*_pairs(SECOND), *_pairs(BATCHED)])
@on_two_ranks
def test_other_derivatives_are_refused(way: str, asked: str) -> None:
    """Second derivatives and batches of gradients are, and the next call is exact."""
    kinds, (match, by_torch) = (BATCHED, BATCHES) if asked in BATCHED else (SECOND, SECONDS)
    if way.startswith("aot"):  # torch is the first to refuse some there
        match += f"|{by_torch}"
    q = ContextParallel().shard(QKV[0]).requires_grad_()
    with pytest.raises((ValueError, RuntimeError)) as error:
        kinds[asked](WAYS[way].attend, q)
    message = f"{type(error.value).__name__}: {error.value}"
    assert re.search(match, message), message
    WAYS[way].check()


@pytest.mark.nightly(only=[f"aot graph of a product-{x}" for x in ("jacobian", "vjp", "twice")])
@pytest.mark.parametrize(("way", "kind"), _pairs(ALLOWED))
@on_two_ranks
def test_first_derivatives_are_exact(way: str, kind: str) -> None:
    WAYS[way].check(kind)


@on_two_ranks
def test_compiled_autograd_makes_one_graph_of_a_compiled_forward() -> None:
    """It refuses an eager forward; a compiled one is exact."""
    q, messages = ContextParallel().shard(QKV[0]).requires_grad_(), []
    for way in (Way(), Way(backend="aot_eager")):
        torch.compiler.reset()  # graphs of other tests have breaks, and would be reused
        out = way.attend(q)
        (expected,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        try:
            with compiled_autograd._enable(compiler):
                out.sum().backward()
        except RuntimeError as error:
            messages.append(str(error))
    torch.testing.assert_close(q.grad, expected, rtol=0, atol=0)
    (message,) = messages
    assert "With fullgraph=True compile what calls attention" in message
