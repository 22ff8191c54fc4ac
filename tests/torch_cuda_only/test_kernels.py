"""Every GPU kernel, strategy and transport on the whole case table: right, or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cases import CASES, Case
from tolerances import assert_close

from ring_torch.kernels import KERNELS
from ring_torch.local import LocalRankError

NAMES = ("fa4", "fa3", "cudnn", "fa2", "sdpa", "triton", "eager")
MOVES = (("ring", "p2p"), ("gather", "symm_mem"))
WAYS = [(kernel, *move) for move in MOVES for kernel in NAMES]
RING = [case for case in CASES.values() if case.cp_size > 1 and case.dtype == "float32"]


@pytest.fixture(scope="module")
def tally() -> Iterator[dict[str, dict[str, int]]]:
    """Count the cases that each kernel ran and refused, and write them to ``RING_TALLY``.

    Each of several workers writes its own file, whose name ends with the worker's.
    """
    counts: dict[str, dict[str, int]] = {}
    yield counts
    if path := os.environ.get("RING_TALLY"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        Path(path + worker).write_text(json.dumps(counts, indent=2))


@lru_cache(maxsize=2)
def as_kernels_take_it(name: str) -> Case:
    """Return the case, and its expected results, in bfloat16 with head dims of GPU kernels."""
    case = CASES[name]
    dim, v_dim = case.dims
    return replace(case, dtype="bfloat16", dims=(8 * dim, 8 * v_dim))


#: Heads in groups with gradients in two parts, and keys fetched one by one, by copy engines.
OTHER_WAYS = {
    "in-groups": ("causal-zigzag-cp4", "window-both-contiguous-cp3", "documents-chunks-cp2"),
    "by-copies": (
        "full-contiguous-cp2", "causal-zigzag-cp2", "window-small-contiguous-cp2", "window-both-zigzag-cp2",
        "window-right-zigzag-cp2", "chunks-zigzag-cp2", "documents-window-zigzag-cp2",
        "documents-chunks-cp2", "mha-zigzag", "v-dim-contiguous", "segments-pair-zigzag",
        "sinks-many-zigzag", "bias-masked-zigzag", "window-both-contiguous-cp3", "causal-zigzag-cp4",
    ),
}  # fmt: skip
ROWS = [
    *(("", case, way) for way in (*WAYS, ("sdpa", "gather", "p2p")) for case in RING),
    *(
        (how, CASES[name], (kernel, "gather", "symm_mem"))
        for kernel in ("fa4", "cudnn", "fa2", "triton", "eager")
        for how, names in OTHER_WAYS.items()
        for name in names
    ),
]


@pytest.mark.parametrize(
    ("how", "case", "way"), ROWS, ids=["-".join((case.name, *way, how)) for how, case, way in ROWS]
)
def test_case(how: str, case: Case, way: tuple[str, str, str], backend: Any, tally: Any) -> None:
    kernel, (case, count) = way[0], (as_kernels_take_it(case.name), {"passed": 0, "refused": 0})
    if how == "in-groups":
        case = replace(case, heads=(8, 4))
    if not how:
        count = tally.setdefault("/".join(way), count)
    if (results := _run(backend, case, way, how or None)) is None:
        count["refused"] += 1
        return
    if case.poison and not exact_nan(kernel):
        pick = finite if case.poison.endswith("-inf") else near
        results = {name: pick(results[name], x) for name, x in case.expected.items()}
    assert_close(case, results)
    count["passed"] += 1


def _run(backend: Any, case: Case, way: tuple[str, str, str], how: str | None) -> Any:
    """Return the results of a case, or ``None`` if its kernel or strategy is refused by name."""
    kernel, strategy, transport = way
    try:
        return backend.run(case, how, kernel, strategy, transport)
    except LocalRankError as error:
        names = f"kernel '{kernel}'", f"strategy '{case.moved(strategy)}'"
        if "UnsupportedError" in str(error) and any(name in str(error) for name in names):
            return None
        raise


def exact_nan(kernel: str) -> bool:
    """Return True if the kernel passes a NaN only to rows that see it."""
    return all(k.capabilities.exact_nan for k in KERNELS if k.capabilities.name == kernel)


def near(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return results in which a NaN at a finite expected number is replaced by that number.

    Such a NaN comes from another key of the same tile.
    """
    return np.where(np.isfinite(expected) & np.isnan(actual), expected, actual)


def finite(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return results, with the expected number where either is not finite: libraries differ."""
    return np.where(np.isfinite(expected) & np.isfinite(actual), actual, expected)
