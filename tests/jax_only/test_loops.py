"""A ring in a loop computes what its stages do one by one."""

from __future__ import annotations

import numpy as np
import pytest
from backends.jax_devices import JaxBackend
from loops import CASES, in_loop_and_unrolled
from tolerances import assert_close


@pytest.mark.nightly(unless=["everything"])
@pytest.mark.parametrize("name", CASES)
def test_in_a_loop(name: str) -> None:
    """As exact as a case has to be, and the same but for the order in which XLA adds."""
    case = CASES[name]
    looped, unrolled = in_loop_and_unrolled(JaxBackend(), case, ("auto", "ring"))
    assert_close(case, looped)
    for result, value in looped.items():
        np.testing.assert_allclose(value, unrolled[result], rtol=1e-5, atol=1e-5, err_msg=result)
