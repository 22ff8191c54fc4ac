"""Extreme numbers: denormal inputs are exact, and the table's cases have the numbers they name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES, TINY, Case
from tolerances import findings

from ring_core import Mask, reference

#: The smallest normal number; hardware, and compilers, may take anything below it for zero.
NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}
DENORMAL = [
    Case(f"tiny-{dtype}", Mask(causal=True), "zigzag", 2, 24, dtype=dtype, numbers="tiny")
    for dtype in TINY
]


@pytest.mark.nightly("jax", "jax-cuda")
@pytest.mark.parametrize("case", DENORMAL, ids=TINY)
def test_denormal_inputs(case: Case, run: Any) -> None:
    """Results are right where logits round to zero and values are near the smallest normal."""
    smallest = NORMAL[case.dtype]
    assert 0 < np.abs(case.inputs["v"]).max() < 4 * smallest
    results = run(case)
    for finding in findings(case, results):
        assert finding.bad == 0
        assert finding.error <= finding.bound + (smallest if finding.name != "lse" else 0), finding
    counts = np.broadcast_to(np.log(np.arange(1, 25)), results["lse"].shape)
    np.testing.assert_allclose(results["lse"], counts, rtol=1e-6, atol=1e-6)


def scores(case: Case) -> Any:
    """Return the scaled products of queries and keys, ``[B, H, T_q, T_kv]``."""
    x = case.inputs
    k = x["k"].repeat(case.heads[0] // case.heads[1], axis=2)
    return np.einsum("bqhd,bkhd->bhqk", x["q"], k) * case.dims[0] ** -0.5


def test_numbers_are_what_they_are_called() -> None:
    """Logits exceed 10,000 and the range of float16; ``lse`` of shards differs by thousands."""
    case = CASES["large-contiguous"]
    logits, equal = scores(case), scores(CASES["equal-contiguous"])
    assert logits.max() > 1e4 and logits.min() < -1e4
    assert np.abs(scores(CASES["large-float16-contiguous"]) * case.dims[0] ** 0.5).max() > 65504
    shards = logits.reshape(*logits.shape[:3], case.cp_size, -1).max(axis=-1)
    assert np.median(np.ptp(shards, axis=-1)) > 1e3
    *others, last = np.split(scores(CASES["spread-contiguous"]), 4, axis=-1)
    assert np.abs(last.max(-1) - np.max(others, axis=(0, -1))).max() > 80
    assert np.ptp(equal, axis=-1).max() < 1e-6 < np.ptp(equal)
    for name in ("nothing-contiguous", "nothing-sinks-contiguous"):
        case = CASES[name]
        assert not case.mask.dense(np.arange(case.seq_len), np.arange(case.seq_len)).any()
        sinks = case.inputs.get("sinks", np.full(case.heads[0], -np.inf))
        assert not case.expected["out"].any()
        assert (case.expected["lse"] == sinks[:, None]).all()


@pytest.mark.parametrize(("name", "most"), [("q-inf", 1), ("k-inf", 15), ("v-inf", 16)])
def test_infinities_reach_those_who_see_them(name: str, most: int) -> None:
    """Rows before 32 are finite: of the 48 rows only the last 16 see token 32, the infinite one."""
    case = CASES[f"{name}-contiguous"]
    odd = ~np.isfinite(case.expected["out"]).all(axis=(0, 2, 3))
    assert not odd[:32].any() and 0 < odd.sum() <= most
    before = reference.attention(*(case.inputs[x][:, :32] for x in "qkv"), causal=True)[0]
    np.testing.assert_allclose(case.expected["out"][:, :32], before, rtol=1e-12, atol=1e-14)
