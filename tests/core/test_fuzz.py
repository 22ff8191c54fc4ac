"""The fuzzer finds and simplifies faults."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from backends.simulator import SimulatorBackend
from cases import Case
from fuzz.__main__ import main
from fuzz.campaign import Campaign, Tally
from fuzz.draw import LIMITS, draw
from fuzz.judge import LUCK, Compared, judge, rounding
from fuzz.trial import expression
from mutants import MUTANTS
from tolerances import findings

from ring_core import ChunkLayout, Mask, UnsupportedError


class Broken:
    """Backend whose results are right unless a condition holds."""

    def __init__(self, wrong: Any) -> None:
        self.wrong = wrong

    def run(self, case: Case) -> Any:
        if case.dtype == "bfloat16":
            raise UnsupportedError("dtype bfloat16")
        results = dict(case.expected)
        if self.wrong(case):
            results["dq"] = results["dq"] + 1
        return results


@pytest.mark.parametrize("crashes", [False, True])
def test_faults_are_found_and_simplified(crashes: bool) -> None:
    def wrong(case: Case) -> bool:
        is_wrong = case.softcap is not None and case.mask.window is not None and case.batch > 0
        if is_wrong and crashes:
            raise RuntimeError("message lost")
        return is_wrong

    campaign = Campaign("core", Broken(wrong), Tally(0, 0))
    failures = [failure for _ in range(120) if (failure := campaign.run_next())]
    assert failures == campaign.tally.failures != []
    assert campaign.tally.cases + campaign.tally.refused.total() + len(failures) == 120
    assert campaign.tally.refused.total() > 0
    for failure in failures:
        simplest = eval(failure.simplest, vars(cases))
        said = "message lost" if crashes else f"fuzz-{failure.seed}: dq"
        assert simplest.softcap is not None and said in failure.error
        sizes = simplest.seq_len, simplest.heads, simplest.dims, simplest.dtype
        assert sizes == (1, (1, 1), (1, 1), "float32")
        assert simplest.mask == Mask(window=simplest.mask.window)


@pytest.mark.nightly(only=["ring-reversed"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant: str) -> None:
    assert any(_is_found(mutant, draw(seed, LIMITS["core"]).case) for seed in range(200))


def _is_found(mutant: str, case: Case) -> bool:
    try:
        results = SimulatorBackend().run(case, mutant=mutant)
    except AssertionError:  # a message had an unexpected shape
        return True
    return any(
        finding.error > LUCK * (finding.bound + rounding(case)[finding.name])
        for finding in findings(case, results)
    )


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
    seeds = range(0, 300 * values, values)
    drawn = [draw(seed, LIMITS[limits]) for seed in seeds]
    assert drawn == [draw(seed, LIMITS[limits]) for seed in seeds]
    found = [trial.case for trial in drawn]
    names = vars(cases) | {"ChunkLayout": ChunkLayout}
    assert [eval(expression(case), names) for case in found] == found
    rules = [
        {f for f in ("causal", "window", "cu_seqlens", "predicate") if getattr(c.mask, f)}
        for c in found
    ]
    assert max(map(len, rules)) >= 3
    rings = {"chunks" if isinstance(x.layout, ChunkLayout) else x.ring for x in found}
    assert rings == {"contiguous", "zigzag", "striped", "balanced", "chunks"}
    again = [draw(seed, LIMITS[limits]).case for seed in range(values)]  # one program, many values
    assert len({(case.mask, case.seq_len, case.cp_size, case.dtype) for case in again}) == 1
    assert len({case.inputs["q"].tobytes() for case in again}) == values


def test_counts_of_backends_stand_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    report.write_text('{"backends": {"torch": {"cases": 2}}}')
    assert main(["--json", str(report), "--cases", "3", "--seed", "7"]) == 0
    assert "core: seeds 7 to 9, 3 cases" in capsys.readouterr().out
    backends = json.loads(report.read_text())["backends"]
    kept = backends["core"]
    assert backends["torch"] == {"cases": 2}, "another backend's stays"
    assert (kept["seeds"], kept["cases"], kept["failed"]) == ([7, 9], 3, 0)
    assert kept["environment"]["python"] == platform.python_version()
