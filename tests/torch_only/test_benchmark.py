"""Passes without communication, which the GPU benchmark compares with."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from benchmarks.common.cases import CAUSAL
from benchmarks.development import host_time
from benchmarks.torch import model
from benchmarks.torch.alone import as_rank
from benchmarks.torch.methods import dense, in_layers, through_autograd
from benchmarks.torch.over_gpus import method
from benchmarks.torch.scaling import ONE_THREAD, running, without_end
from ring_torch.kernels.eager import EagerKernel
from ring_torch.local import LocalRanks


@pytest.mark.nightly
@on_ranks
def test_alone_does_all_but_communicate(rank: int) -> None:
    """It has other, finite gradients than a normal call, and leaves those after it as they were."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    grads = []
    for end in ("", "/alone", ""):
        way = method(f"zigzag/eager/gather/p2p{end}", CAUSAL, 128)
        with way.around():
            _, dq, dk, _ = way.both(q, k, v, torch.ones_like(q))
        grads.append(torch.cat([dq.flatten(), dk.flatten()]))
    right, without, after = grads
    assert without.isfinite().all() and (without - right).abs().max() > 0.01
    assert torch.equal(after, right)


@pytest.mark.nightly
def test_a_whole_model_is_checked_before_it_is_timed() -> None:
    widths = model.Widths(2, 64, 4, 2, 16, 128, 256)
    with LocalRanks(2) as ranks:
        ranks.run(model.check, model.Setting(widths, 256, recompute=True), "cpu")


def test_layers_take_the_output_before_as_their_q() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 8, 2, 4, requires_grad=n < 3) for n in range(4))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dense(q, k, v, visible=torch.ones(8, 8, dtype=torch.bool))

    way = in_layers(through_autograd(attend), 3)
    expected = attend(attend(attend(q, k, v), k, v), k, v)
    assert torch.equal(way.forward(q, k, v), expected)
    out, dq, *of_layers = way.both(q, k, v, dout)
    dq_expected, *kv_expected = torch.autograd.grad(expected, (q, k, v), dout)
    assert torch.equal(out, expected)
    torch.testing.assert_close(dq, dq_expected)
    # Each layer has its own k and v: their gradients add up to that of a shared pair.
    for n, grad in enumerate(kv_expected):
        torch.testing.assert_close(sum(of_layers[n::2]), grad)


def test_one_process_plays_the_ranks_of_a_ring() -> None:
    """A played rank makes its own launches, without the peers' keys."""

    def attend(rank: int) -> list[tuple[int, int]]:
        torch.manual_seed(rank)
        q, k, v = (torch.randn(1, 32, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        way = method("zigzag/eager/gather/p2p/alone", CAUSAL, 128)
        pairs: list[tuple[int, int]] = []
        right = EagerKernel.attend

        def counted(
            kernel: Any, item: Any, params: Any, rows: Any, columns: Any, *rest: Any
        ) -> Any:
            pairs.append((rows.q.shape[1], columns.k.shape[1]))
            return right(kernel, item, params, rows, columns, *rest)

        with way.around(), patch.object(EagerKernel, "attend", counted):
            _, dq, *_ = way.both(q, k, v, torch.ones_like(q))
        assert bool(dq.isfinite().all())
        return sorted(pairs)

    assert not dist.is_initialized()
    results = [as_rank(rank, 4, attend, rank) for rank in range(4)]
    chunk = 128 // 8
    expected = [[(chunk, (n + 1) * chunk), (chunk, (8 - n) * chunk)] for n in range(4)]
    assert results == expected
    assert not dist.is_initialized()


@pytest.mark.parametrize("end", ["/graph", "/alone/graph", "/layers", "/alone/alone", "/"])
def test_an_unknown_end_of_a_method_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match="behind a transport only 'alone' can follow"):
        method(f"zigzag/eager/gather/p2p{end}", CAUSAL, 128)


@pytest.mark.parametrize("end", ["", "/graph", "/layers", ONE_THREAD])
def test_a_method_is_told_from_how_its_calls_are_made(end: str) -> None:
    way = through_autograd(lambda *_: torch.ones(1))
    assert without_end(f"zigzag/auto/auto/auto{end}") == ("zigzag/auto/auto/auto", end)
    with running(way, end):
        assert torch._C._is_multithreading_enabled() == (end != ONE_THREAD)
    assert torch._C._is_multithreading_enabled()


def test_no_other_kernel_takes_the_place_of_flash_attn_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        host_time.main(["--gpus", "2"])
    assert "'by hand' is flash-attn-4's own function" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("name another one by --by-hand sdpa")
    q, k, v = (torch.randn(1, 8, heads, 4) for heads in (4, 2, 2))
    assert host_time.BY_HAND["sdpa"]()(q, k, v).shape == q.shape
