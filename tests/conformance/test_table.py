"""Every backend agrees with the float64 oracle on the table of cases."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
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
    options = set(inspect.signature(reference.attention).parameters) - {"q", "k", "v"}
    used = {
        name for case in CASES.values() for name, value in case.options.items() if value is not None
    }
    used |= {"mask"} | {"seq_len" for case in CASES.values() if case.lengths is not None}
    for case in CASES.values():
        used |= {"causal"} if case.mask.causal else set()
        used |= {
            name
            for name in ("window", "chunk_size", "cu_seqlens")
            if getattr(case.mask, name) is not None
        }
    assert options == used


def test_spread_case_separates_shards() -> None:
    """The case ``spread`` has lse that differ by more than 80 between shards."""
    x = CASES["spread-contiguous"].inputs
    scores = (
        np.einsum("bqhd,bkgd->bhqk", x["q"], x["k"]) * CASES["spread-contiguous"].dims[0] ** -0.5
    )
    quarter = scores.shape[-1] // 4
    assert np.abs(scores[..., -quarter:].max(-1) - scores[..., :-quarter].max(-1)).max() > 80
