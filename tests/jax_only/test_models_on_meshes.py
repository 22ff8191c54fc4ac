"""Models of three libraries train on meshes with other axes as on one device.

The models are tiny, of the library's own modules and transformations: one ``scan`` with ``remat``
over stacked layers of attention. Each runs two steps of one compiled function, so that the second
has other parameters, on packed documents with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_meshes import KINDS, close, mesh_of, random

from ring_core import StrategyConfig
from ring_jax import ContextParallel, Segments, UnsupportedError
from ring_jax.equinox import convert
from ring_jax.flax import make_attention_fn

LAYERS, HEADS, WIDTH, DIM = 2, 4, 12, 32
B, T, RATE = 4, 16, 0.3
IDS = np.repeat([[0, 1, 2, -1], [5, 5, 7, 9], [3, 3, 3, 3], [0, 1, 1, -1]], 4, axis=1).astype("i4")
X, LABELS = (np.asarray(random(B, T, WIDTH, seed=seed)) for seed in (1, 2))
WAYS = ("jit", "explicit", "hybrid")

Array = jax.Array


class Library(NamedTuple):
    """Functional form of a library's model: parameters are a pytree of arrays.

    ``apply(parameters, attention, x, mask)`` runs it: ``attention`` is this package's, or ``None``
    for the library's own; ``x`` is ``[B, T, width]``; ``mask`` is what that attention takes.
    """

    init: Callable[[], Any]
    apply: Callable[[Any, Any, Array, Any], Array]


def nnx_layers() -> Any:
    def layer(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
        return nnx.MultiHeadAttention(
            HEADS, WIDTH, DIM, num_kv_heads=2, use_bias=False, decode=False, rngs=rngs
        )

    return nnx.split_rngs(splits=LAYERS)(nnx.vmap(layer))(nnx.Rngs(0))


def nnx_apply(state: Any, attention: Any, x: Array, mask: Any) -> Array:
    layers: Any = nnx.merge(nnx.graphdef(nnx.eval_shape(nnx_layers)), state)
    if attention is not None:
        layers.attention_fn = make_attention_fn(attention)
    call: Any = nnx.remat(lambda layer, x: x + layer(x, mask=mask))
    scan: Any = nnx.scan(
        lambda x, layer: call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
    )
    out: Array = scan(x, layers)
    return out


class LinenLayer(linen.Module):
    """Attention in Linen, and the residual."""

    attention: Any

    @linen.compact
    def __call__(self, x: Array, mask: Any) -> tuple[Array, None]:
        ring: Any = (
            {} if self.attention is None else {"attention_fn": make_attention_fn(self.attention)}
        )
        layer = linen.MultiHeadDotProductAttention(HEADS, qkv_features=DIM, use_bias=False, **ring)
        return x + layer(x, mask=mask), None


def linen_layers(attention: Any) -> Any:
    return linen.scan(
        linen.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True},
        in_axes=linen.broadcast, length=LAYERS,
    )(attention)  # fmt: skip


def linen_apply(params: Any, attention: Any, x: Array, mask: Any) -> Array:
    out: Array = linen_layers(attention).apply(params, x, mask)[0]
    return out


def equinox_layers() -> Any:
    def layer(key: Array) -> eqx.nn.MultiheadAttention:
        dim = DIM // HEADS
        return eqx.nn.MultiheadAttention(HEADS, WIDTH, qk_size=dim, vo_size=dim, key=key)

    return eqx.filter_vmap(layer)(jax.random.split(jax.random.key(0), LAYERS))


def equinox_apply(arrays: Any, attention: Any, x: Array, mask: Any) -> Array:
    shapes = eqx.filter_eval_shape(equinox_layers)
    fixed = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]
    layers = eqx.combine(arrays, fixed)
    if attention is not None:
        layers = convert(layers, attention)
    changing, fixed = eqx.partition(layers, eqx.is_array)

    def row(x: Array, mask: Any) -> Array:
        def call(x: Array, layer: Any) -> Any:
            return x + eqx.filter_checkpoint(eqx.combine(layer, fixed))(x, x, x, mask), None

        return lax.scan(call, x, changing)[0]

    return jax.vmap(row)(x, mask)


LIBRARIES = {
    "nnx": Library(lambda: nnx.state(nnx_layers(), nnx.Param), nnx_apply),
    "linen": Library(
        lambda: linen_layers(None).init(jax.random.key(0), jnp.zeros((1, 1, WIDTH)), None), linen_apply
    ),
    "equinox": Library(lambda: eqx.filter(equinox_layers(), eqx.is_array), equinox_apply),
}  # fmt: skip


def loss_of(library: Library, attention: Any, parameters: Any, batch: Any) -> Any:
    """Return the loss, a sum of squares over tokens that are not padding."""
    x, labels, ids, mask = batch
    squares = jnp.square(library.apply(parameters, attention, x, mask) - labels)
    return jnp.sum(jnp.where((ids >= 0)[..., None], squares, 0)) / squares.size


def two_steps(gradient: Any, parameters: Any, batch: Any) -> Any:
    """Run two steps; return both losses and the second step's gradients."""
    traces, losses = [], []

    @jax.jit
    def step(parameters: Any, batch: Any) -> Any:
        traces.append(1)
        loss, grads = gradient(parameters, batch)
        return loss, grads, jax.tree.map(lambda w, d: w - RATE * d, parameters, grads)

    for _ in range(2):
        loss, grads, parameters = step(parameters, batch)
        losses.append(loss)
    assert len(traces) == 1
    return jax.tree.map(np.asarray, (losses, grads))


