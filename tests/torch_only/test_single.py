"""Calls on one rank: one launch each way, no sums, and the numbers of the general code path."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from dense import dense, errors
from patched import replaced
from torch import Tensor

from ring_core import Mask, reference
from ring_torch import ContextParallel, accumulate, prepare, ring_attention
from ring_torch.accumulate import Accumulator, Work, unseen_state
from ring_torch.compat import zigzag_ring_flash_attn_func
from ring_torch.kernels.eager import EagerKernel
from ring_torch.records import AttentionState, Backward, Forward, KeyBlock, Mode, QueryBlock
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


def test_launches_get_no_tensors_that_need_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions take a call's own q, k and v, and refuse those that need gradients."""
    taken: list[Tensor] = []
    attend, one_by_one = Accumulator.attend, EagerKernel.backward

    def noted(
        results: Accumulator, work: Work, rows: QueryBlock, columns: KeyBlock, **options: Any
    ) -> None:
        taken.extend((rows.q, columns.k, columns.v))
        attend(results, work, rows, columns, **options)

    def noted_backward(*args: Any, **options: Any) -> Backward:
        launch = one_by_one(*args, **options)

        def run(rows: QueryBlock, held: list[KeyBlock], *others: Any) -> Any:
            taken.extend((rows.q, held[0].k, held[0].v))
            return launch.run(rows, held, *others)

        return launch._replace(run=run)

    monkeypatch.setattr(Accumulator, "attend", noted)
    monkeypatch.setattr(EagerKernel, "backward", noted_backward)
    with replaced():
        _run(*CALLS["causal"])
    assert len(taken) == 6 and not any(x.requires_grad for x in taken)


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_the_loops_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = _run(*CALLS[name])
    assert all(x.is_contiguous() for x in results)
    monkeypatch.setattr(prepare, "resolve", lambda _, call, *__: Ring.of(call))
    with replaced():
        for x, y in zip(results, _run(*CALLS[name]), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("mode", ["write", "return"])
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_does_not_merge(name: str, mode: Mode) -> None:
    """Rows that see nothing get their defined result, all other rows what the kernel returned."""
    expected, taken = _run(*CALLS[name]), list[Mode]()

    def forward(kernel: EagerKernel, item: Any, params: Any) -> Forward:
        def run(
            rows: Any, columns: Any, into: AttentionState | None, asked: Mode, _key: object
        ) -> AttentionState:
            taken.append(asked)
            result = unseen_state(rows.q, columns.v.shape[3], torch.float64)
            kernel.attend(item, params, rows, columns, result, "merge")
            if asked == "return":
                assert into is None
                return result
            assert into is not None
            for x, y in zip(into, result, strict=True):
                x.copy_(y)
            return into

        return Forward(item, run, (mode,))

    with replaced(EagerKernel, forward=forward):
        results = _run(*CALLS[name])
    assert taken == [mode]
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


def test_one_launch_each_way_and_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def spy_on(name: str) -> Any:
        method = getattr(EagerKernel, name)

        def spy(*args: Any) -> Any:
            launched.append(name)
            return method(*args)

        return spy

    for owner, name in (
        (Ring, "forward"), (Ring, "backward"), (accumulate, "merge"), (accumulate, "Columns"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, None)
    x = torch.randn(1, T, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    with replaced(EagerKernel, **{name: spy_on(name) for name in ("attend", "differentiate")}):
        ring_attention(x, x, x, causal=True, kernel="eager").sum().backward()
    assert launched == ["attend", "differentiate"]


def test_what_the_only_launch_returns_is_not_copied() -> None:
    """Neither dQ nor the gradient of a bias, which is larger, is in memory twice."""
    made: list[int] = []

    def differentiate(kernel: EagerKernel, *args: Any) -> None:
        *_, row_grads, _column_grads = args
        made.extend(x.data_ptr() for x in row_grads)
        original(kernel, *args)

    original = EagerKernel.differentiate
    x = torch.randn(1, T, 2, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 2, T, T, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn_like(x) for _ in range(2))
    with replaced(EagerKernel, differentiate=differentiate):
        out = ring_attention(x, k, v, causal=True, bias=bias, kernel="eager")
        grads = torch.autograd.grad(out, (x, bias), torch.ones_like(out))
    assert made == [grad.data_ptr() for grad in grads]


def test_an_lse_that_is_not_asked_for_may_be_anything() -> None:
    """``lse`` is asked for only where a caller or the backward gets it, else it is not read."""
    attend, asked = EagerKernel.attend, list[bool]()

    def careless(self: EagerKernel, item: Any, params: Any, *args: Any) -> Any:
        result = attend(self, item, params, *args)
        asked.append(params.needs_lse)
        return result if params.needs_lse else result._replace(lse=result.lse.fill_(torch.nan))

    x = torch.randn(1, T, 2, 8, dtype=torch.bfloat16)
    call: Any = ring_attention
    with replaced(EagerKernel, attend=careless):
        out, lse = call(x, x, x, causal=True, kernel="eager", return_lse=True)
        assert torch.equal(call(x, x, x, causal=True, kernel="eager"), out)
        theirs, their_lse, _ = zigzag_ring_flash_attn_func(
            x, x, x, causal=True, return_attn_probs=True
        )
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


PROGRAM = """
import sys
from importlib.abc import MetaPathFinder


class NoTriton(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")


sys.meta_path.insert(0, NoTriton())
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
import torch
from ring_torch import ring_attention

x = torch.ones(1, 8, 2, 4, requires_grad=True)
for kernel in ("auto", "eager"):
    ring_attention(x, x, x, causal=True, kernel=kernel).sum().backward()
assert "triton" not in sys.modules
"""


def test_a_call_on_a_cpu() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_an_odd_length() -> None:
    cp = ContextParallel()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 7, 2, 4)
    out = cp.unshard(cp.attention(*map(cp.shard, (q, k, v)), causal=True))
    assert cp.positions(7).tolist() == list(range(7))
    np.testing.assert_allclose(out, reference.attention(q, k, v, causal=True)[0], atol=2e-6)
