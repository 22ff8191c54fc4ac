"""A precision that is what runs is taken; others are refused in true words."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ring_core import UnsupportedError
from ring_jax.compat import flash_attention

HIGHEST = (lax.Precision.HIGHEST, "highest", "float32", (lax.Precision.HIGHEST, "highest"))


@pytest.mark.parametrize("precision", HIGHEST, ids=str)
def test_the_highest(precision: Any) -> None:
    x = jnp.ones((1, 4, 2, 8))
    narrow = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(flash_attention(x, x, x, precision=precision), x)
    with pytest.raises(UnsupportedError, match=r"precision: .* cast the inputs to bfloat16"):
        flash_attention(narrow, narrow, narrow, precision=precision)


@pytest.mark.parametrize("precision", [lax.Precision.HIGH, "bfloat16", "tensorfloat32"], ids=str)
def test_others(precision: Any) -> None:
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(UnsupportedError, match="products of float32 have the highest precision"):
        flash_attention(x, x, x, precision=precision)
