"""Shifts, halos and relayouts agree with the same operations on whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ring_jax
from ring_core import ChunkLayout, Layout, LayoutSpec

T, SIZE = 48, 4
CHUNKS = ChunkLayout(((1, 7), (0, 2), (3, 6), (4, 5)))
LAYOUTS: dict[str, LayoutSpec] = {
    "contiguous": "contiguous", "zigzag": "zigzag", "striped": "striped", "chunks": CHUNKS,
}  # fmt: skip
DOCUMENTS = (0, 1, 1, 7, 23, 24, 30, T)


def shifted(x: jax.Array, n: int, fill: float, offsets: tuple[int, ...] | None) -> jax.Array:
    """Compute the definition of a shift: ``out[:, t] = x[:, t - n]`` within documents."""
    source = [
        t - n if start <= t - n < stop else -1
        for start, stop in pairwise(offsets or (0, T))
        for t in range(start, stop)
    ]
    inside = np.array(source).reshape(1, -1, *[1] * (x.ndim - 2)) >= 0
    return jnp.where(inside, x[:, np.array(source)], jnp.asarray(fill, x.dtype))


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def order(layout: LayoutSpec) -> np.ndarray[Any, Any]:
    """Return the token positions in layout order."""
    layout_of_ranks = Layout(layout, T, SIZE)
    return np.concatenate([layout_of_ranks.positions(rank) for rank in range(SIZE)])


ALONG = P(None, "cp")


def local(function: Callable[..., Any], *, out: Any = ALONG) -> Callable[..., Any]:
    """Turn a function of shards into one of arrays ``[B, T, C]`` in layout order."""
    mesh = jax.make_mesh((SIZE,), ("cp",), (AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=ALONG, out_specs=out))


STEPS = (1, -2, 17, 60)


@pytest.mark.nightly(only=["contiguous"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shift_is_that_of_the_whole_sequence(name: str) -> None:
    layout = LAYOUTS[name]
    positions, x = order(layout), numbers(0, 2, T, 3)
    y = [numbers(n, 2, T, 3) for n in range(2 * len(STEPS))]
    moves = [(n, offsets) for n in STEPS for offsets in (None, DOCUMENTS)]

    def move(x: jax.Array) -> list[jax.Array]:
        return [
            ring_jax.shift(x, n, axis_name="cp", layout=layout, fill=0.5, cu_seqlens=offsets)
            for n, offsets in moves
        ]

    like, back = jax.vjp(lambda x: [shifted(x, n, 0.5, offsets) for n, offsets in moves], x)
    out, returned = jax.vjp(local(move), x[:, positions])
    for actual, expected in zip(out, like, strict=True):
        np.testing.assert_array_equal(actual, expected[:, positions])
    (grad,), (expected,) = returned([z[:, positions] for z in y]), back(y)
    np.testing.assert_allclose(grad, expected[:, positions], rtol=1e-5, atol=1e-5)


@pytest.mark.nightly(unless=["contiguous-3-0", "zigzag-30-20", "chunks-1-2"])
@pytest.mark.parametrize(("left", "right"), [(3, 0), (1, 2), (30, 20)])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "chunks"])
def test_a_halo_holds_the_tokens_that_it_says(name: str, left: int, right: int) -> None:
    layout = LAYOUTS[name]
    x = numbers(0, 2, T, 3)

    def both(x: jax.Array) -> tuple[jax.Array, ...]:
        rows, positions, documents = ring_jax.halo(
            x, left, right, axis_name="cp", layout=layout, cu_seqlens=DOCUMENTS
        )
        own = rows[:, left : rows.shape[1] - right]
        return rows, positions, documents, ring_jax.join(own, axis_name="cp", layout=layout)

    run = local(both, out=(P("cp"), P("cp"), P("cp"), P(None, "cp")))
    rows, positions, documents, joined = run(x[:, order(layout)])
    runs = Layout(layout, T, SIZE).num_runs
    assert rows.shape == (2 * runs * SIZE, left + T // SIZE // runs + right, 3)
    padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
    batch = np.arange(len(rows)) // runs % 2
    np.testing.assert_array_equal(rows, padded[batch[:, None], positions])
    starts = np.unique(DOCUMENTS)
    numbered = np.searchsorted(starts, positions, side="right") - 1
    np.testing.assert_array_equal(documents, np.where(positions >= 0, numbered, -1))
    np.testing.assert_array_equal(joined, x[:, order(layout)])


@pytest.mark.nightly(unless=["zigzag", "chunks"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_relayout_gives_the_tokens_of_the_other_layout(name: str) -> None:
    layout, x = LAYOUTS[name], jnp.arange(2 * T * 3).reshape(2, T, 3)

    def move(x: jax.Array) -> list[jax.Array]:
        return [
            ring_jax.relayout(x, to=to, axis_name="cp", layout=layout) for to in LAYOUTS.values()
        ]

    for moved, to in zip(local(move)(x[:, order(layout)]), LAYOUTS.values(), strict=True):
        np.testing.assert_array_equal(moved, x[:, order(to)])


def movements(layout: LayoutSpec) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Return movements of a shard ``[2, T / P, 3]`` by name."""
    arguments: Any = {"axis_name": "cp", "layout": layout}
    return {
        "shift": lambda x: ring_jax.shift(x, -3, cu_seqlens=DOCUMENTS, **arguments),
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
def test_derivatives_and_transforms(layout: str, name: str) -> None:
    along = P("cp") if "halo" in name else P(None, "cp")
    move = local(movements(LAYOUTS[layout])[name], out=along)
    x, tangent = numbers(0, 2, T, 3), numbers(1, 2, T, 3)
    moved, of_tangent = jax.jvp(move, (x,), (tangent,))
    np.testing.assert_array_equal(of_tangent, move(tangent))
    y = numbers(2, *moved.shape)
    (returned,) = jax.vjp(move, x)[1](y)
    assert abs(np.vdot(moved, y)) > 1e-3
    np.testing.assert_allclose(np.vdot(moved, y), np.vdot(x, returned), rtol=1e-4)
    many = jnp.stack([x, tangent])
    np.testing.assert_array_equal(jax.vmap(move)(many), jnp.stack([moved, of_tangent]))
    scanned = jax.lax.scan(lambda carry, x: (carry, jax.checkpoint(move)(x)), 0, many)[1]
    np.testing.assert_array_equal(scanned, jnp.stack([moved, of_tangent]))
    # The gradient of a square under remat needs the movement again.
    (grad,) = jax.vjp(jax.checkpoint(lambda x: move(x) ** 2), x)[1](y)
    (expected,) = jax.vjp(move, x)[1](2 * moved * y)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_rows_that_are_sent_twice_may_not_race() -> None:
    """Scatter-adds do not claim unique indices: GPUs would then add without atomics."""
    halo = local(movements("zigzag")["halo"], out=P("cp"))
    x = numbers(0, 2, T, 3)
    backward = str(jax.make_jaxpr(jax.grad(lambda x: halo(x).sum()))(x))
    assert "scatter-add" in backward
    for scatter in backward.split("scatter-add")[1:]:
        assert "unique_indices=True" not in scatter.partition("]")[0]


def sent(jaxpr: Any) -> int:
    """Count the rows that a program sends, over all devices."""
    rows = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "ppermute":
            rows += equation.invars[0].aval.shape[0] * len(equation.params["perm"])
        assert name not in {"all_gather", "psum", "all_to_all"}
        inner = (getattr(x, "jaxpr", x) for x in equation.params.values())
        rows += sum(sent(x) for x in inner if hasattr(x, "eqns"))
    return rows


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_rows_that_change_device_are_sent(name: str) -> None:
    layout = LAYOUTS[name]
    owner = np.empty(T, int)
    owner[order(layout)] = np.repeat(np.arange(SIZE), T // SIZE)
    arguments: Any = {"axis_name": "cp", "layout": layout}
    rows = {
        "relayout": (lambda x: ring_jax.relayout(x, to="contiguous", **arguments),
                     (owner != np.arange(T) // (T // SIZE)).sum()),
        "shift": (lambda x: ring_jax.shift(x, 1, **arguments), (owner[1:] != owner[:-1]).sum()),
    }  # fmt: skip
    x = numbers(0, 2, T, 3)
    for move, crossing in rows.values():
        assert sent(jax.make_jaxpr(local(move))(x).jaxpr) == crossing
        # The backward sends them back.
        back = jax.make_jaxpr(lambda y, m=move: jax.vjp(local(m), x)[1](y))(x)
        assert sent(back.jaxpr) == 2 * crossing


DTYPES = (jnp.bool_, jnp.uint8, jnp.bfloat16, jnp.complex64)


def test_rows_of_every_dtype_move() -> None:
    cp = context("auto", "zigzag")
    for dtype in DTYPES:
        x = jnp.arange(2 * T).reshape(2, T) % 2
        like = jnp.pad(x, ((0, 0), (1, 0)), constant_values=1)[:, :-1].astype(dtype)
        out = cp.unshard(cp.shift(cp.shard(x.astype(dtype)), 1, fill=1))
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, like)


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "an array": (lambda cp, x: cp.shift(x, jnp.int32(1)), "n must be an integer"),
    "a fraction": (lambda cp, x: cp.shift(x.astype(int), 1, fill=0.5), "fill must be an integer"),
    "documents": (lambda cp, x: cp.shift(x, 1, cu_seqlens=(1, 4)), "cu_seqlens must start at 0"),
    "end in halo": (lambda cp, x: cp.halo(x, 1, 1, cu_seqlens=(0, 9)), "cu_seqlens must end at"),
    "striped": (lambda _, x: context("auto", "striped").halo(x, 1, 0), "Instead: relayout to"),
    "rows": (lambda cp, x: cp.join(x), "y must have a row for each of the 8 runs"),
    "rows of dim 0": (lambda cp, _: cp.join(jnp.ones((16, 2)), dim=0), "y must have a row for"),
    "to chunks": (
        lambda cp, x: cp.relayout(x, to=ChunkLayout(((0,), (1,)))), "chunks for 2 ranks"
    ),
    "no part": (lambda cp, x: cp.shift(x[:, :4], 1), "is not a positive multiple of 8"),
    "axis": (lambda _, x: ring_jax.shift(x, 1, axis_name="cp"), "is not a mesh axis here"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(context("auto", "zigzag"), numbers(0, 2, 16, 3))


def test_one_device_moves_rows_too() -> None:
    x = numbers(0, 2, 5, 3)
    for layout in ("contiguous", "zigzag", "striped"):
        arguments: Any = {"axis_name": None, "layout": layout}
        np.testing.assert_array_equal(ring_jax.shift(x, -2, **arguments), shifted(x, -2, 0, (0, 5)))
        rows, positions, documents = ring_jax.halo(x, 2, 1, cu_seqlens=(0, 2, 5), **arguments)
        assert positions.tolist() == [[-1, -1, 0, 1, 2, 3, 4, -1]] * 2
        assert documents.tolist() == [[-1, -1, 0, 0, 1, 1, 1, -1]] * 2
        np.testing.assert_array_equal(ring_jax.join(rows[:, 2:-1], **arguments), x)
        np.testing.assert_array_equal(ring_jax.relayout(x, to="contiguous", **arguments), x)


MESHES = {
    "auto": ((SIZE,), ("cp",), AxisType.Auto), "explicit": ((SIZE,), ("cp",), AxisType.Explicit),
    "auto-2d": ((2, SIZE), ("dp", "cp"), AxisType.Auto),
    "explicit-2d": ((2, SIZE), ("dp", "cp"), AxisType.Explicit),
}  # fmt: skip


def context(mesh: str, layout: LayoutSpec) -> ring_jax.ContextParallel:
    shape, names, kind = MESHES[mesh]
    return ring_jax.ContextParallel(
        jax.make_mesh(shape, names, (kind,) * len(shape)), "cp", layout=layout
    )


def on_mesh(cp: ring_jax.ContextParallel, x: jax.Array, dim: int) -> jax.Array:
    """Shard an array along the sequence, and its batch if the mesh has an axis for it."""
    batch = ("dp",) if "dp" in cp.mesh.axis_names and dim % x.ndim else (None,)
    return cp.shard(jax.device_put(x, jax.NamedSharding(cp.mesh, P(*batch))), dim=dim)


@pytest.mark.nightly(unless=["explicit-2d-chunks"])  # `test_padding` has auto axes
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_global_arrays_are_moved(mesh: str, name: str) -> None:
    cp, order_of_tokens = context(mesh, LAYOUTS[name]), order(LAYOUTS[name])
    other = context(mesh, "contiguous")
    for dim, shape in ((1, (2, T, 3)), (0, (T,)), (-1, (2, 3, T))):
        x = numbers(0, *shape)
        whole = jnp.moveaxis(x, dim, 1) if x.ndim > 1 else x[None]

        def back(y: jax.Array, dim: int = dim, shape: Any = shape) -> jax.Array:
            return jnp.moveaxis(y, 1, dim) if len(shape) > 1 else y[0]

        local = on_mesh(cp, x, dim)
        out = cp.shift(local, -5, dim=dim, fill=2, cu_seqlens=DOCUMENTS)
        np.testing.assert_array_equal(
            out, back(shifted(whole, -5, 2, DOCUMENTS)[:, order_of_tokens])
        )
        moved = cp.relayout(local, to=other if dim else "contiguous", dim=dim)
        np.testing.assert_array_equal(moved, x)
        np.testing.assert_array_equal(other.relayout(moved, to=cp, dim=dim), local)
        if name == "striped":
            continue
        rows, positions, _ = cp.halo(local, 3, 1, dim=dim)
        layout = cp.layout_of(T)
        assert positions.shape == (
            (1 if dim == 0 else 2) * layout.num_runs * SIZE,
            4 + layout.run_length,
        )
        np.testing.assert_array_equal(
            np.asarray(positions)[:, 3:-1]
            .reshape(SIZE, -1, layout.num_runs, layout.run_length)[:, 0]
            .reshape(-1),
            order_of_tokens,
        )
        tokens = 1 if dim in {0, 1} else 2
        own = jax.lax.slice_in_dim(rows, 3, rows.shape[tokens] - 1, axis=tokens)
        np.testing.assert_array_equal(cp.join(own, dim=dim), local)


SMALL = (jnp.int4, jnp.uint4, jnp.int8, jnp.uint32, jnp.bfloat16, jnp.float16)
SCALARS = (np.int8(1), np.int64(1), np.uint8(1), np.bool_(True), 1, True)
REAL = (np.float32(1), np.float16(1), np.float64(1), 1.0)


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: dtype.__name__)
def test_a_fill_may_be_any_number_of_the_dtype(dtype: Any) -> None:
    x = jnp.zeros((1, 4), dtype)
    fills: tuple[Any, ...] = SCALARS + (REAL if jnp.issubdtype(dtype, jnp.floating) else ())
    for fill in fills:
        out = ring_jax.shift(x, 1, fill=fill, axis_name=None)
        assert out.dtype == dtype
        assert out.astype(jnp.float32).tolist() == [[1, 0, 0, 0]], repr(fill)


def test_a_fill_beyond_the_dtype_is_refused() -> None:
    x = jnp.zeros((1, 4), jnp.int4)
    wrong: tuple[Any, ...] = (8, -9, np.int64(100), np.float32(0.5), "1", jnp.int32(1), None)
    for fill in wrong:
        with pytest.raises(ValueError, match=r"fill must be an integer in \[-8, 7\]"):
            ring_jax.shift(x, 1, fill=fill, axis_name=None)


def test_ids_of_a_halo_are_computed_and_not_kept_in_the_program() -> None:
    size = 4
    mesh = jax.make_mesh((size,), ("cp",))
    cp = ring_jax.ContextParallel(mesh, "cp")
    lengths = []
    for tokens in (1 << 12, 1 << 16):
        offsets = (0, 1000, 1000, tokens)
        run = jax.jit(lambda x, offsets=offsets: cp.halo(x, 3, 1, cu_seqlens=offsets))
        x = jax.device_put(jnp.ones((1, tokens), jnp.int8), jax.NamedSharding(mesh, P(None, "cp")))
        lowered = run.lower(x)
        lengths.append([len(lowered.as_text()), len(lowered.compile().as_text() or "")])
    assert abs(np.diff(lengths, axis=0)).max() < 4000, lengths
    _, positions, documents = run(x)
    layout = cp.layout_of(tokens)
    first = [np.arange(-3, layout.run_length + 1) + start for start in layout.run_positions(1)]
    np.testing.assert_array_equal(np.asarray(positions)[2:4], first)
    np.testing.assert_array_equal(np.asarray(documents)[2:4], (np.array(first) >= 1000) * 1)
