"""The error against float64 does not grow with the ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ring_core import Mask, make_plan, reference

RING_SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["plain", "zigzag"])
def test_error_is_flat_in_the_ring_size(precision: Any, schedule: Any) -> None:
    rng, seq_len = np.random.default_rng(0), 512
    q, k, v, dout = (rng.standard_normal((1, seq_len, 2, 16)).astype(np.float32) for _ in range(4))
    if precision == "bfloat16":
        q, k, v, dout = ((x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in (q, k, v, dout))
    out, _ = reference.attention(q, k, v, causal=True)
    exact = [out, *reference.attention_grads(dout, q, k, v, causal=True)[:3]]
    errors = []
    for cp_size in RING_SIZES:
        plan = make_plan(Mask(causal=True), seq_len=seq_len, cp_size=cp_size, schedule=schedule)
        got, _, *grads = reference.simulate(plan, q, k, v, dout=dout, precision=precision)
        errors.append(
            [np.sqrt(np.mean((a - b) ** 2)) for a, b in zip([got, *grads], exact, strict=True)]
        )
    table = np.array(errors)
    assert (table > 0).all()
    assert (table <= 1.25 * table[0]).all(), f"{precision} {schedule}:\n{table}"
