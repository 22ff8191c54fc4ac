"""Meshes with other axes: exact, and nothing is sent along them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax_meshes import mesh_of

import ring_jax
from ring_core import UnsupportedError, reference
from ring_jax import ContextParallel, ring_attention

Q, KV = (2, 8, 4, 4), (2, 8, 2, 4)
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
#: Sizes of the axes, and the call's axis names of batch and heads.
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp": ({"cp": 2}, {}),
    "dp-cp": ({"dp": 2, "cp": 2}, {"batch_axis": "dp"}),
    "dp-cp-tp": ({"dp": 2, "cp": 2, "tp": 2}, {"batch_axis": "dp", "head_axis": "tp"}),
    "pod-cp": ({"pod": 2, "cp": 2}, {"batch_axis": ("pod",)}),
}
AXES = {"dp-cp": ("dp", None), "dp-cp-tp": ("dp", "tp"), "pod-cp": ("pod", None)}


def _inputs() -> list[np.ndarray[Any, Any]]:
    """Return q, k, v and the gradient of the result."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in (Q, KV, KV, Q)]


def _groups(text: str) -> Iterator[list[list[int]]]:
    """Yield the device groups of each collective of a compiled program."""
    listed = r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}"
    counted = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    for line in text.splitlines():
        for match in re.finditer(listed, line):
            yield [
                [*map(int, devices.split(","))] for devices in re.findall(r"\{([\d,]+)\}", match[1])
            ]
        for match in re.finditer(counted, line):
            shape, source, turn = (
                [int(x) for x in part.split(",")] if part else None for part in match.groups()
            )
            ids = np.arange(np.prod(source or [])).reshape(source or [])
            yield ids.transpose(turn).reshape(shape or []).tolist()


def _travelled(text: str, mesh: Mesh) -> set[str]:
    """Return the mesh axes along which a compiled program sends anything."""
    places = list(np.ndindex(tuple(mesh.shape.values())))
    names = list(mesh.shape)
    return {
        names[dim]
        for groups in _groups(text) for group in groups for dim in range(len(names))
        if len({places[device][dim] for device in group}) > 1
    }  # fmt: skip


def test_axes_that_a_program_sends_along() -> None:
    """Sends are found in compiled programs in both forms that list device groups."""
    mesh = mesh_of(dp=2, cp=2)
    assert _travelled("x, replica_groups={{0,1},{2,3}}, y", mesh) == {"cp"}
    assert _travelled("x, replica_groups={{0,1,2,3}}", mesh) == {"dp", "cp"}
    assert _travelled("x, replica_groups=[2,2]<=[4], y", mesh) == {"cp"}
    assert _travelled("x, replica_groups=[2,2]<=[2,2]T(1,0)", mesh) == {"dp"}
    assert _travelled("x, source_target_pairs={{0,2},{2,0}}", mesh) == {"dp"}


def _check(call: Any, arrays: list[Any]) -> str:
    """Compare a program, forward and gradients, with dense attention; return its compiled text."""

    def both(q: Any, k: Any, v: Any, weight: Any) -> Any:
        out, pull = jax.vjp(call, q, k, v)
        sharding = jax.typeof(out).sharding
        if AxisType.Explicit in sharding.mesh.axis_types:
            weight = jax.reshard(weight, sharding)
        return out, *pull(weight)

    program = jax.jit(both).lower(*arrays).compile()
    expected = reference.attention_grads(*[_inputs()[n] for n in (3, 0, 1, 2)], causal=True)
    expected_value = (reference.attention(*_inputs()[:3], causal=True)[0], *expected[:3])
    for actual, exact in zip(program(*arrays), expected_value, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=2e-5, atol=2e-5)
    return str(program.as_text())


def _of_the_class(mesh: Mesh, told: dict[str, Any]) -> Any:
    cp = ContextParallel(mesh, "cp", **told)

    def call(q: Any, k: Any, v: Any) -> Any:
        return cp.unshard(cp.attention(*(cp.shard(x) for x in (q, k, v)), causal=True))

    return call


