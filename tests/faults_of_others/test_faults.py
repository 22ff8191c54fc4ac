"""The check rejects the results of each fault, and Ring's are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from faults_of_others.models import FAULTS, LENGTH, RANKS, Fault, Results
from ring_core.tripwire import Kind, SampledRows, sampled

KINDS: dict[str, Kind] = {"out": "queries", "dq": "queries", "dk": "keys", "dv": "keys"}


def is_rejected(wrong: Results, exact: Results) -> bool:
    """Return True if a sample of the first four checked calls exceeds its limit on some rank."""
    for name, actual in wrong.items():
        if name == "dsinks":  # one number per head: all are compared
            return not np.allclose(actual, exact[name], rtol=1e-4)
        for call, rank in np.ndindex(4, RANKS):
            rows = sampled(KINDS[name], call + 1, rank, LENGTH // RANKS) + rank * LENGTH // RANKS
            sampled_wrong, true = (x[0][rows] for x in (actual, exact[name]))
            plain = true.astype(np.float32).astype(np.float64)
            of_rows = SampledRows(sampled_wrong, true, plain, np.ones(len(rows)))
            if of_rows.worst("float32") is not None:
                return True
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_rejected_there_and_right_here(fault: Fault, backend: Any) -> None:
    x = fault.call
    assert is_rejected(fault.model(x), x.expected), "the check sees the fault"
    ways: list[tuple[Any, str]] = [("zigzag", "ring"), ("contiguous", "gather")]
    if "heads" in fault.name:  # which ranks do not divide
        ways.append(("zigzag", "ulysses"))
    for layout, strategy in ways:
        right = backend.run(replace(x, layout=layout), strategy=strategy)
        assert not is_rejected({"out": right["out"]}, x.expected)
        for name, value in right.items():
            np.testing.assert_allclose(value, x.expected[name], rtol=2e-4, atol=2e-5, err_msg=name)
    assert fault.text.endswith(".") and fault.how.endswith(".")
    assert "#" in fault.text or "/" in fault.text, "the project, and the thread where there is one"