def parameters_of(name: str) -> Any:
    """Return a model's initial parameters as numpy arrays."""
    return jax.tree.map(np.asarray, jax.jit(LIBRARIES[name].init)())


@cache
def on_one_device(name: str) -> Any:
    """Run two steps with a library's own attention."""
    shown = (IDS[:, :, None] == IDS[:, None]) & np.tri(T, dtype=bool)
    mask = shown if name == "equinox" else shown[:, None]
    gradient = jax.value_and_grad(partial(loss_of, LIBRARIES[name], None))
    return two_steps(gradient, parameters_of(name), (X, LABELS, IDS, mask))


def on_a_mesh(name: str, way: str) -> Any:
    """Run two steps on rings beside each other, over ``dp`` of size 2."""
    mesh = mesh_of(KINDS.get(way, KINDS["auto"]), dp=2, cp=4 if way == "hybrid" else 2)
    # Equinox modules have no batch dimension: vmap adds it.
    cp = ContextParallel(mesh, "cp", None if name == "equinox" else "dp")
    parameters = jax.device_put(parameters_of(name), NamedSharding(mesh, P()))
    # A strategy is bound like any option.
    strategy = StrategyConfig("hybrid", 2) if way == "hybrid" else "auto"
    attention = partial(cp.attention, causal=True, strategy=strategy)
    gradient = jax.value_and_grad(partial(loss_of, LIBRARIES[name], attention))
    with jax.set_mesh(mesh):
        x, labels, ids = (
            jax.device_put(jax.jit(cp.shard)(a), NamedSharding(mesh, P("dp", "cp")))
            for a in (X, LABELS, IDS)
        )
        return two_steps(gradient, parameters, (x, labels, ids, Segments(ids)))


def test_vmap_over_an_explicit_axis_is_an_error() -> None:
    """Equinox's vmapped batch raises on explicit axes, over which JAX cannot map a loop."""
    with pytest.raises(UnsupportedError, match=r"along an axis of its mesh.*batch_axis="):
        on_a_mesh("equinox", "explicit")


@pytest.mark.nightly(unless=["nnx-jit", "linen-jit", "equinox-hybrid"])  # test_meshes: explicit
@pytest.mark.parametrize(
    ("name", "way"), [x for x in product(LIBRARIES, WAYS) if x != ("equinox", "explicit")]
)
def test_training_is_that_of_one_device(name: str, way: str) -> None:
    close(on_a_mesh(name, way), on_one_device(name))