def _of_the_function(mesh: Mesh, spec: P) -> Any:
    """Return ``ring_attention`` under ``shard_map``, on tokens in a contiguous layout."""

    def local(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, axis_name="cp", layout="contiguous", causal=True)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    explicit = AxisType.Explicit in mesh.axis_types

    def call(*args: Any) -> Any:
        along = NamedSharding(mesh, spec)
        return mapped(*(jax.reshard(x, along) if explicit else x for x in args))

    return call


@pytest.mark.nightly(unless=[
    "auto-cp-class-set_mesh-split", "auto-dp-cp-tp-function-no set_mesh-split",
    "auto-pod-cp-class-set_mesh-whole", "explicit-pod-cp-class-set_mesh-split",
])  # fmt: skip
@pytest.mark.parametrize("placement", ["split", "whole"])
@pytest.mark.parametrize("within", [True, False], ids=["set_mesh", "no set_mesh"])
@pytest.mark.parametrize("of", ["class", "function"])
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("axis_type", TYPES.values(), ids=TYPES)
def test_every_mesh(
    axis_type: AxisType, name: str, of: str, *, within: bool, placement: str
) -> None:
    sizes, told = MESHES[name]
    mesh, (batch, heads) = mesh_of(axis_type, **sizes), AXES.get(name, (None, None))
    call = (
        _of_the_class(mesh, told) if of == "class"
        else _of_the_function(mesh, P(batch, "cp", heads))
    )  # fmt: skip
    arrays: list[Any] = _inputs()
    if placement != "whole":
        along = NamedSharding(mesh, P(batch, "cp", heads))
        arrays = [jax.device_put(x, along) for x in arrays]
    with jax.set_mesh(mesh) if within else nullcontext():
        text = _check(call, arrays)
    travelled = _travelled(text, mesh)
    assert "cp" in travelled
    assert placement == "whole" or travelled == {"cp"}


@pytest.mark.nightly(only=["explicit"])
@pytest.mark.parametrize("axis_type", TYPES.values(), ids=TYPES)
def test_an_axis_that_is_not_named(axis_type: AxisType) -> None:
    """Arrays are not copied along an unnamed axis: auto axes sum flags and scalars at most."""
    mesh = mesh_of(axis_type, pod=2, cp=2)
    arrays = [jax.device_put(x, NamedSharding(mesh, P("pod"))) for x in _inputs()]
    text = _check(_of_the_class(mesh, {}), arrays)
    if axis_type == AxisType.Explicit:
        assert _travelled(text, mesh) == {"cp"}
    summed = [line for line in text.splitlines() if " all-reduce(" in line]
    rest = [line for line in text.splitlines() if " all-reduce(" not in line]
    assert _travelled("\n".join(rest), mesh) == {"cp"}
    large = [
        line for line in summed
        if _travelled(line, mesh) != {"cp"} and re.search(r"\[(?!1(,1)*\])\d[\d,]*\]", line.split(" all-")[0])
    ]  # fmt: skip
    assert not large


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_heads_of_a_bias_stay_split_along_an_axis_that_is_not_named(name: str) -> None:
    mesh = mesh_of(cp=2, tp=2)
    cp, x = ContextParallel(mesh, "cp", layout="contiguous"), _inputs()
    bias = np.random.default_rng(1).standard_normal((1, 4, 8, 8)).astype(np.float32)
    extra = {name: bias if name == "bias" else (bias > 0) | np.eye(8, dtype=bool)}
    q, k, v = (jax.device_put(a, NamedSharding(mesh, P(None, "cp", "tp"))) for a in x[:3])
    split = jax.device_put(extra[name], NamedSharding(mesh, P(None, "tp", "cp")))

    def call(q: Any, k: Any, v: Any, split: Any) -> Any:
        return cp.attention(q, k, v, **{name: split})

    program = jax.jit(call).lower(q, k, v, split).compile()
    bias = bias if name == "bias" else np.where(extra[name], 0, -np.inf)
    expected = reference.attention(*x[:3], bias=bias)[0]
    np.testing.assert_allclose(program(q, k, v, split), expected, rtol=2e-5, atol=2e-5)
    text = "\n".join(x for x in str(program.as_text()).splitlines() if " all-reduce(" not in x)
    assert _travelled(text, mesh) == {"cp"}


