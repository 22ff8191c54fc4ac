"""Shards, shifts, halos and relayouts agree with the same operations on whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax_meshes import KINDS, TOKENS, check_passes, close, context, in_ring, mesh_of, random
from refused import refused

import ring_jax
from ring_core import ChunkLayout, Layout, LayoutName, LayoutSpec, UnsupportedError
from ring_jax import ContextParallel

T, SIZE = 48, 4
CHUNKS = ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5)))
LAYOUTS: dict[str, LayoutSpec] = {
    "contiguous": "contiguous", "zigzag": "zigzag", "striped": "striped", "chunks": CHUNKS,
}  # fmt: skip
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30)  # and the end of the sequence
equal = np.testing.assert_array_equal


def shifted(x: Any, n: int, fill: float, offsets: tuple[int, ...] = (0,)) -> Any:
    """Compute the definition of a shift: ``out[:, t] = x[:, t - n]`` within documents."""
    x = np.asarray(x)
    source = [
        t - n if start <= t - n < stop else -1
        for start, stop in pairwise((*offsets, x.shape[1]))
        for t in range(start, stop)
    ]
    inside = np.array(source).reshape(1, -1, *[1] * (x.ndim - 2)) >= 0
    return np.where(inside, x[:, np.array(source)], np.asarray(fill, x.dtype))


def order(layout: LayoutSpec) -> np.ndarray[Any, Any]:
    """Return the token positions in layout order."""
    layout_of_ranks = Layout(layout, T, SIZE)
    return np.concatenate([layout_of_ranks.positions(rank) for rank in range(SIZE)])


def local(function: Callable[..., Any], *, out: Any = TOKENS) -> Callable[..., Any]:
    """Turn a function of shards into one of arrays ``[B, T, C]`` in layout order."""
    return jax.jit(in_ring(function, SIZE, out_specs=out))


def movements(layout: LayoutSpec) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Return movements of a shard ``[2, T / P, 3]`` by name."""
    arguments: Any = {"axis_name": "cp", "layout": layout}
    return {
        "shift": lambda x: ring_jax.shift(x, -3, cu_seqlens=(*DOCUMENTS, T), **arguments),
        "far shift": lambda x: ring_jax.shift(x, 17, **arguments),
        "relayout": lambda x: ring_jax.relayout(x, to="contiguous", **arguments),
        "relayout to striped": lambda x: ring_jax.relayout(x, to="striped", **arguments),
        "halo": lambda x: ring_jax.halo(x, 5, 9, **arguments).rows,
        "causal halo": lambda x: ring_jax.halo(x, 3, 0, **arguments).rows,
    }


#: All movements in all layouts that support them.
MATRIX = [
    (layout, name)
    for layout in LAYOUTS
    for name in movements("contiguous")
    if layout != "striped" or "halo" not in name
]


