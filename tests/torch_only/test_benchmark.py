"""Methods that benchmarks time: a whole model, layers in a row, and how calls are made."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch

from benchmarks.common.cases import CAUSAL
from benchmarks.torch import methods, model
from benchmarks.torch.methods import dense, in_layers, method, sdpa, through_autograd
from benchmarks.torch.scaling import ONE_THREAD, running, without_end
from ring_torch.local import LocalRanks


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


@pytest.mark.parametrize("end", ["/graph", "/layers", "/alone", "/"])
def test_an_unknown_end_of_a_method_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match="layout/kernel/strategy/transport"):
        method(f"zigzag/eager/gather/p2p{end}", CAUSAL, 128)


@pytest.mark.parametrize("end", ["", "/graph", "/layers", ONE_THREAD])
def test_a_method_is_told_from_how_its_calls_are_made(end: str) -> None:
    way = through_autograd(lambda *_: torch.ones(1))
    assert without_end(f"zigzag/auto/auto/auto{end}") == ("zigzag/auto/auto/auto", end)
    with running(way, end):
        assert torch._C._is_multithreading_enabled() == (end != ONE_THREAD)
    assert torch._C._is_multithreading_enabled()


def _errors_of_ulysses(_: int) -> float:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 32, heads, 8, requires_grad=True) for heads in (4, 2, 2, 4))
    with patch.object(methods, "flash", lambda mask: partial(sdpa, is_causal=mask.causal)):
        way = method("ulysses", CAUSAL, 32)
    results = way.both(
        *(way.shard(x.detach()).requires_grad_() for x in (q, k, v)), way.shard(dout)
    )
    expected = through_autograd(partial(sdpa, is_causal=True)).both(q, k, v, dout)
    pairs = zip(results, expected, strict=True)
    return max(float((x - way.shard(y)).abs().max()) for x, y in pairs)


@pytest.mark.nightly
def test_ulysses_of_others_is_right() -> None:
    with LocalRanks(2) as ranks:
        assert max(ranks.run(_errors_of_ulysses)) < 1e-5
