"""Equinox on the ring gives the results of Equinox's own module."""

from __future__ import annotations

import io
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import CAUSAL, IDS, KEY, ONE, B, H, T, all_close, close, context, parameters, random
from jax.sharding import PartitionSpec as P

import ring_jax.equinox
from ring_core import UnsupportedError
from ring_jax import Segments, ring_attention


@pytest.mark.parametrize("method", ["__init__", "__call__"])
def test_signature_of_equinox(method: str) -> None:
    modules = (ring_jax.equinox.MultiheadAttention, eqx.nn.MultiheadAttention)
    ours, theirs = (parameters(getattr(module, method)) for module in modules)
    assert ours.pop("attention", None) is not None or method == "__call__"
    assert ours == theirs


def module_of(dropout_p: float = 0.0) -> eqx.nn.MultiheadAttention:
    return eqx.nn.MultiheadAttention(
        H, 12, output_size=7, qk_size=6, vo_size=5, use_query_bias=True, dropout_p=dropout_p,
        key=jax.random.key(1),
    )  # fmt: skip


def equinox_loss(model: Any, x: jax.Array, weight: jax.Array, mask: Any = None) -> Any:
    """Return the loss and gradient of a model that contains an attention module."""

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model: Any) -> Any:
        out = jax.vmap(lambda row: model["attention"](row, row, row, mask))(x)
        return jnp.sum(out * weight)

    return loss(model)


@cache
def equinox_expected() -> Any:
    x, weight = random(B, T, 12, seed=5), random(B, T, 7, seed=6)
    return equinox_loss({"attention": module_of(), "name": "one"}, x, weight, CAUSAL)


@pytest.mark.nightly(unless=["2-zigzag"])
@pytest.mark.parametrize(("size", "layout"), [(2, "zigzag"), (4, "contiguous")])
def test_equinox(size: int, layout: str) -> None:
    model: dict[str, Any] = {"attention": module_of(), "name": "one"}
    x, weight = random(B, T, 12, seed=5), random(B, T, 7, seed=6)
    cp = context(size, layout)
    ring = ring_jax.equinox.convert(model, partial(cp.attention, causal=True))
    assert isinstance(ring["attention"], ring_jax.equinox.MultiheadAttention)
    assert ring["attention"].query_proj is model["attention"].query_proj
    all_close(equinox_loss(ring, cp.shard(x), cp.shard(weight)), equinox_expected())


def test_equinox_inside_shard_map() -> None:
    """Dropout, documents and ``process_heads`` agree between two devices and one."""
    x, module = random(T, 12, seed=5), module_of(dropout_p=0.3)
    cp = context()
    local = partial(ring_attention, axis_name="cp", layout="zigzag", causal=True)

    def call(attention: Any, x: Any, ids: Any, places: Any, **options: Any) -> Any:
        def moved(q: Any, k: Any, v: Any) -> Any:
            return q + places[:, None, None], k, v

        converted: Any = ring_jax.equinox.convert(module, attention)
        return converted(x, x, x, Segments(ids), process_heads=moved, **options)

    tokens = P("cp")
    ring = jax.shard_map(
        partial(call, local, key=KEY), mesh=cp.mesh, in_specs=(tokens,) * 3, out_specs=tokens
    )
    inputs = [x, jnp.asarray(IDS[0]), jnp.linspace(0, 1, T)]
    single = partial(call, partial(ONE, causal=True))
    expected, nothing = (
        jax.jit(partial(single, **options))(*inputs) for options in ({"key": KEY}, {"inference": True})
    )  # fmt: skip
    actual = jax.jit(ring)(*(cp.shard(x, dim=0) for x in inputs))
    close(cp.unshard(actual, dim=0), expected)
    assert np.abs(expected - nothing).max() > 1e-2
    theirs = jax.jit(lambda x: module(
        x, x, x, CAUSAL & (IDS[0][:, None] == IDS[0]), inference=True,
        process_heads=lambda q, k, v: (q + inputs[2][:, None, None], k, v),
    ))(x)  # fmt: skip
    close(nothing[:12], theirs[:12])


def test_parameters_of_equinox() -> None:
    """Initial values and serialised files are those of Equinox's own module."""
    attention = partial(ONE, causal=True)
    new = ring_jax.equinox.MultiheadAttention(H, 12, attention=attention, key=jax.random.key(0))
    old = eqx.nn.MultiheadAttention(H, 12, key=jax.random.key(0))
    assert eqx.tree_equal(new, ring_jax.equinox.convert(old, attention))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, old)
    file.seek(0)
    blank = ring_jax.equinox.MultiheadAttention(H, 12, attention=attention, key=jax.random.key(7))
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, blank), new)


class Peculiar(eqx.nn.MultiheadAttention):
    """Subclass that may have changed anything."""


@pytest.mark.parametrize(
    ("model", "message", "kind"),
    [
        ([jnp.ones(3)], "there is no equinox.nn.MultiheadAttention", ValueError),
        ([object.__new__(Peculiar)], "^Peculiar is a subclass", UnsupportedError),
    ],
)
def test_models_that_cannot_be_converted(model: Any, message: str, kind: type[ValueError]) -> None:
    with pytest.raises(kind, match=message):
        ring_jax.equinox.convert(model, ONE)
    with pytest.raises(ValueError, match="attention must be"):
        ring_jax.equinox.convert([module_of()], jax.nn.dot_product_attention)


@pytest.mark.parametrize(
    ("arguments", "message", "kind"),
    [
        ({"mask": CAUSAL[:, 1:], "inference": True}, "^mask must have shape", ValueError),
        ({"deterministic": True}, "^deterministic: pass inference=True", UnsupportedError),
        ({}, "dropout of 0.5 needs key", ValueError),
        ({"process_heads": lambda q, k, v: (q[:1], k, v)}, "must not change", ValueError),
    ],
)
def test_wrong_calls_of_equinox(
    arguments: dict[str, Any], message: str, kind: type[ValueError]
) -> None:
    module, x = ring_jax.equinox.convert(module_of(dropout_p=0.5), ONE), random(T, 12)
    with pytest.raises(kind, match=message):
        module(x, x, x, **arguments)
