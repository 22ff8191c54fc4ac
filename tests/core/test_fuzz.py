"""The fuzzer finds faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import pytest
from cases import RINGS, Case
from fuzz.campaign import Campaign, Tally
from fuzz.draw import LIMITS, draw, expression
from fuzz.judge import Compared, judge
from tolerances import findings

from ring_core import ChunkLayout, Mask, UnsupportedError


@dataclass
class Broken:
    """Backend whose results are right but with a soft cap and a window together."""

    crashes: bool

    def run(self, case: Case) -> Any:
        if case.dtype == "bfloat16":
            raise UnsupportedError("dtype bfloat16")
        if case.softcap is None or case.mask.window is None or case.batch == 0:
            return case.expected
        if self.crashes:
            raise RuntimeError("message lost")
        return case.expected | {"dq": case.expected["dq"] + 1}


@pytest.mark.parametrize("crashes", [False, True])
def test_faults_are_found(crashes: bool) -> None:
    campaign = Campaign("core", Broken(crashes), Tally(0, 0))
    failures = [failure for _ in range(120) if (failure := campaign.run_next())]
    tally = campaign.tally
    assert failures == tally.failures != [] and tally.refused.total() > 0
    assert tally.cases + tally.refused.total() + len(failures) == 120
    for failure in failures:
        assert "softcap=" in failure.trial and "window=" in failure.trial
        assert ("message lost" if crashes else f"fuzz-{failure.seed}: dq") in failure.error


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_imprecision_is_no_luck(dtype: str) -> None:
    case = Case("imprecise", Mask(causal=True), cp_size=2, seq_len=24, heads=(2, 2), dtype=dtype)

    def compare(case: Case) -> Compared:
        results = {
            name: x + wrong * rng.standard_normal(x.shape) for name, x in case.expected.items()
        }
        return {finding.name: (finding.error, finding.bound) for finding in findings(case, results)}

    rng, unit = np.random.default_rng(0), {"float64": 2.0**-53, "float32": 2.0**-24}
    wrong = 40 * unit.get(dtype, 2.0**-8)
    with pytest.raises(AssertionError, match="imprecise: out: error"):
        judge(case, compare)
    wrong = 0.0
    assert judge(case, compare) == (0.0, False)


@pytest.mark.parametrize("limits", LIMITS)
def test_seeds_say_what_runs(limits: str) -> None:
    values = LIMITS[limits].values
    drawn, again = (
        [draw(seed, LIMITS[limits]).case for seed in range(0, 300 * values, values)] for _ in "ab"
    )
    assert drawn == again
    names = vars(cases) | {"ChunkLayout": ChunkLayout}
    assert [eval(expression(case), names) for case in drawn] == drawn
    rules = ("causal", "window", "cu_seqlens", "predicate")
    assert max(sum(bool(getattr(case.mask, x)) for x in rules) for case in drawn) >= 3
    rings = {"chunks" if isinstance(x.layout, ChunkLayout) else x.ring for x in drawn}
    assert rings == {*RINGS, "chunks"}
    same = [draw(seed, LIMITS[limits]).case for seed in range(values)]  # one program, many values
    assert len({(case.mask, case.seq_len, case.cp_size, case.dtype) for case in same}) == 1
    assert len({case.inputs["q"].tobytes() for case in same}) == values
