"""Every backend agrees with the float64 oracle on the table of cases."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from cases import CASES, Case
from tolerances import assert_close

from ring_core import reference


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.nightly(*case.nightly)] * bool(case.nightly))
        for name, case in CASES.items()
    ],
)
def test_case(case: Case, run: Any, backend: Any) -> None:
    if case.dtype not in backend.dtypes:
        with pytest.raises(ValueError, match=case.dtype):
            run(case)
        return
    assert_close(case, run(case))


def test_options_are_those_of_the_oracle() -> None:
    used = {"mask"}
    for case in CASES.values():
        used |= {name for name, value in case.options.items() if value is not None}
        used |= {
            x for x in ("window", "chunk_size", "cu_seqlens") if getattr(case.mask, x) is not None
        }
        used |= {"causal"} if case.mask.causal else set()
        used |= {"seq_len"} if case.lengths is not None else set()
    assert {*inspect.signature(reference.attention).parameters} - {"q", "k", "v"} == used
