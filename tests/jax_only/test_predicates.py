"""Predicates: kernels, the shift of a bias and the tripwire's oracle show what the plan shows.

The class: a function that is evaluated twice, by numpy in 64 bits and by a program, whose integers
and fractions have 32, and whose arrays are no numpy arrays. Programs evaluate an expression that
cannot differ, or read the plan's tiles; where there is neither, they are refused by name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predicates import PREDICATES, TRACED, T, expected, inputs, very_negative_bias

import ring_jax
from ring_core import Mask, UnsupportedError
from ring_core.plan.tile_mask import BlockGeometry
from ring_jax import ContextParallel, ring_attention

CP = ContextParallel(jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2]), "cp")
JAX_TABLE = jnp.arange(T) % 5
OWN: dict[str, Any] = {
    "JAX's functions": lambda i, j: jnp.minimum(i, j) < 9,
    "JAX's table": lambda i, j: JAX_TABLE[i] == JAX_TABLE[j],
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.nightly(unless=["hash-False", "fraction-True", "table-False", "bits-True"])
def test_what_the_plan_shows(name: str, biased: bool) -> None:
    q, k, v = (CP.shard(jnp.asarray(x)) for x in inputs(np.float32))
    bias = very_negative_bias(np.float32) if biased else None
    own_rows: Any = {} if bias is None else {"bias": CP.shard(jnp.asarray(bias), dim=-2)}
    with ring_jax.check(1):
        out = CP.unshard(CP.attention(q, k, v, mask=Mask(predicate=PREDICATES[name]), **own_rows))
    right, rows = expected(name, bias)
    np.testing.assert_allclose(np.asarray(out)[:, rows], right[:, rows], atol=2e-6)


@pytest.mark.parametrize("setting", ["jax_enable_x64", "jax_numpy_dtype_promotion"])
@pytest.mark.parametrize("name", ["hash", "bits"])
def test_in_other_modes_of_jax(name: str, setting: str) -> None:
    value: Any = True if setting == "jax_enable_x64" else "strict"
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        q, k, v = (jnp.asarray(x) for x in inputs(np.float32))
        out = ring_attention(q, k, v, axis_name=None, mask=Mask(predicate=PREDICATES[name]))
    finally:
        jax.config.update(setting, before)
    np.testing.assert_allclose(np.asarray(out), expected(name)[0], atol=2e-6)


@pytest.mark.parametrize("name", OWN)
def test_functions_of_jax(name: str) -> None:
    q, k, v = (jnp.asarray(x) for x in inputs(np.float32))
    mask = Mask(predicate=OWN[name])
    shown = mask.dense(np.arange(T), np.arange(T))
    out, right = (
        ring_attention(q, k, v, axis_name=None, mask=m) for m in (mask, jnp.asarray(shown))
    )
    np.testing.assert_allclose(np.asarray(out), np.asarray(right), atol=2e-6)


@pytest.mark.parametrize("name", PREDICATES)
def test_too_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockGeometry, "tiles", None)
    q = jnp.ones((1, T - 8, 2, 8))
    call: Any = {"axis_name": None, "mask": Mask(predicate=PREDICATES[name]), "kernel": "xla"}
    if name in TRACED:
        ring_attention(q, q, q, **call)
        return
    with pytest.raises(UnsupportedError, match=r"64 MiB. Instead: .* 10 \* j >= 6 \* i") as error:
        ring_attention(q, q, q, **call)
    assert "Trac" not in str(error.value).replace("_Traced", "")


def test_windows_beyond_32_bits() -> None:
    """Numbers of options, too, may be wider than a device's: beside a bias JAX evaluates them."""
    q, k, v = (jnp.asarray(x) for x in inputs(np.float32))
    wide: Any = {
        "window": (2**35, 2**32),
        "chunk_size": 2**39,
        "bias": jnp.full((1, 1, T, T), -1e10),
    }
    none: dict[str, Any] = {}
    outs = [ring_attention(q, k, v, axis_name=None, **options) for options in (wide, none)]
    np.testing.assert_allclose(np.asarray(outs[0]), np.asarray(outs[1]), atol=2e-6)


class _Lattice:
    def __init__(self, without: int) -> None:
        self.without = without

    def __call__(self, i: Any, j: Any) -> Any:
        return (i - j) % 4 != self.without


def test_a_function_that_is_made_anew_is_not_compiled_anew() -> None:
    q = jnp.ones((1, 16, 2, 8))
    plans = []
    for _ in range(2):
        call = CP._check_call(
            q, q, q, ring_jax.records.CallOptions(mask=Mask(predicate=_Lattice(2)))
        )
        plans.append(call.spec)
    assert plans[0] == plans[1]
