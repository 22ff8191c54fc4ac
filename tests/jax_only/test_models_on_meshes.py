"""Models of three libraries train on meshes with other axes as on one device.

Each runs two steps of one compiled function, so that the second has other parameters, on packed
documents with padding.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_models import LIBRARIES, WIDTH, Library
from tolerances import compare

from ring_jax import ContextParallel, Segments, UnsupportedError, ring_attention

B, T, RATE = 4, 16, 0.3
IDS = np.repeat([[0, 1, 2, -1], [5, 5, 7, 9], [3, 3, 3, 3], [0, 1, 1, -1]], 4, axis=1).astype("i4")
X = np.random.default_rng(1).standard_normal((B, T, WIDTH)).astype("f4")
LABELS = np.random.default_rng(2).standard_normal((B, T, WIDTH)).astype("f4")
WAYS = ("jit", "explicit", "shard_map", "remat", "scan")


def loss_of(library: Library, attention: Any, layers: str, parameters: Any, batch: Any) -> Any:
    """Return the loss, a sum of squares over tokens that are not padding."""
    x, labels, ids, mask = batch
    squares = jnp.square(library.apply(parameters, attention, layers, x, mask) - labels)
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
    gradient = jax.value_and_grad(partial(loss_of, LIBRARIES[name], None, "plain"))
    for dtype in ("f8", "f4"):
        with jax.enable_x64(dtype == "f8"):
            x, labels = X.astype(dtype), LABELS.astype(dtype)
            parameters = jax.tree.map(lambda w, d=dtype: w.astype(d), first)
            results.append(two_steps(gradient, parameters, (x, labels, IDS, mask)))
    return results


def on_a_mesh(name: str, way: str) -> Any:
    """Run two steps on a ring, with ``dp`` and ``cp`` of size 2."""
    layers = way if way in ("remat", "scan") else "plain"
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), (kind,) * 2, devices=jax.devices()[:4])
    # Equinox modules have no batch dimension: vmap adds it.
    cp = ContextParallel(mesh, "cp", None if name == "equinox" else "dp")
    split = P("dp", "cp")
    parameters = parameters_of(name)
    if layers == "scan":
        parameters = LIBRARIES[name].stack(parameters)
    parameters = jax.device_put(parameters, NamedSharding(mesh, P()))
    attention = partial(cp.attention, causal=True)
    if way == "shard_map":
        attention = partial(ring_attention, axis_name="cp", layout="zigzag", causal=True)
    gradient = jax.value_and_grad(partial(loss_of, LIBRARIES[name], attention, layers))
    if way == "shard_map":

        def local(parameters: Any, batch: Any) -> Any:
            def mean(parameters: Any) -> Any:
                part = loss_of(LIBRARIES[name], attention, layers, parameters, batch)
                return lax.pmean(part, ("dp", "cp"))

            return jax.value_and_grad(mean)(parameters)

        gradient = jax.shard_map(local, mesh=mesh, in_specs=(P(), split), out_specs=P())
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


@pytest.mark.nightly(unless=["nnx-scan"])  # test_meshes.py has explicit axes
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
