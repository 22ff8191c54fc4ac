"""A precision that equals the one that runs is accepted; others are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ring_core import UnsupportedError
from ring_jax import ring_attention
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


def test_float64_of_numpy_is_what_jax_makes_of_it() -> None:
    """Without x64, float64 of numpy runs as float32, without a warning of JAX."""
    q: Any = np.zeros((1, 8, 2, 4))
    out = jax.eval_shape(lambda: ring_attention(q, q, q, axis_name=None, kernel="xla"))
    assert out.dtype == jnp.float32