@pytest.mark.nightly(
    unless=["contiguous-far shift", "zigzag-halo", "striped-shift", "chunks-relayout"]
)
@pytest.mark.parametrize(("layout", "name"), MATRIX)
@ring_jax.check()  # right movements pass: no others than rows that change device are sent
def test_derivatives_and_transforms(layout: str, name: str) -> None:
    along = P("cp") if "halo" in name else P(None, "cp")
    move = local(movements(LAYOUTS[layout])[name], out=along)
    x, tangent = random(2, T, 3), random(2, T, 3, seed=1)
    y = random(*jax.eval_shape(move, x).shape, seed=2)

    @jax.jit  # compiled once
    def results(x: Any, tangent: Any, y: Any) -> Any:
        many = jnp.stack([x, tangent])
        scanned = jax.lax.scan(lambda carry, x: (carry, jax.checkpoint(move)(x)), 0, many)[1]
        moved, of_tangent = jax.jvp(move, (x,), (tangent,))
        pull = jax.vjp(move, x)[1]
        # The gradient of a square under remat needs the movement again.
        squared = jax.vjp(jax.checkpoint(lambda x: move(x) ** 2), x)[1](y)
        alike = [jnp.stack([moved, other]) for other in (of_tangent, move(tangent))]
        alike += [jax.vmap(move)(many), scanned]
        return moved, pull(y)[0], alike, (*squared, *pull(2 * moved * y))

    moved, returned, alike, (grad, expected) = results(x, tangent, y)
    assert abs(np.vdot(moved, y)) > 1e-3
    np.testing.assert_allclose(np.vdot(moved, y), np.vdot(x, returned), rtol=1e-4)
    for other in alike[1:]:
        equal(other, alike[0])
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly(
    unless=["contiguous-explicit", "zigzag-auto", "striped-auto", "chunks-explicit"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_shard_and_unshard_have_all_derivatives(name: str, kind: str) -> None:
    """Derivatives of ``shard`` and ``unshard`` equal those of permutations by hand."""
    cp = ContextParallel(mesh_of(KINDS[kind], dp=2, cp=SIZE), "cp", layout=LAYOUTS[name])
    tokens = order(LAYOUTS[name])
    x, t, weight = (np.asarray(random(2, T, 3, seed=n)) for n in range(3))

    def function(x: Any, *, by_hand: bool) -> Any:
        x = x[:, tokens] if by_hand else cp.shard(x)
        x = x**3 * weight
        x = x[:, np.argsort(tokens)] if by_hand else cp.unshard(x)
        return (x * weight).sum()

    def derivatives(f: Any) -> Any:
        return [
            jax.jvp(f, (x,), (t,)), jax.grad(f)(x), jax.jvp(jax.grad(f), (x,), (t,)),
            jax.grad(lambda a: (jax.grad(f)(a) * t).sum())(x),
            jax.vmap(jax.grad(f))(np.stack([x, t])),
        ]  # fmt: skip

    with jax.set_mesh(cp.mesh):
        actual = jax.jit(lambda: derivatives(partial(function, by_hand=False)))()
    close(actual, jax.jit(lambda: derivatives(partial(function, by_hand=True)))(), 2e-4)


@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_shard_of_a_batch(batch_dim: int) -> None:
    cp, x = context(), jnp.arange(2 * 3 * 16).reshape(3, 16, 2)  # 3 rows of 16 tokens, twice
    batched = jnp.moveaxis(x, 2, batch_dim)
    equal(jax.vmap(cp.shard, in_axes=batch_dim, out_axes=2)(batched), cp.shard(x))


def test_gradients_of_rows_that_are_sent_twice_may_not_race() -> None:
    """Scatter-adds do not claim unique indices: GPUs would then add without atomics."""
    halo = local(movements("zigzag")["halo"], out=P("cp"))
    x = random(2, T, 3)
    backward = str(jax.make_jaxpr(jax.grad(lambda x: halo(x).sum()))(x))
    assert "scatter-add" in backward
    for scatter in backward.split("scatter-add")[1:]:
        assert "unique_indices=True" not in scatter.partition("]")[0]


def test_rows_of_every_dtype_move() -> None:
    cp = context(SIZE)
    dtypes: Any = (jnp.bool_, jnp.uint8, jnp.bfloat16, jnp.complex64)
    x = [(np.arange(2 * T).reshape(2, T) % 2).astype(dtype) for dtype in dtypes]
    moved = jax.jit(lambda x: [cp.unshard(cp.shift(cp.shard(y), 1, fill=1)) for y in x])(x)
    for before, out in zip(x, moved, strict=True):
        assert out.dtype == before.dtype
        equal(out, shifted(before, 1, 1))


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "an array": (lambda cp, x: cp.shift(x, jnp.int32(1)), "n must be an integer"),
    "a fraction": (lambda cp, x: cp.shift(x.astype(int), 1, fill=0.5), "fill must be an integer"),
    "documents": (lambda cp, x: cp.shift(x, 1, cu_seqlens=(1, 4)), "cu_seqlens must start at 0"),
    "end in halo": (lambda cp, x: cp.halo(x, 1, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
    "striped": (lambda _, x: context(SIZE, "striped").halo(x, 1, 0), "Instead: relayout to"),
    "rows": (lambda cp, x: cp.join(x), "y must have a row for each of the 8 runs"),
    "rows of dim 0": (lambda cp, _: cp.join(jnp.ones((16, 2)), dim=0), "y must have a row for"),
    "to chunks": (
        lambda cp, x: cp.relayout(x, to=ChunkLayout(((0,), (1,)))), "chunks for 2 ranks"
    ),
    "no part": (lambda cp, x: cp.shift(x[:, :4], 1), "is not a positive multiple of 8"),
    "no part there": (
        lambda cp, _: context(2).relayout(jnp.ones((1, 12)), to=cp), "is not a positive multiple of 8"
    ),
    "axis": (lambda _, x: ring_jax.shift(x, 1, axis_name="cp"), "is not a mesh axis here"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = WRONG[name]
    refused(message, call, context(SIZE), random(2, 16, 3))


def test_one_device_moves_rows_too() -> None:
    x = random(2, 5, 3)
    for layout in ("contiguous", "zigzag", "striped"):
        arguments: Any = {"axis_name": None, "layout": layout}
        equal(ring_jax.shift(x, -2, **arguments), shifted(x, -2, 0))
        rows, positions, documents = ring_jax.halo(x, 2, 1, cu_seqlens=(0, 2, 5), **arguments)
        assert positions.tolist() == [[-1, -1, 0, 1, 2, 3, 4, -1]] * 2
        assert documents.tolist() == [[-1, -1, 0, 0, 1, 1, 1, -1]] * 2
        equal(ring_jax.join(rows[:, 2:-1], **arguments), x)
        equal(ring_jax.relayout(x, to="contiguous", **arguments), x)


def all_moves(
    others: dict[str, ContextParallel], name: str, length: int, dim: int, shifts: Any, halos: Any
) -> Callable[[jax.Array], Any]:
    """Return a program: shifts, relayouts and joined halos with what they should be, and halos.

    Compiling a move takes a second: along other dims than 1 there are few, and meshes of each kind
    have half of the relayouts.
    """
    cp, documents = others[name], (*DOCUMENTS, length)
    half = slice(2) if AxisType.Explicit in cp.mesh.axis_types else slice(2, 4)
    along: dict[str, Any] = {"dim": dim, "seq_len": length}

    def moves(x: jax.Array) -> Any:
        shards = cp.shard(x, dim=dim, pad=True, fill=7)
        shifts_of = [cp.shift(shards, n, fill=2, cu_seqlens=to, **along) for n, to in shifts]
        names = [*LAYOUTS][half] if dim == 1 else ["striped"]
        targets = {
            to if dim else to.layout: to.shard(x, dim=dim, pad=True)
            for to in (others[name] for name in names)
        }
        relayouts = [(cp.relayout(shards, to=to, **along), y) for to, y in targets.items()]
        beside = [cp.halo(shards, *sides, cu_seqlens=documents, **along) for sides in halos]
        for (left, right), halo in zip(halos if length == T else (), beside, strict=False):
            axis = 2 if dim == -1 else 1
            own = jax.lax.slice_in_dim(halo.rows, left, halo.rows.shape[axis] - right, axis=axis)
            relayouts.append((cp.join(own, dim=dim), shards))
        return [cp.unshard(y, **along) for y in shifts_of], relayouts, beside

    return jax.jit(moves)


@pytest.mark.nightly(unless=["48-explicit-chunks", "45-auto-zigzag"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [T, 45])
@ring_jax.check()
def test_tokens_are_those_of_the_whole_sequence(length: int, kind: str, name: str) -> None:
    """On a mesh that splits the batch, too; no tokens move into padding or out of it."""
    mesh, documents = mesh_of(KINDS[kind], dp=2, cp=SIZE), (*DOCUMENTS, length)
    others = {n: ContextParallel(mesh, "cp", layout=layout) for n, layout in LAYOUTS.items()}
    for dim, shape, shifts, rows_beside in (
        (1, (2, length, 3), ((1, None), (60, documents)), ((3, 0), (30, 20))),
        (0, (length,), ((-2, documents),), ((1, 2),)),
        (-1, (2, 3, length), ((17, None),), ((1, 2),)),
    ):
        x = jax.device_put(random(*shape), NamedSharding(mesh, P("dp") if dim else P()))
        halos = rows_beside if name != "striped" else ()
        results, moved, beside = all_moves(others, name, length, dim, shifts, halos)(x)
        whole = np.moveaxis(np.asarray(x), dim, 1) if x.ndim > 1 else np.asarray(x)[None]
        for (n, offsets), tokens in zip(shifts, results, strict=True):
            expected = shifted(whole, n, 2, DOCUMENTS if offsets else (0,))
            equal(tokens, np.moveaxis(expected, 1, dim) if x.ndim > 1 else expected[0])
        for actual, expected in moved:
            equal(actual, expected)
        for (left, right), halo in zip(halos, beside, strict=True):
            rows, positions, numbers = map(np.asarray, halo)
            assert positions.max() < length
            run_length = others[name].layout_of(length, pad=True).run_length
            assert positions.shape[1] == left + run_length + right
            of_documents = np.searchsorted(np.unique(documents), positions, side="right") - 1
            equal(numbers, np.where(positions >= 0, of_documents, -1))
            batch = np.arange(len(positions)) // (len(positions) // SIZE // len(whole)) % len(whole)
            padded = np.pad(whole, ((0, 0), (0, 1), *[(0, 0)] * (whole.ndim - 2)))
            along = rows if dim != -1 else np.moveaxis(rows, -1, 1)
            equal(along, padded[batch[:, None], positions])


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_gradients_of_a_padded_shift(layout: LayoutSpec) -> None:
    cp, x, weights = context(3, layout), random(2, 8, 3), random(2, 8, 3, seed=1)

    def move(x: Any) -> Any:
        return cp.unshard(cp.shift(cp.shard(x, pad=True, fill=7), 1, seq_len=8), seq_len=8)

    pull = jax.jit(lambda x, y: jax.vjp(move, x)[1](y)[0])
    equal(pull(x, weights), shifted(weights, -1, 0))


ONES: tuple[Any, ...] = (np.int8(1), np.int64(1), np.uint8(1), np.bool_(True), 1, True)
REAL: tuple[Any, ...] = (np.float32(1), np.float16(1), np.float64(1), 1.0)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint32", "bfloat16", "float16"])
def test_a_fill_may_be_any_number_of_the_dtype(dtype: str) -> None:
    move = partial(ring_jax.shift, jnp.zeros((1, 4), dtype), 1, axis_name=None)
    for fill in ONES + REAL * ("float" in dtype):
        out = move(fill=fill)
        assert out.dtype == dtype
        assert out.astype(jnp.float32).tolist() == [[1, 0, 0, 0]], repr(fill)
    beyond: tuple[Any, ...] = (8, -9, np.int64(100), np.float32(0.5), "1", jnp.int32(1), None)
    for fill in beyond if dtype == "int4" else ():
        refused(r"fill must be an integer in \[-8, 7\]", move, fill=fill)


def test_ids_of_a_halo_are_computed_and_not_kept_in_the_program() -> None:
    cp, lengths = context(SIZE, kind="explicit"), []
    for tokens in (1 << 12, 1 << 16):
        offsets = (0, 1000, 1000, tokens)
        run = jax.jit(lambda x, offsets=offsets: cp.halo(x, 3, 1, cu_seqlens=offsets))
        x = jax.device_put(jnp.ones((1, tokens), jnp.int8), NamedSharding(cp.mesh, TOKENS))
        lowered = run.lower(x)
        lengths.append([len(lowered.as_text()), len(lowered.compile().as_text() or "")])
    assert abs(np.diff(lengths, axis=0)).max() < 4000, lengths
    _, positions, documents = run(x)
    layout = cp.layout_of(tokens)
    first = [np.arange(-3, layout.run_length + 1) + start for start in layout.run_positions(1)]
    equal(np.asarray(positions)[2:4], first)
    equal(np.asarray(documents)[2:4], (np.array(first) >= 1000) * 1)


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


def contexts(name: str, layouts: str, kind: str) -> list[ContextParallel]:
    """Return the contexts of ``MESHES``, with layouts like ``zigzag-contiguous``."""
    made, of = [], cast("list[LayoutName]", layouts.split("-"))
    for (devices, shape, names, axis), layout in zip(MESHES[name], of, strict=True):
        grid = np.array(jax.devices())[devices].reshape(shape)
        mesh = Mesh(grid, names, axis_types=(KINDS[kind],) * len(shape))
        made.append(ContextParallel(mesh, axis, layout=layout))
    return made


@pytest.mark.nightly(unless=[
    "striped-zigzag-another order-explicit-48", "zigzag-contiguous-to some-auto-45",
    "striped-zigzag-from some-auto-3", "striped-zigzag-another axis-auto-45",
])  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "length"), [("explicit", T), ("auto", T), ("auto", 45), ("auto", 3)]
)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("layouts", ["zigzag-contiguous", "striped-zigzag"])
def test_other_devices_get_the_tokens_of_their_layout(
    layouts: str, name: str, kind: str, length: int
) -> None:
    """Layouts get the padding that they need, also with fewer tokens than devices."""
    source, target = contexts(name, layouts, kind)
    positions = np.asarray(source.positions(length))
    tokens = source.shard(jnp.arange(length), dim=0, pad=True, fill=-1)
    equal(tokens, np.where(positions < length, positions, -1))
    for dim, shape in ((1, (2, length, 3)), (0, (length,)))[: 2 if length == 45 else 1]:
        whole = jnp.asarray(np.arange(1, np.prod(shape) + 1, dtype="f4").reshape(shape))
        x = source.shard(whole, dim=dim, pad=True, fill=-1)  # numbers in the padding do not move
        expected, back = (cp.shard(whole, dim=dim, pad=True) for cp in (target, source))
        move: Any = partial(source.relayout, to=target, dim=dim, seq_len=length)
        out, pull = jax.vjp(move, x)
        equal(out, expected)
        held = [shard.device.id for shard in out.addressable_shards]
        assert sorted(held) == sorted(target.mesh.device_ids.flatten().tolist())
        rows = out.shape[dim] // target.cp_size
        assert {shard.data.shape[dim] for shard in out.addressable_shards} == {rows}
        equal(target.relayout(out, to=source, dim=dim, seq_len=length), back)
        # Gradients go the same way back.
        dout = target.shard(whole, dim=dim, pad=True, fill=7)
        equal(pull(dout)[0], back)
        if name in IN_JIT and dim == 1:
            both = jax.jit(lambda x, y, move=move: (move(x), jax.vjp(move, x)[1](y)[0]))
            close(both(x, dout), (out, back), 0)


@pytest.mark.parametrize("name", [name for name in MESHES if name not in IN_JIT])
def test_one_program_is_of_one_list_of_devices(name: str) -> None:
    source, target = contexts(name, "zigzag-contiguous", "auto")
    x = source.shard(jnp.ones((2, T, 3)))
    transforms: list[Callable[..., Any]] = [jax.jit, jax.vmap]
    for transform in transforms:
        with pytest.raises(UnsupportedError, match="between two jitted functions"):
            transform(lambda x: source.relayout(x, to=target, dim=-2))(x)


def test_pieces_are_not_gathered() -> None:
    source, target = contexts("another name", "striped-zigzag", "auto")
    x = source.shard(jnp.ones((2, T, 3)))
    text = jax.jit(lambda x: source.relayout(x, to=target)).lower(x).compile().as_text() or ""
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert "all-reduce" not in text


@pytest.mark.nightly("jax", unless=["contiguous-2"])
@pytest.mark.parametrize(("layout", "length"), [("zigzag", 4), ("contiguous", 2), ("striped", 8)])
def test_what_is_sharded_with_padding_is_exact(layout: LayoutSpec, length: int) -> None:
    """Padded shards are exact under jit, with every call checked."""
    cp = context(3, layout)
    *qkv, dout = (random(1, length, n, 8, seed=m) for m, n in enumerate((4, 2, 2, 4)))
    rows: Any = {"mask": random(length, length) < 0.7, "bias": random(1, 4, length, length)}
    ids = (jnp.arange(length, dtype=jnp.int32) // 3)[None]

    def attend(*inputs: Any) -> Any:
        options: Any = {name: cp.shard(x, dim=-2, pad=True) for name, x in rows.items()}
        options |= {"segment_ids": cp.shard(ids, pad=True), "seq_len": length}
        shards = (cp.shard(x, pad=True) for x in inputs)
        return cp.unshard(cp.attention(*shards, **options), seq_len=length)

    hidden = np.where(rows["mask"], rows["bias"], -np.inf)
    with ring_jax.check(every=1):
        check_passes(attend, qkv, dout, tolerance=1e-4, segment_ids=np.asarray(ids), bias=hidden)
