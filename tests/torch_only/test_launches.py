"""Launches: of calls on one rank, of gathers in two stages, and sums of their results in place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from on_ranks import on_ranks, on_three_ranks
from patched import chosen, replaced
from plain_flash import Returning, flash_of
from torch import Tensor

from ring_core import Mask, reference
from ring_torch import ContextParallel, accumulate, memory_ops as passes, prepare, ring_attention
from ring_torch.accumulate import Accumulator, Joins, Work, unseen_state
from ring_torch.compat import zigzag_ring_flash_attn_func
from ring_torch.kernels.eager import EagerKernel
from ring_torch.records import AttentionState, Backward, Forward, KeyBlock, Mode, QueryBlock
from ring_torch.strategies import gather
from ring_torch.strategies.ring import Ring
from ring_torch.transports.api import add_staged

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


KERNEL = flash_of(Returning(), "causal")
LENGTH, HEADS, DIM = 96, (4, 2, 2), 8


OPTIONS: dict[str, Any] = {"causal": True, "strategy": "gather", "transport": "p2p"}


def _qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, 32, n, DIM).to(dtype).requires_grad_() for n in HEADS]


@on_ranks
def test_sinks_and_lse() -> None:
    """A forward with sinks is rounded once, and calls with lse save no keys."""
    made: list[torch.dtype] = []

    def accumulator(joins: Joins, *arguments: Any) -> Accumulator:
        made.append(joins.dtype)
        return Accumulator(joins, *arguments)

    qkv = q, k, v = _qkv(torch.bfloat16)
    with chosen(KERNEL), patch.object(gather, "Accumulator", accumulator):
        for sinks in (None, torch.zeros(HEADS[0])):
            ring_attention(q, k, v, sinks=sinks, **OPTIONS)
        assert made == [torch.bfloat16, torch.float32]
        for _ in range(2):
            out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
            assert len(out.grad_fn.saved_tensors) == 10  # inputs, given or not, out and lse
    out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
    torch.autograd.grad(out.sum() + lse.sum(), qkv)
    prepare._prepare.cache_clear()


@on_ranks
def test_results_may_be_changed_in_place() -> None:
    """Results of a repeated call, like those of the first."""
    q, k, v = _qkv()
    bias = torch.ones(DIM, requires_grad=True)
    with chosen(KERNEL):
        for grad in (True, False):
            for _ in range(2):
                with torch.set_grad_enabled(grad):
                    out, lse = ring_attention(q, k, v, return_lse=True, **OPTIONS)
                out += bias
                lse += 1


@on_ranks
def test_gradients_of_odd_strides() -> None:
    """Gradients of ``out`` at any address, and of one sequence with any batch stride."""
    qkv, dout = _qkv(), torch.randn(1, 32, HEADS[0], DIM)
    with chosen(KERNEL):
        first, *others = [
            torch.autograd.grad(ring_attention(*qkv, **OPTIONS), qkv, x)
            for x in (dout, _among(dout, before=0), _among(dout, before=1))
        ]
    for grads in others:
        torch.testing.assert_close(grads, first)


def _among(x: Tensor, before: int) -> Tensor:
    """Return a copy of a one-sequence tensor in a larger one, with an odd stride of the batch."""
    apart = x.numel() + 1
    strides = (apart, *x.stride()[1:])
    return torch.zeros(2 * apart).as_strided(x.shape, strides, before).copy_(x)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_three_ranks
def test_rows_whose_scores_are_not_finite(rank: int, layout: Any) -> None:
    """Rows with NaN or infinite scores are NaN in every call, whatever the kernel leaves there."""
    cp = ContextParallel(layout=layout)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, LENGTH, n, DIM, generator=generator) for n in HEADS]
    whole[0][0, 1, :, 0] = torch.inf
    whole[1][0, :2, :, 0] = -1.0  # all scores of row 1 are -inf, and its lse with them
    shards = [cp.shard(x) for x in whole]
    with chosen(KERNEL):
        first, *repeats = [
            ring_attention(*shards, return_lse=True, layout=layout, **OPTIONS) for _ in range(3)
        ]
    for repeat in repeats:
        torch.testing.assert_close(repeat, first, rtol=0, atol=0, equal_nan=True)
    if rank == 0:
        out, lse = first
        assert out[:, 1].isnan().all() and lse[:, :, 1].isnan().all()


interpreter = pytest.importorskip("triton.runtime.interpreter", reason="runs on Linux only")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let Triton's interpreter run a kernel."""

    def interpret(name: str) -> None:
        kernel: Any = getattr(passes, name)
        monkeypatch.setattr(passes, name, interpreter.InterpretedFunction(kernel.kernel.fn))

    return interpret


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_add(count: int, interpreted: Callable[[str], None]) -> None:
    """Parts are added in order, as one by one, and elements between the rows are not touched."""
    interpreted("_add")
    torch.manual_seed(0)
    total, *addends = (torch.randn(3, 40, 8) for _ in range(1 + count))
    parts = [x[:, 2:35] for x in addends]
    expected = total.clone()
    add_staged([expected[:, 5:38]], [[part] for part in parts])
    passes.add_on_gpu(total[:, 5:38], parts)
    assert torch.equal(total, expected)
