"""Models of three libraries train on meshes with other axes as on one device.

The models are tiny, of the library's own modules and transformations: layers of attention, one
after another, or as one ``scan`` with ``remat`` over stacked layers. Each runs two steps of one
compiled function, so that the second has other parameters, on packed documents with padding.
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
from jax_meshes import KINDS, mesh_of, random
from tolerances import compare

from ring_core import StrategyConfig
from ring_jax import ContextParallel, Segments, UnsupportedError
from ring_jax.equinox import convert
from ring_jax.flax import make_attention_fn

LAYERS, HEADS, WIDTH, DIM = 2, 4, 12, 32
B, T, RATE = 4, 16, 0.3
IDS = np.repeat([[0, 1, 2, -1], [5, 5, 7, 9], [3, 3, 3, 3], [0, 1, 1, -1]], 4, axis=1).astype("i4")
X, LABELS = (np.asarray(random(B, T, WIDTH, seed=seed)) for seed in (1, 2))
WAYS = ("jit", "explicit", "scan", "hybrid")

Array = jax.Array


class Library(NamedTuple):
    """Functional form of a library's model: parameters are a pytree of arrays.

    ``apply(parameters, attention, scanned, x, mask)`` runs it: ``attention`` is this package's, or
    ``None`` for the library's own; ``x`` is ``[B, T, width]``; ``mask`` is what that attention
    takes. ``stack`` turns parameters of single layers into those of stacked layers.
    """

    init: Callable[[], Any]
    apply: Callable[[Any, Any, bool, Array, Any], Array]
    stack: Callable[[Any], Any]


def stack(layers: Any) -> Any:
    """Stack the arrays of several trees along a new first dimension."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *layers)


def nnx_layers(*, scanned: bool) -> Any:
    def layer(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
        return nnx.MultiHeadAttention(
            HEADS, WIDTH, DIM, num_kv_heads=2, use_bias=False, decode=False, rngs=rngs
        )

    if scanned:
        return nnx.split_rngs(splits=LAYERS)(nnx.vmap(layer))(nnx.Rngs(0))
    rngs = nnx.Rngs(0)
    return nnx.List([layer(rngs) for _ in range(LAYERS)])


def nnx_apply(state: Any, attention: Any, scanned: bool, x: Array, mask: Any) -> Array:
    shapes = nnx.eval_shape(partial(nnx_layers, scanned=scanned))
    layers: Any = nnx.merge(nnx.graphdef(shapes), state)
    for _, module in nnx.iter_graph(layers):
        if attention is not None and isinstance(module, nnx.MultiHeadAttention):
            module.attention_fn = make_attention_fn(attention)
    if scanned:
        call: Any = nnx.remat(lambda layer, x: x + layer(x, mask=mask))
        scan: Any = nnx.scan(
            lambda x, layer: call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        x, layers = scan(x, layers), ()
    for layer in layers:
        x = x + layer(x, mask=mask)
    return x


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


class LinenModel(linen.Module):
    """Model of Linen layers, in sequence or scanned."""

    attention: Any
    scanned: bool

    @linen.compact
    def __call__(self, x: Array, mask: Any) -> Array:
        if self.scanned:
            layers = linen.scan(
                linen.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True},
                in_axes=linen.broadcast, length=LAYERS,
            )  # fmt: skip
            return layers(self.attention, name="layers")(x, mask)[0]
        for number in range(LAYERS):
            x, _ = LinenLayer(self.attention, name=f"layer{number}")(x, mask)
        return x


def linen_apply(params: Any, attention: Any, scanned: bool, x: Array, mask: Any) -> Any:
    out: Any = LinenModel(attention, scanned).apply(params, x, mask)
    return out


def equinox_layers(*, scanned: bool) -> Any:
    def layer(key: Array) -> eqx.nn.MultiheadAttention:
        dim = DIM // HEADS
        return eqx.nn.MultiheadAttention(HEADS, WIDTH, qk_size=dim, vo_size=dim, key=key)

    keys = jax.random.split(jax.random.key(0), LAYERS)
    return eqx.filter_vmap(layer)(keys) if scanned else [*map(layer, keys)]


def equinox_apply(arrays: Any, attention: Any, scanned: bool, x: Array, mask: Any) -> Array:
    shapes = eqx.filter_eval_shape(partial(equinox_layers, scanned=scanned))
    static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]
    layers = eqx.combine(arrays, static)
    if attention is not None:
        layers = convert(layers, attention)

    def row(x: Array, mask: Any) -> Array:
        if scanned:
            changing, fixed = eqx.partition(layers, eqx.is_array)

            def call(x: Array, layer: Any) -> Any:
                layer = eqx.filter_checkpoint(eqx.combine(layer, fixed))
                return x + layer(x, x, x, mask), None

            return lax.scan(call, x, changing)[0]
        for layer in layers:
            x = x + layer(x, x, x, mask)
        return x

    return jax.vmap(row)(x, mask)


