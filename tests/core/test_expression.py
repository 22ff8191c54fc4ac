"""Mask predicates as expressions: an expression equals its predicate, or there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Lattice, crossed, diagonals, prefix

from ring_core import Mask
from ring_core.masks.expression import Expression, evaluated
from ring_core.masks.mask import rule_of


def expression_of(mask: Mask, q: tuple[int, int], k: tuple[int, int]) -> Expression | None:
    return rule_of(mask, q, k).short


Q, K = (-7, 900), (0, 1000)
TABLE = np.arange(4096) % 3 == 0

RULES: dict[str, Any] = {
    "diagonals": diagonals,
    "prefix": prefix,
    "lattice": Lattice(7, 3, 16, 5),
    "stripes": lambda i, j: (i >= j) & ((i - j < 512) | (j % 512 < 64)),
    "reversed": lambda i, j: (3 - i < j) | (j < 5) ^ (2 * i == -j),
    "odd": lambda i, j: ((i - 2 * j) // 7 - (j - i) % 12 != 3) & ~(abs(i - j) <= 4),
    "known": lambda i, j: (i >= j) & True | False,
    "numpy": lambda i, j: (i % np.int64(5) == j % np.int32(3)) ^ np.True_,
}
NONE: dict[str, Any] = {
    "table": lambda i, j: TABLE[i] & TABLE[j],
    "where": lambda i, j: np.where(i > j, i % 2 == 0, j % 2 == 0),
    "a sum of truths": lambda i, j: (i > j) + (j > 3),
    "a divisor that varies": lambda i, j: i % (j + 1) == 0,
    "large": lambda i, j: i * j * 10_000 > 5,
    "bits": crossed,
}


@pytest.mark.parametrize("name", RULES)
def test_says_what_the_mask_says(name: str) -> None:
    for mask in (
        Mask(predicate=RULES[name]),
        Mask(causal=True, window=(90, None), chunk_size=48, predicate=RULES[name]),
    ):
        expression = expression_of(mask, Q, K)
        assert expression is not None
        q, k = np.arange(*Q), np.arange(*K)
        assert np.array_equal(evaluated(expression, q[:, None], k), mask.dense(q, k))


@pytest.mark.parametrize("name", NONE)
def test_has_none(name: str) -> None:
    assert expression_of(Mask(predicate=NONE[name]), Q, K) is None


def test_an_if_is_not_followed() -> None:
    def rule(i: Any, j: Any) -> Any:
        return 0 <= i - j < 30 if np.ndim(i) == 0 else (i >= j) & (i - j < 30)

    assert expression_of(Mask(predicate=rule), Q, K) is None


def test_a_rule_that_says_another_thing_of_arrays() -> None:
    def rule(i: Any, j: Any) -> Any:
        return i >= j if isinstance(i, np.ndarray) else i > j

    assert expression_of(Mask(predicate=rule), Q, K) is None


def test_a_rule_that_uses_what_it_has_again_and_again() -> None:
    """Shared subexpressions stay shared: written out this rule has 2^60 operators."""

    def rule(i: Any, j: Any) -> Any:
        far = i - j
        for n in range(60):
            far = abs(far - n)
        return far < 5

    assert expression_of(Mask(predicate=rule), Q, K) is None


@pytest.mark.parametrize("span", [(0, 2**31 + 1), (4, 4)])
def test_spans_that_do_not_fit_have_none(span: tuple[int, int]) -> None:
    assert expression_of(Mask(causal=True), span, K) is None
