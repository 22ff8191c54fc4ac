"""Predicates: kernels, the shift of a bias and the tripwire's oracle show what the plan shows.

The class: a function that is evaluated twice, by numpy in 64 bits and by torch, whose fractions are
float32; and one that changes between the two, as a rule that layers share and set anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from predicates import PREDICATES, T, expected, inputs, very_negative_bias

import ring_torch
from ring_core import Mask
from ring_torch import ContextParallel
from ring_torch.kernels import rules


@pytest.mark.parametrize("few_tiles", [True, False])
@pytest.mark.nightly(unless=["contiguous-True"])
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@on_ranks
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


@on_ranks
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
                mine, lse = cp.attention(
                    mine, mine, mine, mask=mask or Mask(predicate=predicate), return_lse=True
                )
                shown = torch.from_numpy(
                    Mask(predicate=predicate).dense(np.arange(T), np.arange(T))
                )
                heads = theirs.transpose(1, 2)
                scores = (heads @ heads.mT / 8**0.5).masked_fill(~shown, -torch.inf)
                theirs, lse_right = (
                    (scores.softmax(-1) @ heads).transpose(1, 2),
                    scores.logsumexp(-1),
                )
            (mine.square().sum() + lse.sum()).backward()
            (theirs.square().sum() + lse_right.sum()).backward()
            assert hidden.grad is not None and right.grad is not None
            torch.testing.assert_close(cp.unshard(mine.detach()), theirs.detach())
            torch.testing.assert_close(cp.unshard(hidden.grad), right.grad)