@pytest.mark.nightly(unless=["auto"])  # there the compiler decides what is sent
@pytest.mark.parametrize("axis_type", TYPES.values(), ids=TYPES)
def test_several_axes_of_the_batch(axis_type: AxisType) -> None:
    """A batch over two axes is right, with split heads too; dropout counts rows over all axes."""
    mesh = mesh_of(axis_type, data=2, fsdp=2, cp=2)
    cp = ContextParallel(mesh, "cp", batch_axis=("data", "fsdp"))
    q, k, v, _ = (np.concatenate([x, x[::-1]]) for x in _inputs())
    along = NamedSharding(mesh, P(("data", "fsdp")))
    arrays = [jax.device_put(x, along) for x in (q, k, v)]
    dropout: dict[str, Any] = {"dropout_p": 0.25, "dropout_seed": 7}

    def call(*args: Any) -> Any:
        return cp.unshard(cp.attention(*(cp.shard(x) for x in args), causal=True, **dropout))

    program = jax.jit(call).lower(*arrays).compile()
    expected = reference.attention(q, k, v, causal=True, **dropout)[0]
    np.testing.assert_allclose(program(*arrays), expected, rtol=2e-5, atol=2e-5)
    assert _travelled(str(program.as_text()), mesh) == {"cp"}


@pytest.mark.parametrize("spec", [P("dp"), P(None, None, "dp"), P("dp", "cp"), P()], ids=str)
@pytest.mark.parametrize("axis_type", TYPES.values(), ids=TYPES)
def test_arrays_stay_split(axis_type: AxisType, spec: P) -> None:
    mesh = mesh_of(axis_type, dp=2, cp=2)
    cp, x = ContextParallel(mesh, "cp"), _inputs()[0]
    split_array = jax.device_put(x, NamedSharding(mesh, spec))
    for wrap in (jax.jit, lambda function: function):
        shard = wrap(cp.shard)(split_array)
        expected = NamedSharding(mesh, P(spec[0] if spec else None, "cp", *spec[2:]))
        assert shard.sharding.is_equivalent_to(expected, 4)
        np.testing.assert_array_equal(shard, x[:, np.asarray(cp.positions(8))])
        back = wrap(cp.unshard)(shard)
        whole = NamedSharding(mesh, P(expected.spec[0], None, *spec[2:]))
        assert back.sharding.is_equivalent_to(whole, 4)
        np.testing.assert_array_equal(back, x)
        (slope,) = jax.vjp(wrap(cp.shard), split_array)[1](shard)
        np.testing.assert_array_equal(slope, x)


def test_axes_of_two_types_are_refused() -> None:
    types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), axis_types=types, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"must be all explicit or all auto, got .*make_mesh"):
        ContextParallel(mesh, "cp")


@pytest.mark.parametrize("axes", [(), ("dp", "dp"), ("dp", "no"), ("dp", "cp")], ids=str)
def test_axes_of_the_batch_that_are_none(axes: Any) -> None:
    with pytest.raises(ValueError, match=r"batch_axis"):
        ContextParallel(mesh_of(dp=2, cp=2), "cp", batch_axis=axes)


@pytest.mark.parametrize("of", ["auto", "explicit"])
def test_another_mesh_that_is_set_is_refused(of: str) -> None:
    """Another mesh set by ``jax.set_mesh`` is refused if either has explicit axes.

    JAX's own errors were about its primitives.
    """
    cp = ContextParallel(mesh_of(TYPES[of], cp=2), "cp")
    other = mesh_of(AxisType.Explicit, x=2)
    x: Any = _inputs()[0]
    text = re.escape(f"has the axes cp=2 ({TYPES[of].name}), and jax.set_mesh has set one with x=2")
    with jax.set_mesh(other):
        with pytest.raises(UnsupportedError, match=text):
            cp.shard(x)
        with pytest.raises(UnsupportedError, match=text):
            cp.attention(x, x, x)
        with pytest.raises(UnsupportedError, match=text):
            ContextParallel(other, "x").relayout(x, to=cp)


