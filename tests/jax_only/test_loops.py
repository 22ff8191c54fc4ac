"""A ring rolled into a loop is exact and equals its unrolled stages."""

from __future__ import annotations

import numpy as np
import pytest
from backends.jax_devices import JaxBackend
from loops import CASES, in_loop, in_loop_and_unrolled
from tolerances import assert_close


@pytest.mark.nightly(unless=["everything", "helpers"])
@pytest.mark.parametrize("name", CASES)
def test_in_a_loop(name: str) -> None:
    assert_close(CASES[name], in_loop(JaxBackend(), CASES[name], "auto"))


@pytest.mark.nightly  # it compiles all unrolled stages, too
@pytest.mark.parametrize("name", CASES)
def test_stages_one_by_one(name: str) -> None:
    """Looped and unrolled stages agree up to the order in which XLA adds."""
    looped, unrolled = in_loop_and_unrolled(JaxBackend(), CASES[name], "auto")
    for result, value in looped.items():
        np.testing.assert_allclose(value, unrolled[result], rtol=1e-5, atol=1e-5, err_msg=result)
