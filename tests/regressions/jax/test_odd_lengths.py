"""Lengths that no layout divides: following the error's advice gives exact results."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_jax import ContextParallel, ring_attention

T = 17
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"window": (4, 7)}, "chunks": {"chunk_size": 5},
}  # fmt: skip


@pytest.mark.nightly(unless=["full"])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_error_says_is_exact(name: str) -> None:
    mesh = jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2])
    cp = ContextParallel(mesh, axis_name="cp")
    keys = jax.random.split(jax.random.key(0), 3)
    qkv = [jax.random.normal(key, (1, T, 2, 8)) for key in keys]
    with pytest.raises(ValueError, match="pad to") as error:
        cp.shard(qkv[0])
    match = re.search(
        r"pad to (\d+) with zeros at the end, as shard\(x, pad=True\) does, and pass seq_len=(\d+)",
        str(error.value),
    )
    assert match is not None
    more, seq_len = int(match[1]) - T, int(match[2])
    assert seq_len == T

    def padded(*qkv: jax.Array) -> jax.Array:
        q, k, v = (cp.shard(jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))) for x in qkv)
        out = cp.attention(q, k, v, seq_len=seq_len, **OPTIONS[name])
        return cp.unshard(out)[:, :T]

    def whole(*qkv: jax.Array) -> jax.Array:
        q, k, v = qkv
        out: jax.Array = ring_attention(q, k, v, axis_name=None, **OPTIONS[name])
        return out

    (out, back), (expected, expected_back) = (jax.vjp(f, *qkv) for f in (padded, whole))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for x, y in zip(back(jnp.ones_like(out)), expected_back(jnp.ones_like(expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