def test_eager_gradients_on_explicit_axes_need_the_mesh() -> None:
    mesh = mesh_of(AxisType.Explicit, cp=2)
    cp, natural = ContextParallel(mesh, "cp"), jnp.asarray(_inputs()[0])
    x = cp.shard(natural)
    grad = jax.grad(lambda x: cp.attention(x, x, x).sum())
    with pytest.raises(UnsupportedError, match=re.escape("with jax.set_mesh(mesh):")):
        grad(x)
    expected = jax.jit(grad)(x)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(grad(x), expected, atol=1e-6)


#: Axes of a mesh, and those of the sequence in another order.
ORDERS = {
    "two": ({"a": 2, "b": 2}, ("b", "a")),
    "two of three": ({"a": 2, "b": 2, "c": 2}, ("c", "a")),
    "three": ({"a": 2, "b": 2, "c": 2}, ("b", "c", "a")),
}


@pytest.mark.parametrize("strategy", ["ring", "balanced", "gather"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.nightly(unless=["two-ring", "two-balanced", "two of three-gather"])
def test_axes_in_another_order_than_the_meshs(order: str, strategy: str) -> None:
    """Ranks count by the axes as they are named; JAX sends in the order of the mesh alone."""
    sizes, names = ORDERS[order]
    mesh, length = mesh_of(AxisType.Auto, **sizes), 24
    x, _, _, dout = (np.repeat(y[:1, :1, :2], length, 1) for y in _inputs())
    x = x + np.sin(np.arange(x.size)).reshape(x.shape).astype(np.float32)

    def loss(q: Any, axes: Any) -> Any:
        call: Any = partial(ring_attention, axis_name=axes, causal=True)
        if axes is not None:
            spec, call = P(None, axes), partial(call, strategy=strategy)
            call = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        return (call(q, q, q) * dout).sum()

    sharded = jax.device_put(x, NamedSharding(mesh, P(None, names)))
    with ring_jax.check(1):
        out, grad = jax.jit(partial(jax.value_and_grad(loss), axes=names))(sharded)
    right, right_grad = jax.value_and_grad(loss)(x, None)
    np.testing.assert_allclose(out, right, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(grad), right_grad, atol=1e-4)


SHAPE = (1, 16, 2, 4)


def _ring_mesh(kind: str, devices: slice = slice(4)) -> Mesh:
    return Mesh(jax.devices()[devices], ("cp",), axis_types=(TYPES[kind],))


@pytest.mark.parametrize("kind", TYPES)
def test_shapes_are_explained_like_arrays(kind: str) -> None:
    mesh = _ring_mesh(kind)
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
    elsewhere = NamedSharding(_ring_mesh(kind, slice(4, 8)), P(None, "cp"))
    struct = jax.ShapeDtypeStruct(SHAPE, x.dtype, sharding=elsewhere)
    with pytest.raises(UnsupportedError, match="q lies on the devices"):
        cp.explain(struct, x, x)
    with pytest.raises(ValueError, match=r"q must be a jax.Array, got ShapeDtypeStruct"):
        cp.attention(cast("Any", jax.ShapeDtypeStruct(SHAPE, x.dtype)), x, x)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("devices", [slice(3, None, -1), slice(4, 8)], ids=["reversed", "others"])
def test_other_devices_are_refused(devices: slice, kind: str) -> None:
    cp, other = ContextParallel(_ring_mesh(kind), "cp"), _ring_mesh(kind, devices)
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
    cp = ContextParallel(_ring_mesh("auto"), "cp")

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
