"""Ranks that exchange tokens for heads: the whole table is right, or refused with its sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CASES, Case
from tolerances import assert_close

import ring_torch

SEVERAL = [case for case in CASES.values() if case.cp_size > 1 and case.strategy == "ring"]


def _with_a_head_a_rank(case: Case) -> Case:
    """The case, with as many groups of heads as make a query head for every rank."""
    heads, kv_heads = case.heads
    return replace(case, heads=(heads * -(-case.cp_size // heads), kv_heads))


@pytest.mark.nightly(only=[case.name for case in SEVERAL if "again" in case.nightly])
@pytest.mark.parametrize("case", SEVERAL, ids=[case.name for case in SEVERAL])
def test_case(case: Case, backend: Any) -> None:
    case = _with_a_head_a_rank(case)
    assert_close(case, backend.run(case, strategy="ulysses"))


@pytest.mark.parametrize("sinks", [0, 3], ids=["one a head", "several a head"])
def test_sinks_go_with_their_heads(sinks: int, backend: Any) -> None:
    case = replace(CASES["causal-zigzag-cp2"], heads=(8, 4), sinks=sinks, lse_grad=True)
    assert_close(case, backend.run(case, strategy="ulysses"))


def compiled_and_not(rank: int, grad: bool) -> list[float]:
    """Differences of results and gradients."""
    torch.manual_seed(rank)
    shapes = ((4, 16), (2, 16), (2, 24), (4, 24))
    *qkv, dout = (torch.randn(1, 12, *shape) for shape in shapes)
    leaves = [x.requires_grad_(grad) for x in qkv]

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return ring_torch.ring_attention(*x, causal=True, layout="zigzag", strategy="ulysses")

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        results.append([out.detach(), *(torch.autograd.grad(out, leaves, dout) if grad else ())])
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("grad", [True, False])
def test_compiled(grad: bool, backend: Any) -> None:
    for differences in backend.pool(2).run(compiled_and_not, grad):
        assert len(differences) == (4 if grad else 1)
        assert max(differences) == 0


def one_after_another(rank: int) -> list[float]:
    """Differences from a ring, call by call: without a backward, other masks, changed arguments."""
    torch.manual_seed(rank)
    *qkv, dout = (torch.randn(1, 12, heads, 16) for heads in (4, 2, 2, 4))
    in_turn = []
    for call, window in enumerate((None, (3, 0), None, (5, 2))):
        results = []
        for strategy in ("ulysses", "ring"):
            leaves = [x.clone().requires_grad_(call > 0) for x in qkv]
            out, lse = ring_torch.ring_attention(
                *leaves, causal=window is None, window=window, layout="striped",
                strategy=strategy, return_lse=True,
            )  # fmt: skip
            both = [out, lse], [dout, lse.detach()]
            grads = torch.autograd.grad(both[0], leaves, both[1]) if call > 0 else ()
            results.append([out.detach(), lse.detach(), *grads])
        in_turn += [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
        for x in qkv:
            x.mul_(0.5)
    return in_turn


def test_calls_one_after_another(backend: Any) -> None:
    for differences in backend.pool(2).run(one_after_another):
        assert len(differences) == 2 + 3 * 5
        assert max(differences) < 1e-5
