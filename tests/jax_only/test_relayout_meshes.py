"""Relayouts to another axis, to another mesh, and to other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from ring_core import LayoutSpec, UnsupportedError
from ring_jax import ContextParallel

T = 48


def mesh(
    devices: list[int], shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType
) -> Mesh:
    grid = np.array(jax.devices())[devices].reshape(shape)
    return Mesh(grid, names, axis_types=(kind,) * len(shape))


FOUR = ([0, 1, 2, 3], (4,), ("cp",), "cp")
#: Devices, their shape, the axes, and the axis of the sequence: from which and to which.
MESHES: dict[str, tuple[Any, Any]] = {
    "to some": (FOUR, ([1, 3], (2,), ("cp",), "cp")),
    "from some": (([0, 2], (2,), ("cp",), "cp"), FOUR),
    "to others": (([0, 1], (2,), ("cp",), "cp"), ([4, 5, 6, 7], (4,), ("cp",), "cp")),
    "another order": (FOUR, ([2, 0, 3, 1], (4,), ("cp",), "cp")),
    "another shape": (FOUR, ([0, 1, 2, 3], (2, 2), ("dp", "cp"), "cp")),
    "another name": (FOUR, ([0, 1, 2, 3], (4,), ("sp",), "sp")),
    "another axis": (
        ([*range(8)], (2, 4), ("a", "b"), "b"), ([*range(8)], (2, 4), ("a", "b"), "a"),
    ),
}  # fmt: skip
#: One list of devices, in one order: a single program can do these.
IN_JIT = ("another shape", "another name", "another axis")
LAYOUTS: dict[str, tuple[LayoutSpec, LayoutSpec]] = {
    "zigzag-contiguous": ("zigzag", "contiguous"), "striped-zigzag": ("striped", "zigzag"),
}  # fmt: skip


def contexts(name: str, layouts: str, kind: AxisType) -> tuple[ContextParallel, ContextParallel]:
    source, target = MESHES[name]
    layout, to = LAYOUTS[layouts]
    return (
        ContextParallel(mesh(source[0], source[1], source[2], kind), source[3], layout=layout),
        ContextParallel(mesh(target[0], target[1], target[2], kind), target[3], layout=to),
    )


def in_order(cp: ContextParallel, whole: jax.Array, dim: int) -> Any:
    layout = cp.layout_of(T)
    order = np.concatenate([layout.positions(rank) for rank in range(layout.cp_size)])
    return np.take(np.asarray(whole), order, axis=dim)


# Per change the padded test below runs the other meshes, which sends the same rows.
@pytest.mark.nightly(unless=["explicit-striped-zigzag-another order"])
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_other_devices_get_the_tokens_of_their_layout(
    kind: AxisType, layouts: str, name: str
) -> None:
    source, target = contexts(name, layouts, kind)
    for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
        whole = jnp.arange(np.prod(shape)).reshape(shape).astype(jnp.float32)
        x = source.shard(whole, dim=dim)

        def move(x: jax.Array, dim: int = dim) -> jax.Array:
            return source.relayout(x, to=target, dim=dim)

        def back(y: jax.Array, dim: int = dim) -> jax.Array:
            return target.relayout(y, to=source, dim=dim)

        out = move(x)
        np.testing.assert_array_equal(out, in_order(target, whole, dim))
        held = [shard.device.id for shard in out.addressable_shards]
        assert sorted(held) == sorted(target.mesh.device_ids.flatten().tolist())
        rows = T // target.cp_size
        assert {shard.data.shape[dim] for shard in out.addressable_shards} == {rows}
        np.testing.assert_array_equal(back(out), x)
        # Gradients go the same way back.
        cotangent = target.shard(whole * 2, dim=dim)
        (grad,) = jax.vjp(move, x)[1](cotangent)
        np.testing.assert_array_equal(grad, in_order(source, whole * 2, dim))
        if name in IN_JIT and dim == 1:
            np.testing.assert_array_equal(jax.jit(move)(x), out)
            returned = jax.jit(lambda x, y, move=move: jax.vjp(move, x)[1](y)[0])
            np.testing.assert_array_equal(returned(x, cotangent), grad)


@pytest.mark.nightly(
    unless=["45-zigzag-contiguous-to some", "3-striped-zigzag-from some",
            "45-striped-zigzag-another axis"]
)  # fmt: skip
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("length", [45, 3])
def test_padded_sequences_go_to_other_devices(length: int, layouts: str, name: str) -> None:
    """Layouts get the padding that they need, also with fewer tokens than devices."""
    source, target = contexts(name, layouts, AxisType.Auto)
    dim, shape = (1, (2, length, 3)) if length == 45 else (-1, (2, 3, length))
    whole = jnp.arange(1.0, np.prod(shape) + 1).reshape(shape)
    x = source.shard(whole, dim=dim, pad=True, fill=-1)  # numbers in the padding do not move

    def move(x: jax.Array) -> jax.Array:
        return source.relayout(x, to=target, dim=dim, seq_len=length)

    expected, back = (cp.shard(whole, dim=dim, pad=True) for cp in (target, source))
    out, pull = jax.vjp(move, x)
    np.testing.assert_array_equal(out, expected)
    held = [shard.device.id for shard in out.addressable_shards]
    assert sorted(held) == sorted(target.mesh.device_ids.flatten().tolist())
    np.testing.assert_array_equal(pull(target.shard(whole, dim=dim, pad=True, fill=7))[0], back)
    if name in IN_JIT:
        np.testing.assert_array_equal(jax.jit(move)(x), expected)


@pytest.mark.parametrize("name", [name for name in MESHES if name not in IN_JIT])
def test_one_program_is_of_one_list_of_devices(name: str) -> None:
    source, target = contexts(name, "zigzag-contiguous", AxisType.Auto)
    x = source.shard(jnp.ones((2, T, 3)))
    transforms: list[Callable[..., Any]] = [jax.jit, jax.vmap]
    for transform in transforms:
        with pytest.raises(UnsupportedError, match="between two jitted functions"):
            transform(lambda x: source.relayout(x, to=target, dim=-2))(x)


def test_pieces_are_not_gathered() -> None:
    source, target = contexts("another name", "striped-zigzag", AxisType.Auto)
    x = source.shard(jnp.ones((2, T, 3)))
    text = jax.jit(lambda x: source.relayout(x, to=target)).lower(x).compile().as_text() or ""
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert "all-reduce" not in text


def test_a_length_that_the_other_layout_cannot_divide_is_refused() -> None:
    source, target = contexts("from some", "zigzag-contiguous", AxisType.Auto)
    with pytest.raises(ValueError, match="is not a positive multiple of 8"):
        source.relayout(jnp.ones((1, 12)), to=ContextParallel(target.mesh, "cp"))
