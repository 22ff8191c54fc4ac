"""What calls written for other libraries ask for: refused, or taken where it changes nothing."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from ring_core import UnsupportedError


def refuse(**arguments: tuple[object, str]) -> None:
    """Raise for what was given: each argument is its value, ``None`` if not given, and advice.

    Raises:
        UnsupportedError: Naming every argument that was given and what to do instead.
    """
    given = [
        f"{name}: {advice}" for name, (value, advice) in arguments.items() if value is not None
    ]
    if given:
        raise UnsupportedError("; ".join(given))


def precision_of(precision: object, dtype: DTypeLike) -> tuple[object, str]:
    """What :func:`refuse` takes of a precision of matmuls: the default, and what runs anyway."""
    highest = (lax.Precision.HIGHEST, "highest", "float32")
    taken = [None, "default", lax.Precision.DEFAULT]
    taken += highest if jnp.dtype(dtype) in (jnp.float32, jnp.float64) else ()
    pair = isinstance(precision, tuple) and len(precision) == 2
    sides = precision if isinstance(precision, tuple) and pair else (precision,)
    return None if all(side in taken for side in sides) else precision, (
        "products of float32 have the highest precision, and 16-bit ones are summed in float32; "
        "leave it out, and cast the inputs to bfloat16 for speed"
    )
