"""Sequences that no number of devices divides: from `shard(pad=True)` to `unshard(seq_len=)`."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import ring_jax
from ring_jax import ContextParallel

SIZE = 3
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def context(layout: Any, kind: str = "auto") -> ContextParallel:
    devices = jax.devices()[:SIZE]
    mesh = jax.make_mesh((SIZE,), ("cp",), axis_types=(KINDS[kind],), devices=devices)
    return ContextParallel(mesh, "cp", layout=layout)


def random(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


@pytest.mark.nightly("jax", unless=["zigzag-auto", "contiguous-explicit", "striped-explicit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_there_and_back(layout: str, kind: str) -> None:
    cp = context(layout, kind)
    for length in (1, 4, 8):
        x = random(2, length, 5)
        padded_len = cp.layout_of(length, pad=True).padded_len
        for dim, y in ((1, x), (-2, x), (0, x.swapaxes(0, 1))):
            shards = cp.shard(y, dim=dim, pad=True, fill=-3.5)
            assert shards.shape[dim] == padded_len
            assert (np.asarray(shards) == -3.5).sum() == 10 * (padded_len - length)
            np.testing.assert_array_equal(cp.unshard(shards, dim=dim, seq_len=length), y)
        tokens = cp.shard(jnp.arange(length), dim=0, pad=True, fill=-1)
        positions = np.asarray(cp.positions(length))
        np.testing.assert_array_equal(tokens, np.where(positions < length, positions, -1))
        weights = random(2, padded_len, 5)
        _, pull = jax.vjp(partial(cp.shard, pad=True), x)
        (grad,) = pull(cp.shard(weights))
        np.testing.assert_array_equal(grad, weights[:, :length])
        _, pull = jax.vjp(partial(cp.unshard, seq_len=length), cp.shard(x, pad=True))
        (grad,) = pull(weights[:, :length])
        whole = np.asarray(cp.unshard(grad))
        np.testing.assert_array_equal(whole[:, :length], weights[:, :length])
        assert not whole[:, length:].any()


@pytest.mark.nightly("jax", unless=["contiguous-2-bias"])
@pytest.mark.parametrize("name", ["mask", "bias", "segment_ids"])
@pytest.mark.parametrize(("layout", "length"), [("zigzag", 4), ("contiguous", 2), ("striped", 8)])
def test_what_is_sharded_with_padding_is_exact(layout: str, length: int, name: str) -> None:
    """Padded shards are exact under jit, with every call checked."""
    cp = context(layout)
    q, k, v, dout = (random(1, length, heads, 8) for heads in (4, 2, 2, 4))
    options: dict[str, Any] = {
        "mask": {"mask": random(length, length) < 0.7},
        "bias": {"bias": random(1, 4, length, length), "sinks": random(4)},
        "segment_ids": {"segment_ids": (jnp.arange(length, dtype=jnp.int32) // 3)[None]},
    }[name]
    dims = {"segment_ids": 1, "mask": -2, "bias": -2}

    @jax.jit
    def attend(q: Any, k: Any, v: Any, options: Any) -> Any:
        shards = (cp.shard(x, pad=True) for x in (q, k, v))
        sharded: dict[str, Any] = {
            n: cp.shard(x, dim=dims[n], pad=True) if n in dims else x for n, x in options.items()
        }
        return cp.unshard(cp.attention(*shards, seq_len=length, **sharded), seq_len=length)

    def alone(*x: Any) -> Any:
        return ring_jax.ring_attention(*x[:3], axis_name=None, **options | x[3])

    leaves = {n: x for n, x in options.items() if n in ("bias", "sinks")}
    with ring_jax.check(every=1):
        out, pull = jax.vjp(lambda *x: attend(*x[:3], options | x[3]), q, k, v, leaves)
        grads = pull(dout)
        jax.effects_barrier()
    expected, pull = jax.vjp(alone, q, k, v, leaves)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), grads, pull(dout)
    )


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_moves(layout: str) -> None:
    """Shift, relayout and halo move no tokens or gradients into padding or out of it."""
    cp, plain, length = context(layout), context("contiguous"), 8
    x, weights = random(2, length, 3), random(2, length, 3)

    def shifted(x: Any) -> Any:
        return cp.unshard(
            cp.shift(cp.shard(x, pad=True, fill=7), 1, seq_len=length), seq_len=length
        )

    def expected(x: Any) -> Any:
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))

    (out, pull), (want, pull_want) = (jax.vjp(f, x) for f in (shifted, expected))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(pull(weights)[0], pull_want(weights)[0])
    local = cp.shard(x, pad=True, fill=7)
    relaid = cp.relayout(local, to=plain, seq_len=length)
    np.testing.assert_array_equal(relaid, plain.shard(x, pad=True))
    np.testing.assert_array_equal(
        plain.relayout(relaid, to=cp, seq_len=length), cp.shard(x, pad=True)
    )
    rows, positions, _ = (np.asarray(y) for y in cp.halo(local, 2, 1, seq_len=length))
    assert positions.max() < length
    per_sequence = len(rows) // SIZE // 2
    batch = np.arange(len(rows)) // per_sequence % 2
    tokens = np.asarray(x)[batch[:, None], np.clip(positions, 0, None)]
    np.testing.assert_array_equal(rows, np.where(positions[..., None] >= 0, tokens, 0.0))


def test_the_error_says_how_to_pad() -> None:
    cp, x = context("zigzag"), random(1, 17, 2, 8)
    with pytest.raises(ValueError, match="pad to") as error:
        cp.shard(x)
    said = re.search(
        r"pad to (\d+) with zeros at the end, as shard\(x, pad=True\) does, and pass seq_len=(\d+)",
        str(error.value),
    )
    assert said is not None
    to, seq_len = int(said[1]), int(said[2])
    assert seq_len == 17 and to == cp.layout_of(17, pad=True).padded_len
    zeros = jnp.pad(x, ((0, 0), (0, to - 17), (0, 0), (0, 0)))
    np.testing.assert_array_equal(cp.shard(x, pad=True), cp.shard(zeros))
