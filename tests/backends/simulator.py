"""Test backend for ring_core: the numpy simulator."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from cases import Case
from mutants import applied

from ring_core import reference

Arrays = dict[str, npt.NDArray[Any]]


class SimulatorBackend:
    """Backend that runs a plan rank by rank in this process."""

    dtypes = ("float64", "float32", "bfloat16", "float16")
    failures = ()

    def run(self, case: Case, mutant: str | None = None) -> Arrays:
        """Run one case."""
        _ = case.expected  # computed and cached before the mutant breaks anything
        x: dict[str, Any] = case.inputs
        options = {"precision": case.dtype, "dlse": x.get("dlse"), **case.options}
        with applied(mutant):
            result = reference.run(case.program, x["q"], x["k"], x["v"], dout=x["dout"], **options)
        return {name: x for name, x in vars(result).items() if name in case.expected}
