"""Measure error against ring size: ``python -m benchmarks.common.numerics`` prints a table.

Root mean square errors of the simulated ring against float64, causal attention, for every
precision. Inputs are numbers that the precision holds exactly, so that rounding them costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ring_core import LayoutName, Mask, make_plan, reference, ring_program
from ring_core.reference.item_kernel import Precision, round_to

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
RING_SIZES = (1, 2, 4, 8, 16, 32, 64)
RESULTS = ("out", "dQ", "dK", "dV")
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
        rows.append([_rms(a - b) for a, b in zip([actual, *grads], exact, strict=True)])
    return np.array(rows)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def main(ring_sizes: Sequence[int] = RING_SIZES) -> int:
    """Print a table for each precision."""
    for precision in PRECISIONS:
        print(f"{precision}, causal, zigzag, {SEQ_LEN} tokens")
        print("ranks " + " ".join(f"{name:>9}" for name in RESULTS))
        for cp_size, row in zip(ring_sizes, errors(precision, "zigzag", ring_sizes), strict=True):
            print(f"{cp_size:5} " + " ".join(f"{error:9.2e}" for error in row))
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