LIBRARIES = {
    "nnx": Library(
        lambda: nnx.state(nnx_layers(scanned=False), nnx.Param), nnx_apply,
        lambda x: stack(x.values()),
    ),
    "linen": Library(
        lambda: LinenModel(None, False).init(jax.random.key(0), jnp.zeros((1, 1, WIDTH)), None),
        linen_apply, lambda x: {"params": {"layers": stack(x["params"].values())}},
    ),
    "equinox": Library(
        lambda: eqx.filter(equinox_layers(scanned=False), eqx.is_array), equinox_apply, stack
    ),
}  # fmt: skip


def loss_of(library: Library, attention: Any, scanned: bool, parameters: Any, batch: Any) -> Any:
    """Return the loss, a sum of squares over tokens that are not padding."""
    x, labels, ids, mask = batch
    squares = jnp.square(library.apply(parameters, attention, scanned, x, mask) - labels)
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


@cache
def parameters_of(name: str) -> Any:
    """Return a model's initial parameters as numpy arrays."""
    return jax.tree.map(np.asarray, jax.jit(LIBRARIES[name].init)())


@cache
def on_one_device(name: str) -> Any:
    """Run two steps with a library's own attention, in float64 and in float32."""
    results, first = [], parameters_of(name)
    shown = (IDS[:, :, None] == IDS[:, None]) & np.tri(T, dtype=bool)
    mask = shown if name == "equinox" else shown[:, None]
    gradient = jax.value_and_grad(partial(loss_of, LIBRARIES[name], None, False))
    for dtype in ("f8", "f4"):
        with jax.enable_x64(dtype == "f8"):
            x, labels = X.astype(dtype), LABELS.astype(dtype)
            parameters = jax.tree.map(lambda w, d=dtype: w.astype(d), first)
            results.append(two_steps(gradient, parameters, (x, labels, IDS, mask)))
    return results


def on_a_mesh(name: str, way: str) -> Any:
    """Run two steps on rings beside each other, over ``dp`` of size 2."""
    library, scanned = LIBRARIES[name], way == "scan"
    mesh = mesh_of(KINDS.get(way, KINDS["auto"]), dp=2, cp=4 if way == "hybrid" else 2)
    # Equinox modules have no batch dimension: vmap adds it.
    cp = ContextParallel(mesh, "cp", None if name == "equinox" else "dp")
    split = P("dp", "cp")
    parameters = (library.stack if scanned else lambda x: x)(parameters_of(name))
    parameters = jax.device_put(parameters, NamedSharding(mesh, P()))
    # A strategy is bound like any option.
    strategy = StrategyConfig("hybrid", 2) if way == "hybrid" else "auto"
    attention = partial(cp.attention, causal=True, strategy=strategy)
    gradient = jax.value_and_grad(partial(loss_of, library, attention, scanned))
    with jax.set_mesh(mesh):
        x, labels, ids = (
            jax.device_put(jax.jit(cp.shard)(a), NamedSharding(mesh, split))
            for a in (X, LABELS, IDS)
        )
        return two_steps(gradient, parameters, (x, labels, ids, Segments(ids)))


def test_vmap_over_an_explicit_axis_is_an_error() -> None:
    """Equinox's vmapped batch raises on explicit axes, over which JAX cannot map a loop."""
    with pytest.raises(UnsupportedError, match=r"along an axis of its mesh.*batch_axis="):
        on_a_mesh("equinox", "explicit")


@pytest.mark.nightly(
    unless=["nnx-scan", "linen-jit", "equinox-hybrid"]
)  # test_meshes.py has explicit axes
@pytest.mark.parametrize(
    ("name", "way"), [x for x in product(LIBRARIES, WAYS) if x != ("equinox", "explicit")]
)
def test_training_is_that_of_one_device(name: str, way: str) -> None:
    results = [*on_one_device(name), on_a_mesh(name, way)]
    if way == "scan":
        results[:2] = [(losses, LIBRARIES[name].stack(grads)) for losses, grads in results[:2]]
    for exact, plain, on_mesh in zip(*map(jax.tree.leaves, results), strict=True):
        bad, error, bound = compare(on_mesh, exact, plain, "float32")
        assert not bad
        assert error <= bound
