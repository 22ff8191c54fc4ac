"""An executor that reads only tables, as a traced program must, equals the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from backends.table_executor import execute
from cases import CASES, Case

from ring_core import reference

PLAIN = [
    case
    for case in CASES.values()
    if not any(
        value is not None
        for name, value in case.options.items()
        if name not in ("dropout_p", "softmax_scale")
    )
    and case.batch > 0
    and case.poison is None
]


@pytest.mark.parametrize("case", PLAIN, ids=[case.name for case in PLAIN])
def test_equals_the_simulator(case: Case) -> None:
    program = case.program
    x = case.inputs
    scale = case.softmax_scale or case.dims[0] ** -0.5
    simulated = reference.simulate(
        program, x["q"], x["k"], x["v"], dout=x["dout"], softmax_scale=scale
    )
    executed = execute(program, x["q"], x["k"], x["v"], x["dout"], scale)
    for actual, expected in zip(executed, simulated, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-11)
