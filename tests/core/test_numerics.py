"""The error against float64 does not grow with the ring.

Inputs are numbers that the precision holds exactly, so that rounding them costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ring_core import LayoutName, Mask, make_plan, reference, ring_program
from ring_core.reference.item_kernel import Precision, round_to

SEQ_LEN = 512


def errors(
    precision: Precision, layout: LayoutName, ring_sizes: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return RMS errors of out, dQ, dK and dV by ring size, ``[len(ring_sizes), 4]``."""
    rng = np.random.default_rng(0)
    shape = (4, 1, SEQ_LEN, 2, 16)
    q, k, v, dout = round_to(rng.standard_normal(shape), precision)
    out, _ = reference.attention(q, k, v, causal=True)
    exact = [out, *reference.attention_grads(dout, q, k, v, causal=True)[:3]]
    rows = []
    for cp_size in ring_sizes:
        program = ring_program(
            make_plan(Mask(causal=True), seq_len=SEQ_LEN, cp_size=cp_size, layout=layout)
        )
        actual, _, *grads = reference.simulate(program, q, k, v, dout=dout, precision=precision)
        pairs = zip([actual, *grads], exact, strict=True)
        rows.append([np.sqrt(np.mean(np.square(a - b))) for a, b in pairs])
    return np.array(rows)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_error_is_flat_in_the_ring_size(precision: Precision, layout: LayoutName) -> None:
    """Up to 16 ranks have at most 1.25 times the error of one; 64 in float32 at most twice."""
    table = errors(precision, layout, (1, 2, 4, 8, 16, 64))
    assert (table > 0).all()
    assert (table[:-1] <= 1.25 * table[0]).all(), f"{precision} {layout}:\n{table}"
    most = 2 if precision == "float32" else 1.25
    assert (table[-1] <= most * table[0]).all(), f"{precision} {layout}:\n{table}"
