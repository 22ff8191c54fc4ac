"""Predicates that devices compute otherwise than a plan does, for tests of both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ring_core import Mask
from ring_core.reference import attention

T = 152
TABLE = np.arange(T) * 7919 % 11

#: Some have numbers beyond 32 bits, some fractions, some look things up or call numpy's functions.
PREDICATES: dict[str, Any] = {
    "hash": lambda i, j: (((i * 73856093) ^ (j * 19349663)) % 7 < 3) | (i == j),
    "constant": lambda i, j: ((i * 2654435761 + j) % 3 != 0) | (i == j),
    "fraction": lambda i, j: (j >= 0.6 * i) & (j <= i),
    "tenths": lambda i, j: ((i * 0.1 + j * 0.1) % 1 < 0.35) | (i == j),
    "quotient": lambda i, j: (j >= i / 7 * 7) & (j <= i + 3),
    "table": lambda i, j: TABLE[i] == TABLE[j],
    "functions": lambda i, j: np.logical_or(i >= j, np.minimum(i, j) < 9),
    "divisor": lambda i, j: (i % (j + 1) < 3) | (i == j),
    "truths": lambda i, j: (i > j) + (j > 30) + (i == j),
    "bits": lambda i, j: ((i ^ j) & ~3 | j >> 2) % 5 < 2,
}
#: Those that are operators on integers inside of 32 bits: each kernel evaluates them.
TRACED = ("bits",)


def inputs(dtype: Any) -> list[npt.NDArray[Any]]:
    """Return q, k and v, ``[1, T, 2, 8]``."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, T, 2, 8)).astype(dtype) for _ in range(3)]


def very_negative_bias(dtype: Any) -> npt.NDArray[Any]:
    """Return a bias with rows whose largest number depends on what the mask shows."""
    columns = np.where(np.arange(T) % 3 == 0, -1e10, 0)
    return np.broadcast_to(columns, (1, 1, T, T)).astype(dtype)


def expected(name: str, bias: Any = None) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the oracle's result, and which rows see a key that the bias does not push away."""
    mask, positions = Mask(predicate=PREDICATES[name]), np.arange(T)
    out, _ = attention(*inputs(np.float64), mask=mask, bias=bias)
    sees = mask.dense(positions, positions) & (True if bias is None else bias[0, 0] > -1e9)
    return out, sees.any(axis=1)
