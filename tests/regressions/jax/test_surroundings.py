"""Calls with shapes in place of arrays, with other meshes, and in exported programs."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from ring_core import UnsupportedError
from ring_jax import ContextParallel, ring_attention

TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SHAPE = (1, 16, 2, 4)


def _mesh(kind: str, devices: slice = slice(4)) -> Mesh:
    return Mesh(jax.devices()[devices], ("cp",), axis_types=(TYPES[kind],))


@pytest.mark.parametrize("kind", TYPES)
def test_shapes_are_explained_like_arrays(kind: str) -> None:
    """``explain`` takes shapes, with a sharding or without, and array options as shapes."""
    mesh = _mesh(kind)
    cp, split = ContextParallel(mesh, "cp"), NamedSharding(mesh, P(None, "cp"))
    x, ids = jnp.zeros(SHAPE), jnp.zeros(SHAPE[:2], jnp.int32)
    mask, seed = jnp.ones(SHAPE[1:2] * 2, bool), jnp.uint32(0)
    options: dict[str, Any] = {"dropout_p": 0.5}
    expected = cp.explain(x, x, x, segment_ids=ids, mask=mask, dropout_seed=seed, **options)
    for sharding in (None, split):
        struct: Any = jax.ShapeDtypeStruct(SHAPE, x.dtype, sharding=sharding)
        arrays = {"segment_ids": ids, "mask": mask, "dropout_seed": seed}
        structs: dict[str, Any] = {
            n: jax.ShapeDtypeStruct(y.shape, y.dtype) for n, y in arrays.items()
        }
        assert cp.explain(struct, struct, struct, **structs, **options) == expected
    elsewhere = NamedSharding(_mesh(kind, slice(4, 8)), P(None, "cp"))
    struct = jax.ShapeDtypeStruct(SHAPE, x.dtype, sharding=elsewhere)
    with pytest.raises(UnsupportedError, match="q lies on the devices"):
        cp.explain(struct, x, x)
    with pytest.raises(ValueError, match=r"q must be a jax.Array, got ShapeDtypeStruct"):
        cp.attention(cast("Any", jax.ShapeDtypeStruct(SHAPE, x.dtype)), x, x)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("devices", [slice(3, None, -1), slice(4, 8)], ids=["reversed", "others"])
def test_other_devices_are_refused(devices: slice, kind: str) -> None:
    """Arrays on a mesh with equal axes and other devices are refused, also while traced."""
    cp, other = ContextParallel(_mesh(kind), "cp"), _mesh(kind, devices)
    x = jnp.zeros(SHAPE)
    elsewhere = jax.device_put(x, NamedSharding(other, P(None, "cp")))
    for call in (cp.shard, lambda x: cp.attention(x, x, x)):
        with pytest.raises(UnsupportedError, match="lies on the devices"):
            call(elsewhere)
        with pytest.raises(UnsupportedError, match="lies on the devices"):
            call(jax.device_put(x, jax.devices()[5]))
        for run in (call, partial(jax.eval_shape, call)):
            message = r"jax\.set_mesh has set one with \["
            with jax.set_mesh(other), pytest.raises(UnsupportedError, match=message):
                run(x)
    on_one = partial(jax.device_put, device=jax.devices()[5])
    with pytest.raises(UnsupportedError, match="sinks lies on the devices"):
        cp.attention(x, x, x, sinks=on_one(jnp.zeros(2)))
    for static in ({"cu_seqlens": on_one(jnp.array([0, 16]))}, {"softmax_scale": on_one(1.0)}):
        with pytest.raises(ValueError, match="must be known when the call is traced"):
            cp.explain(x, x, x, **static)
    cp.explain(x, x, x, dropout_p=0.5, dropout_seed=on_one(jnp.int32(1)))  # a number by then
    with jax.sharding.use_abstract_mesh(other.abstract_mesh):  # sets no devices
        assert cp.shard(x).sharding.device_set == set(jax.devices()[:4])


def test_exports_with_a_symbolic_batch() -> None:
    """A symbolic batch exports on one device; over a mesh it is refused, as XLA would abort.

    Symbolic lengths are refused, too: a plan is made for a number of tokens.
    """
    (batch,) = export.symbolic_shape("b")
    cp = ContextParallel(_mesh("auto"), "cp")

    def call(x: Any) -> Any:
        return ring_attention(x, x, x, axis_name=None, causal=True)

    def exported(call: Any, *shape: Any) -> Any:
        return export.export(jax.jit(call))(jax.ShapeDtypeStruct(shape, jnp.float32))

    x = jax.random.normal(jax.random.key(0), SHAPE)
    program = exported(call, batch, *SHAPE[1:])
    np.testing.assert_allclose(program.call(x), call(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="symbolic dimension b, and over a mesh XLA"):
        exported(lambda x: cp.attention(x, x, x), batch, *SHAPE[1:])
    with pytest.raises(UnsupportedError, match="symbolic dimension b, and over a mesh XLA"):
        exported(lambda x: cp.shift(x, 1), batch, *SHAPE[1:])
    with pytest.raises(UnsupportedError, match="planned for numbers of tokens"):
        exported(call, 1, batch, *SHAPE[2:])
