"""Meshes with other axes: exact, and nothing is sent along them; where calls may stand in JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax_meshes import KINDS, TOKENS, check_passes, close, context, mesh_of, random
from refused import refused

import ring_jax
from ring_core import StrategyConfig, UnsupportedError, reference
from ring_jax import ContextParallel, ring_attention

Q, KV = (4, 8, 4, 4), (4, 8, 2, 4)
#: Sizes of the axes, and the call's axis names of batch and heads.
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp": ({"cp": 2}, {}),
    "dp-cp": ({"dp": 2, "cp": 2}, {"batch_axis": "dp"}),
    "dp-cp-tp": ({"dp": 2, "cp": 2, "tp": 2}, {"batch_axis": "dp", "head_axis": "tp"}),
    "pod-fsdp-cp": ({"pod": 2, "fsdp": 2, "cp": 2}, {"batch_axis": ("pod", "fsdp")}),
}


def _inputs() -> list[np.ndarray[Any, Any]]:
    """Return q, k, v and the gradient of the result."""
    return [np.asarray(random(*shape, seed=n)) for n, shape in enumerate((Q, KV, KV, Q))]


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


def _of_the_class(cp: ContextParallel, q: Any, k: Any, v: Any, **options: Any) -> Any:
    return cp.unshard(cp.attention(*map(cp.shard, (q, k, v)), causal=True, **options))


def _of_the_function(along: NamedSharding, *arrays: Any, **options: Any) -> Any:
    """Call ``ring_attention`` under ``shard_map``, on tokens in a contiguous layout."""
    local = partial(ring_attention, axis_name="cp", layout="contiguous", causal=True, **options)
    named = {*jax.tree.leaves(tuple(along.spec))}
    call: Any = jax.shard_map(
        local, mesh=along.mesh, in_specs=along.spec, out_specs=along.spec, axis_names=named
    )
    explicit = AxisType.Explicit in along.mesh.axis_types
    return call(*(jax.reshard(x, along) if explicit else x for x in arrays))


@pytest.mark.nightly(unless=[
    "auto-dp-cp-tp-function-no set_mesh-split", "auto-pod-fsdp-cp-class-set_mesh-whole",
    "explicit-pod-fsdp-cp-class-set_mesh-split",
])  # fmt: skip
@pytest.mark.parametrize("placement", ["split", "whole"])
@pytest.mark.parametrize("within", [True, False], ids=["set_mesh", "no set_mesh"])
@pytest.mark.parametrize("of", ["class", "function"])
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mesh(kind: str, name: str, of: str, *, within: bool, placement: str) -> None:
    sizes, axes = MESHES[name]
    mesh = mesh_of(KINDS[kind], **sizes)
    along = NamedSharding(mesh, P(axes.get("batch_axis"), "cp", axes.get("head_axis")))
    call: Any = partial(_of_the_function, along)
    if of == "class":
        call = partial(_of_the_class, ContextParallel(mesh, "cp", **axes))
    arrays: list[Any] = _inputs()
    if placement != "whole":
        arrays = jax.device_put(arrays, along)
    with jax.set_mesh(mesh) if within else nullcontext():
        program = check_passes(call, arrays[:3], arrays[3], causal=True)[1]
        travelled = _travelled(program.as_text(), mesh)
    assert "cp" in travelled
    assert placement == "whole" or travelled == {"cp"}


@pytest.mark.nightly(only=["explicit"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_that_is_not_named(kind: str) -> None:
    """Arrays are not copied along an unnamed axis: auto axes sum flags and scalars at most."""
    mesh = mesh_of(KINDS[kind], pod=2, cp=2)
    arrays = jax.device_put(_inputs(), NamedSharding(mesh, P("pod")))
    call = partial(_of_the_class, ContextParallel(mesh, "cp"))
    text = check_passes(call, arrays[:3], arrays[3], causal=True)[1].as_text()
    assert kind == "auto" or _travelled(text, mesh) == {"cp"}
    for line in text.splitlines():
        result, is_sum, _ = line.partition(" all-reduce(")
        if not is_sum or re.search(r"\[(?!1(,1)*\])\d[\d,]*\]", result):
            assert _travelled(line, mesh) <= {"cp"}


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_heads_of_a_bias_stay_split_along_an_axis_that_is_not_named(name: str) -> None:
    mesh = mesh_of(cp=2, tp=2)
    cp, x = ContextParallel(mesh, "cp", layout="contiguous"), _inputs()[:3]
    array: Any = np.asarray(random(1, 4, 8, 8, seed=4))
    array = array if name == "bias" else (array > 0) | np.eye(8, dtype=bool)
    arrays = jax.device_put([*x, array], [NamedSharding(mesh, P(None, "cp", "tp"))] * 3
                            + [NamedSharding(mesh, P(None, "tp", "cp"))])  # fmt: skip
    program = jax.jit(lambda *x: cp.attention(*x[:3], **{name: x[3]})).lower(*arrays).compile()
    bias = array if name == "bias" else np.where(array, 0, -np.inf)
    close(program(*arrays), reference.attention(*x, bias=bias)[0])
    text = "\n".join(x for x in str(program.as_text()).splitlines() if " all-reduce(" not in x)
    assert _travelled(text, mesh) == {"cp"}


@pytest.mark.parametrize("spec", [P("dp"), P(None, None, "dp"), P("dp", "cp"), P()], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_stay_split(kind: str, spec: P) -> None:
    mesh = mesh_of(KINDS[kind], dp=2, cp=2)
    cp, x = ContextParallel(mesh, "cp"), _inputs()[0]
    split_array = jax.device_put(x, NamedSharding(mesh, spec))
    batch = spec[0] if spec else None
    for wrap in (jax.jit, lambda function: function):
        shard = wrap(cp.shard)(split_array)
        along = NamedSharding(mesh, P(batch, "cp", *spec[2:]))
        assert shard.sharding.is_equivalent_to(along, 4)
        np.testing.assert_array_equal(shard, x[:, np.asarray(cp.positions(8))])
        back = wrap(cp.unshard)(shard)
        whole = NamedSharding(mesh, P(batch, None, *spec[2:]))
        assert back.sharding.is_equivalent_to(whole, 4)
        np.testing.assert_array_equal(back, x)
        (slope,) = jax.vjp(wrap(cp.shard), split_array)[1](shard)
        np.testing.assert_array_equal(slope, x)


def test_axes_of_two_types_are_refused() -> None:
    grid, types = np.array(jax.devices()[:4]).reshape(2, 2), (AxisType.Explicit, AxisType.Auto)
    mesh = Mesh(grid, ("dp", "cp"), axis_types=types)
    refused(r"must be all explicit or all auto, got .*make_mesh", ContextParallel, mesh, "cp")
    for axes in ((), ("dp", "dp"), ("dp", "no"), ("dp", "cp")):
        refused("batch_axis", ContextParallel, mesh_of(dp=2, cp=2), "cp", batch_axis=axes)


@pytest.mark.parametrize("kind", KINDS)
def test_another_mesh_that_is_set_is_refused(kind: str) -> None:
    """Another mesh set by ``jax.set_mesh`` is refused if either has explicit axes.

    JAX's own errors were about its primitives.
    """
    cp, other, x = context(kind=kind), mesh_of(AxisType.Explicit, x=2), jnp.asarray(_inputs()[0])
    text = f"has the axes cp=2 ({KINDS[kind].name}), and jax.set_mesh has set one with x=2"
    calls: list[Callable[[], Any]] = [
        lambda: cp.shard(x), lambda: cp.attention(x, x, x),
        lambda: ContextParallel(other, "x").relayout(x, to=cp),
    ]  # fmt: skip
    for call in calls:
        with jax.set_mesh(other), pytest.raises(UnsupportedError, match=re.escape(text)):
            call()


def test_eager_gradients_on_explicit_axes_need_the_mesh() -> None:
    cp = context(kind="explicit")
    x = cp.shard(jnp.asarray(_inputs()[0]))
    grad = jax.grad(lambda x: cp.attention(x, x, x).sum())
    refused(re.escape("with jax.set_mesh(mesh):"), grad, x, error=UnsupportedError)
    expected = jax.jit(grad)(x)
    with jax.set_mesh(cp.mesh):
        close(grad(x), expected)


#: Axes of a mesh, and those of the sequence in another order.
ORDERS = {
    "two": ({"a": 2, "b": 2}, ("b", "a")),
    "two of three": ({"a": 2, "b": 2, "c": 2}, ("c", "a")),
    "three": ({"a": 2, "b": 2, "c": 2}, ("b", "c", "a")),
}


STRATEGIES: dict[str, Any] = {
    "ring": "ring", "balanced": "balanced", "gather": "gather", "ulysses": "ulysses",
    "hybrid": StrategyConfig("hybrid", 2, "ring"), "hybrid-gather": StrategyConfig("hybrid", 2, "gather"),
}  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.nightly(unless=["two-ring", "two-balanced", "two of three-gather", "two-hybrid"])
def test_axes_in_another_order_than_the_meshs(order: str, strategy: str) -> None:
    """Ranks count by the axes as they are named; JAX sends in the order of the mesh alone."""
    sizes, names = ORDERS[order]
    mesh = mesh_of(AxisType.Auto, **sizes)
    rows, dout = random(1, 24, 8, 4), random(1, 24, 8, 4, seed=1)
    by_heads = strategy not in ("ring", "balanced", "gather")
    rule: Any = {"causal": True} | ({"cu_seqlens": (0, 9, 24)} if strategy == "ring" else {})
    local = partial(
        ring_attention, axis_name=names, layout="contiguous", strategy=STRATEGIES[strategy], **rule
    )
    spec = P(None, names)
    call: Any = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)

    def mapped(*x: Any) -> Any:
        return jax.vmap(call)(*(jnp.stack([y, 2 * y]) for y in x))[0]

    sharded = jax.device_put(rows, NamedSharding(mesh, spec))
    attend = mapped if by_heads and order == "two" else call
    with ring_jax.check(int(strategy == "ring" or order != "two")):
        check_passes(attend, [sharded] * 3, dout, tolerance=1e-4, **rule)


SHAPE = (1, 16, 2, 4)


def _over(kind: str, devices: slice) -> Mesh:
    return Mesh(jax.devices()[devices], ("cp",), axis_types=(KINDS[kind],))


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_explained_like_arrays(kind: str) -> None:
    cp, x = context(4, kind=kind), jnp.zeros(SHAPE)
    arrays: dict[str, Any] = {
        "segment_ids": jnp.zeros(SHAPE[:2], jnp.int32), "mask": jnp.ones(SHAPE[1:2] * 2, bool),
        "dropout_seed": jnp.uint32(0),
    }  # fmt: skip
    structs: dict[str, Any] = {n: jax.ShapeDtypeStruct(y.shape, y.dtype) for n, y in arrays.items()}
    expected = cp.explain(x, x, x, dropout_p=0.5, **arrays)

    def shape_over(mesh: Mesh) -> Any:
        return jax.ShapeDtypeStruct(SHAPE, x.dtype, sharding=NamedSharding(mesh, TOKENS))

    shape: Any = jax.ShapeDtypeStruct(SHAPE, x.dtype)
    for struct in (shape, shape_over(cp.mesh)):
        assert cp.explain(struct, struct, struct, dropout_p=0.5, **structs) == expected
    elsewhere = shape_over(_over(kind, slice(4, 8)))
    refused("q lies on the devices", cp.explain, elsewhere, x, x, error=UnsupportedError)
    refused(r"q must be a jax.Array, got ShapeDtypeStruct", cp.attention, shape, x, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [slice(3, None, -1), slice(4, 8)], ids=["reversed", "others"])
def test_other_devices_are_refused(devices: slice, kind: str) -> None:
    cp, other = context(4, kind=kind), _over(kind, devices)
    x = jnp.zeros(SHAPE)
    on_one = partial(jax.device_put, device=jax.devices()[5])
    words = "lies on the devices" + r".*relayout\(x, to=" * (devices.step is not None)
    for call in (cp.shard, lambda x: cp.attention(x, x, x)):
        along = jax.device_put(x, NamedSharding(other, TOKENS))
        refused(words, call, along, error=UnsupportedError)
        refused("lies on the devices", call, on_one(x), error=UnsupportedError)
        for run in (call, partial(jax.eval_shape, call)):
            message = r"jax\.set_mesh has set one with \["
            with jax.set_mesh(other), pytest.raises(UnsupportedError, match=message):
                run(x)
    call = partial(cp.attention, sinks=on_one(jnp.zeros(2)))
    refused("sinks lies on the devices", call, x, x, x, error=UnsupportedError)
    for static in ({"cu_seqlens": on_one(jnp.array([0, 16]))}, {"softmax_scale": on_one(1.0)}):
        refused("must be known when the call is traced", cp.explain, x, x, x, **static)
    cp.explain(x, x, x, dropout_p=0.5, dropout_seed=on_one(jnp.int32(1)))  # a number by then
    with jax.sharding.use_abstract_mesh(other.abstract_mesh):  # sets no devices
        assert cp.shard(x).sharding.device_set == set(jax.devices()[:4])


def test_exports_with_a_symbolic_batch() -> None:
    """A symbolic batch exports on one device; over a mesh it is refused, as XLA would abort.

    Symbolic lengths are refused, too: a plan is made for a number of tokens.
    """
    (batch,) = export.symbolic_shape("b")
    cp = context(4)

    def call(x: Any) -> Any:
        return ring_attention(x, x, x, axis_name=None, causal=True)

    def exported(call: Any, *shape: Any) -> Any:
        return export.export(jax.jit(call))(jax.ShapeDtypeStruct(shape, jnp.float32))

    x = random(*SHAPE)
    close(exported(call, batch, *SHAPE[1:]).call(x), call(x))
    for over_mesh in (lambda x: cp.attention(x, x, x), lambda x: cp.shift(x, 1)):
        words = "symbolic dimension b, and over a mesh XLA"
        refused(words, exported, over_mesh, batch, *SHAPE[1:], error=UnsupportedError)
    words = "planned for numbers of tokens"
    refused(words, exported, call, 1, batch, *SHAPE[2:], error=UnsupportedError)


#: A mesh with an axis, ``tp``, that is left to the compiler.
MESH = mesh_of(cp=2, tp=2)
CP = ContextParallel(MESH, "cp")
ROWS = [random(*SHAPE, seed=n) for n in range(4)]
OPTIONS: dict[str, dict[str, Any]] = {
    "documents": {"cu_seqlens": tuple(np.array([0, 5, 9, 16], np.int32))},
    "chunks": {"chunk_size": np.int64(3)},
    "both": {"cu_seqlens": np.array([0, 9, 16]), "chunk_size": 3, "window": (np.int32(4), 0)},
    "gathered": {"cu_seqlens": (0, 5, 9, 16), "strategy": "gather"},
}


CALLS: dict[str, Callable[..., Any]] = {
    "class": partial(_of_the_class, CP),
    "function": partial(_of_the_function, NamedSharding(MESH, TOKENS)),
}  # fmt: skip


@pytest.mark.nightly(unless=["class-chunks", "function-documents"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_documents_and_chunks(call: str, name: str) -> None:
    attend = partial(CALLS[call], **OPTIONS[name])
    rule = {name: option for name, option in OPTIONS[name].items() if name != "strategy"}
    with ring_jax.check(int(name in ("both", "documents"))):
        check_passes(attend, ROWS[:3], ROWS[3], causal=True, **rule)


INSIDE: dict[str, Callable[[Any], Any]] = {
    "attention": lambda q: CP.attention(q, q, q), "shard": CP.shard, "unshard": CP.unshard,
    "explain": lambda q: (CP.explain(q, q, q), q)[1],
    "positions": lambda q: q + CP.positions(16)[:, None, None],
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_inside_shard_map(axis: str, name: str) -> None:
    spec = P(None, None, axis)
    outer = jax.shard_map(INSIDE[name], mesh=MESH, in_specs=spec, out_specs=spec, axis_names={axis})
    words = (
        rf"inside a jax\.shard_map over {axis}\. Instead: .*ring_attention\(axis_name='cp'\) here"
    )
    refused(words, jax.jit(outer), ROWS[0], error=UnsupportedError)


def test_vmap_over_a_mask() -> None:
    """Under ``vmap``, branches over blocks become selects, whose operands vary over all axes."""
    cp = ContextParallel(
        mesh_of(AxisType.Explicit, data=2, cp=2), "cp", "data", layout="contiguous"
    )
    q, masks = jnp.concatenate(ROWS[:2]), np.random.default_rng(0).random((2, 16, 16)) < 0.6
    with jax.set_mesh(cp.mesh):
        actual = jax.vmap(lambda mask: cp.attention(q, q, q, mask=mask))(masks)
    for out, mask in zip(actual, masks, strict=True):
        bias = np.where(mask, 0.0, -np.inf)[None, None]
        close(out, reference.attention(*[np.asarray(q)] * 3, bias=bias)[0])


@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("kind", KINDS)
def test_inside_vmap_along_an_axis_of_each_kind(kind: str, strategy: Any) -> None:
    mesh = mesh_of(KINDS[kind], tp=2, cp=2)
    cp = ContextParallel(mesh, "cp")
    call = jax.vmap(lambda q: cp.attention(q, q, q, strategy=strategy), spmd_axis_name="tp")
    rows = jax.device_put(jnp.stack(ROWS[:2]), NamedSharding(mesh, P("tp", None, "cp")))
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match=r"vmap\(spmd_axis_name="):
        jax.eval_shape(call, rows)
