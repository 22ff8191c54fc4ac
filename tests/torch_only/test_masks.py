"""Masks as biases and functions: exact with very negative biases, and as the plan shows them.

Finite biases far below all scores, as in additive masks, give what exact arithmetic gives. A
predicate is evaluated twice, by numpy in 64 bits and by torch, whose fractions are float32; and one
may change between the two, as a rule that layers share and set anew.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from blocks import NEGATIVE
from dense import sdpa
from on_ranks import on_two_ranks
from predicates import PREDICATES, T, expected, inputs, very_negative_bias
from tolerances import assert_close
from torch import Tensor

import ring_torch
from ring_core import Mask
from ring_core.reference.dense import bias_shift as reference_shift
from ring_torch import ContextParallel, ring_attention
from ring_torch.comm.ranks import Ranks
from ring_torch.kernels import rules
from ring_torch.options import CallOptions
from ring_torch.prepare import check_call
from ring_torch.strategies import bias_shift

LENGTH, D = 48, 8


WAYS = {
    f"{case.name}-{strategy}": (case, strategy)
    for strategy in ("ring", "gather") for case in NEGATIVE
    if strategy == "ring" or (
        case.cp_size > 1 and case.layout != "striped" and case.strategy == "ring"
        and case.mask.predicate is None
    )
}  # fmt: skip


@pytest.mark.nightly(unless=[
    "zigzag-ring", "ids-ring", "helpers-ring", "float64-ring", "mixed-gather", "bfloat16-gather",
])  # fmt: skip
@pytest.mark.parametrize("name", WAYS)
def test_they_agree_with_real_numbers(name: str, backend: Any) -> None:
    """Biased are parts of rows, whole rows, padding; each ``lse`` is right relative to its size.

    Each case has every other number in each region, and the next one those between.
    """
    case, strategy = WAYS[name]
    for variant in case.everywhere()[[*WAYS].index(name) % 2 :: 2]:
        results = backend.run(variant, strategy=strategy)
        assert_close(variant, results)
        tolerance = 1e-12 if case.dtype == "float64" else 1e-5
        np.testing.assert_allclose(
            results["lse"], variant.expected["lse"], rtol=tolerance, atol=tolerance,
            err_msg=variant.name,
        )  # fmt: skip


def _padded() -> tuple[list[Tensor], Tensor]:
    """Return q, k and v, and a bias that hides 16 tokens on the left from all others."""
    torch.manual_seed(0)
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    bias[..., :16] = -1e10
    return [torch.randn(2, LENGTH, 2, D) for _ in range(3)], bias


def test_rows_are_looked_at_in_blocks() -> None:
    """Rows are read in blocks of 7, the last of which is shorter."""
    qkv, bias = _padded()
    bias[..., -9:, :] = -1e6
    call = partial(ring_attention, *qkv, bias=bias, causal=True, return_lse=True)
    whole = call()
    with (
        patch.object(bias_shift, "_BLOCK_BYTES", 7 * LENGTH * (4 + 4)),
        patch.object(bias_shift, "_visible", side_effect=bias_shift._visible) as visible,
    ):
        parts = call()
    assert visible.call_count == 7
    for result, by_blocks in zip(whole, parts, strict=True):
        assert torch.equal(result, by_blocks)


def test_infinity_and_nan_leave_a_row_its_shift() -> None:
    """The shift is the largest finite number that a row sees, as in the reference."""
    (q, k, v), bias = _padded()
    bias[..., 2, 1], bias[..., 3, 0], bias[..., 4, :] = torch.inf, torch.nan, torch.inf
    arrays = SimpleNamespace(bias=bias.numpy(), sinks=None)
    for causal in (False, True):
        options = CallOptions(causal=causal, bias=bias)
        call, inputs = check_call(Ranks(None, 0, 1), 0, "contiguous", q, k, v, options)
        visible = np.tri(LENGTH, dtype=bool) if causal else np.ones((LENGTH, LENGTH), bool)
        expected: Any = reference_shift(arrays, visible)  # type: ignore[arg-type]  # what it reads
        assert expected[..., 2:5].any() == causal
        np.testing.assert_array_equal(bias_shift.bias_shift(call, inputs), expected)


@pytest.mark.parametrize("few_tiles", [True, False])
@pytest.mark.nightly(unless=["contiguous-True"])
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@on_two_ranks
def test_what_the_plan_shows(layout: Any, few_tiles: bool) -> None:
    cp, scores = ContextParallel(layout=layout), very_negative_bias(np.float64)
    with pytest.MonkeyPatch.context() as patch:
        if not few_tiles:  # then numpy evaluates them, block by block
            patch.setattr(rules, "_lookup", lambda *_: None)
        for name, predicate in PREDICATES.items():
            for bias in (None, scores):
                q, k, v = (cp.shard(torch.from_numpy(x)) for x in inputs(np.float64))
                mine = None if bias is None else cp.shard(torch.from_numpy(bias.copy()), dim=-2)
                with ring_torch.check(1):
                    out = cp.attention(q, k, v, mask=Mask(predicate=predicate), bias=mine)
                right, rows = expected(name, bias)
                error = np.abs(cp.unshard(out).numpy() - right)[:, rows].max()
                assert error < 1e-12, (name, bias is None, error)


class Rule:
    """A rule that layers share, each with its own width."""

    width = 3

    def near(self, i: Any, j: Any) -> Any:
        return abs(i - j) < self.width

    def far(self, i: Any, j: Any) -> Any:
        return np.logical_not(abs(i - j) < self.width)


@on_two_ranks
def test_a_rule_that_layers_set_anew() -> None:
    cp, rule = ContextParallel(layout="zigzag"), Rule()
    x = inputs(np.float64)[0]
    for predicate in (rule.near, rule.far):
        for mask in (None, Mask(predicate=predicate)):
            hidden = cp.shard(torch.from_numpy(x)).requires_grad_()
            right = torch.from_numpy(x).requires_grad_()
            mine, theirs = hidden, right
            for width in (60, 5, 60):  # set anew after each forward, before any backward
                rule.width = width
                mine = cp.attention(mine, mine, mine, mask=mask or Mask(predicate=predicate))
                shown = Mask(predicate=predicate).dense(np.arange(T), np.arange(T))
                theirs = sdpa(theirs, theirs, theirs, attn_mask=torch.from_numpy(shown))
            mine.square().sum().backward()
            theirs.square().sum().backward()
            assert hidden.grad is not None and right.grad is not None
            torch.testing.assert_close(cp.unshard(mine.detach()), theirs.detach())
            torch.testing.assert_close(cp.unshard(hidden.grad), right.grad)
