"""Calls on one rank: one launch each way, no sums, and the numbers of the general code path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import dense, errors
from torch import Tensor

from ring_core import Mask
from ring_torch import prepare, ring_attention
from ring_torch.compat import zigzag_ring_flash_attn_func
from ring_torch.kernels.eager import EagerKernel
from ring_torch.strategies.ring import Ring

T = 48
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (T, {"causal": True}),
    "window": (T, {"window": (5, 2)}),
    "documents": (T, {"causal": True, "cu_seqlens": (0, 7, 8, 30, T)}),
    "predicate": (T, {"mask": Mask(predicate=lambda i, j: (i - j) % 3 == 0)}),
    "segments": (T, {"segment_ids": torch.arange(T, dtype=torch.int32)[None] // 9 - 1}),
    "bias": (T, {"causal": True, "bias": torch.randn(1, 2, T, T, dtype=torch.float64)}),
    "dropout": (T, {"dropout_p": 0.3, "dropout_seed": 5}),
    "fewer keys": (20, {"mask": Mask(causal=True)}),
    "keys that nothing sees": (T + 30, {"window": (4, 0)}),
}


def _run(keys: int, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    q = torch.randn(1, T, 2, 8, dtype=torch.float64)
    k, v = (torch.randn(1, keys, 2, 8, dtype=torch.float64) for _ in range(2))
    kwargs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "bias" in kwargs:
        leaves.append(kwargs["bias"].requires_grad_())
    call: Any = ring_attention
    out, lse = call(q, k, v, return_lse=True, kernel="eager", **kwargs)
    return [out, lse, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_the_loops_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = _run(*CALLS[name])
    assert all(x.is_contiguous() for x in results)
    monkeypatch.setattr(
        prepare,
        "resolve",
        lambda _, resolution, **__: Ring.of(resolution.program, resolution.ranks.rank),
    )
    prepare._prepare.cache_clear()
    for x, y in zip(results, _run(*CALLS[name]), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_writes_where_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see nothing get their defined result, all other rows what the kernel wrote."""
    expected, attend = _run(*CALLS[name]), EagerKernel.attend

    def in_place(self: EagerKernel, *args: Any) -> Any:
        result, destination = attend(self, *args[:4]), args[4]
        for x, where in zip(result, destination, strict=True):
            where.copy_(x)
        return destination

    monkeypatch.setattr(EagerKernel, "attend", in_place)
    for x, y in zip(_run(*CALLS[name]), expected, strict=True):
        assert torch.equal(x, y)


def test_one_launch_each_way_and_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name in ("attend", "attend_into", "grads", "grads_into"):
        method = getattr(EagerKernel, name)

        def spy(*args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
            launched.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(EagerKernel, name, spy)
    monkeypatch.setattr(Ring, "forward", None)
    monkeypatch.setattr(Ring, "backward", None)
    x = torch.randn(1, T, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    ring_attention(x, x, x, causal=True, kernel="eager").sum().backward()
    assert [name for name in launched if name in {"attend", "grads"}] == ["attend", "grads"]


def test_an_lse_that_is_not_asked_for_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """``lse`` is asked for only where a caller or the backward gets it, else it is not read."""
    attend, asked = EagerKernel.attend, list[bool]()

    def careless(self: EagerKernel, *args: Any) -> Any:
        result, params = attend(self, *args), args[3]
        asked.append(params.needs_lse)
        return result if params.needs_lse else result._replace(lse=result.lse.fill_(torch.nan))

    monkeypatch.setattr(EagerKernel, "attend", careless)
    x = torch.randn(1, T, 2, 8, dtype=torch.bfloat16)
    call: Any = ring_attention
    out, lse = call(x, x, x, causal=True, kernel="eager", return_lse=True)
    assert torch.equal(call(x, x, x, causal=True, kernel="eager"), out)
    theirs, their_lse, _ = zigzag_ring_flash_attn_func(x, x, x, causal=True, return_attn_probs=True)
    assert torch.equal(theirs, out) and torch.equal(their_lse, lse)
    assert asked == [True, False, True]
    with_grad = x.clone().requires_grad_()
    call(with_grad, x, x, causal=True, kernel="eager").sum().backward()
    assert asked[3] and with_grad.grad is not None and not with_grad.grad.isnan().any()


@pytest.mark.parametrize("window", [None, 9])
def test_what_tests_on_gpus_compare_with(window: int | None) -> None:
    """The dense attention that GPU tests compare with is right: a window off by one differs."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, T, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
    sinks = torch.randn(4, dtype=torch.bfloat16)
    exact, plain = (
        dense(*(x.to(dtype) for x in inputs), sinks=sinks.to(dtype), window=window)
        for dtype in (torch.float32, torch.bfloat16)
    )
    leaves = [x.requires_grad_() for x in (*inputs[:3], sinks)]
    for keys, is_right in ((window or T, True), ((window or T) - 1, False)):
        out = ring_attention(*leaves[:3], sinks=sinks, causal=True, window=(keys - 1, 0))
        results = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]
        assert (max(errors(results, exact, plain)) < 2) == is_right
