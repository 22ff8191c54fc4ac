"""Meshes with manual and other axes, and calls inside of ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ring_core import UnsupportedError, reference
from ring_jax import ContextParallel, check, nn, ring_attention
from ring_jax.positions import searchsorted

MESH = jax.make_mesh(
    (2, 2), ("cp", "tp"), (AxisType.Auto, AxisType.Auto), devices=jax.devices()[:4]
)
CP = ContextParallel(MESH, "cp")  # tp is left to the compiler
Q, K, V, DOUT = (jax.random.normal(jax.random.key(n), (1, 16, 2, 4)) for n in range(4))
OPTIONS: dict[str, dict[str, Any]] = {
    "documents": {"cu_seqlens": (0, 5, 9, 16)},
    "documents of numpy": {"cu_seqlens": tuple(np.array([0, 5, 9, 16], np.int32))},
    "chunks": {"chunk_size": 3}, "chunks of numpy": {"chunk_size": np.int64(3)},
    "both": {"cu_seqlens": np.array([0, 9, 16]), "chunk_size": 3, "window": (np.int32(4), 0)},
    "gathered": {"cu_seqlens": (0, 5, 9, 16), "strategy": "gather"},
}  # fmt: skip


def global_arrays(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return CP.unshard(CP.attention(*map(CP.shard, (q, k, v)), causal=True, **options))


def shards(q: Any, k: Any, v: Any, **options: Any) -> Any:
    spec = PartitionSpec(None, "cp")
    call = partial(ring_attention, axis_name="cp", causal=True, **options)
    return jax.shard_map(call, mesh=MESH, in_specs=spec, out_specs=spec, axis_names={"cp"})(q, k, v)


#: Options, the call, and True if the check runs.
RUNS = [
    *((name, call, False) for name in OPTIONS for call in (global_arrays, shards)),
    ("both", global_arrays, True), ("documents of numpy", shards, True),
]  # fmt: skip


@pytest.mark.nightly(unless=[
    "chunks of numpy-global_arrays-False", "gathered-global_arrays-False",
    "documents of numpy-shards-True",
])  # fmt: skip
@pytest.mark.parametrize(("name", "call", "checked"), RUNS)
def test_documents_and_chunks(name: str, call: Callable[..., Any], *, checked: bool) -> None:
    options = OPTIONS[name]

    def product(q: Any, k: Any, v: Any) -> Any:
        return (call(q, k, v, **options) * DOUT).sum()

    with check() if checked else nullcontext():
        actual = jax.jit(jax.grad(product, (0, 1, 2)))(Q, K, V)
        jax.block_until_ready(actual)
    rule = {name: x for name, x in options.items() if name != "strategy"}
    expected_value = reference.attention_grads(
        *map(np.asarray, (DOUT, Q, K, V)), causal=True, **rule
    )
    for grad, expected in zip(actual, expected_value[:3], strict=True):
        np.testing.assert_allclose(grad, expected, atol=5e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_search(size: int, side: Any) -> None:
    table = np.sort(np.random.default_rng(size).integers(0, 6, size)).astype(np.int32)
    x = np.arange(-1, 8, dtype=np.int32).reshape(3, 3)
    actual = searchsorted(jnp.asarray(table), jnp.asarray(x), side)
    np.testing.assert_array_equal(actual, np.searchsorted(table, x, side))


def test_a_window_of_numpy() -> None:
    """The adapter for ``jax.nn`` takes a window that is a numpy integer."""
    attend = nn.make_dot_product_attention(CP.attention)
    expected = attend(Q, K, V, local_window_size=3)
    np.testing.assert_array_equal(attend(Q, K, V, local_window_size=np.int64(3)), expected)


def attention(q: Any) -> Any:
    return CP.attention(q, q, q)


CALLS: dict[str, Callable[..., Any]] = {
    "attention": attention, "shard": CP.shard, "unshard": CP.unshard,
    "explain": lambda q: (CP.explain(q, q, q), q)[1],
    "positions": lambda q: q + CP.positions(16)[:, None, None],
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_inside_shard_map(axis: str, call: Callable[..., Any]) -> None:
    spec = PartitionSpec(None, None, axis)
    outer = jax.shard_map(call, mesh=MESH, in_specs=spec, out_specs=spec, axis_names={axis})
    message = (
        rf"inside a jax\.shard_map over {axis}\. Instead: .*ring_attention\(axis_name='cp'\) here"
    )
    with pytest.raises(UnsupportedError, match=message):
        jax.jit(outer)(Q)


def test_inside_vmap() -> None:
    batch = jnp.stack([Q, K])
    np.testing.assert_allclose(jax.vmap(attention)(batch)[0], attention(Q), atol=1e-6)


def test_arrays_on_another_list_of_devices() -> None:
    """Arrays on the same devices in another order are refused, with advice to ``relayout``."""
    turned = ContextParallel(Mesh(MESH.devices[::-1], MESH.axis_names), "cp").shard(Q)
    for call in (attention, CP.shard):
        with pytest.raises(UnsupportedError, match=r"devices \[2, 3, 0, 1\].*relayout\(x, to="):
            call(turned)


def test_vmap_over_a_mask() -> None:
    """Under ``vmap``, branches over blocks become selects, whose operands vary over all axes."""
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axes, devices=jax.devices()[:4])
    cp, q = ContextParallel(mesh, "cp", "data", layout="contiguous"), jnp.concatenate([Q, K])
    masks = np.random.default_rng(0).random((2, 16, 16)) < 0.6
    with jax.set_mesh(mesh):
        actual = jax.vmap(lambda mask: cp.attention(q, q, q, mask=mask))(masks)
    for out, mask in zip(actual, masks, strict=True):
        bias = np.where(mask, 0.0, -np.inf)[None, None]
        np.testing.assert_allclose(out, reference.attention(q, q, q, bias=bias)[0], atol=1e-6)


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_inside_vmap_along_an_axis_of_each_kind(kind: AxisType, strategy: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("tp", "cp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    cp = ContextParallel(mesh, "cp")
    call = jax.vmap(lambda q: cp.attention(q, q, q, strategy=strategy), spmd_axis_name="tp")
    rows = NamedSharding(mesh, PartitionSpec("tp", None, "cp"))
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match=r"vmap\(spmd_axis_name="):
        jax.eval_shape(call, jax.device_put(jnp.stack([Q, K]), rows))
