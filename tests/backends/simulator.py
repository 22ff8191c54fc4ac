"""Test backend for ring_core: the numpy simulator."""

from __future__ import annotations

from typing import Any, cast

import numpy.typing as npt
from cases import Case
from mutants import applied

from ring_core import reference
from ring_core.reference.item_kernel import Precision

Arrays = dict[str, npt.NDArray[Any]]


class SimulatorBackend:
    """Backend that runs a plan rank by rank in this process."""

    dtypes = ("float64", "float32", "bfloat16", "float16")
    failures = ()

    def run(self, case: Case, mutant: str | None = None) -> Arrays:
        """Run one case."""
        _ = case.expected  # computed and cached before the mutant breaks anything
        with applied(mutant):
            return simulate(case)


def simulate(case: Case) -> Arrays:
    """Return the simulator's results for a case."""
    x, precision = case.inputs, cast("Precision", case.dtype)
    options = {"dout": x["dout"], "dlse": x.get("dlse"), **case.options}
    result = reference.run(
        case.program, *(x[name] for name in "qkv"), precision=precision, **options
    )
    return {name: x for name, x in vars(result).items() if name in case.expected}
