"""Layers that look at neighbours: shifts, halos and relayouts against whole sequences."""

from __future__ import annotations

import re
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
    """The definition: ``out[:, t] = x[:, t - n]`` inside of documents."""
    out = []
    for start, stop in pairwise(offsets or (0, T)):
        for t in range(start, stop):
            there = start <= t - n < stop
            out.append(x[:, t - n] if there else jnp.full_like(x[:, 0], fill))
    return jnp.stack(out, 1)


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def order(layout: LayoutSpec) -> np.ndarray[Any, Any]:
    """Positions in the order in which devices hold them."""
    place = Layout(layout, T, SIZE)
    return np.concatenate([place.positions(rank) for rank in range(SIZE)])


def local(function: Callable[..., Any], *, out: Any = P(None, "cp")) -> Callable[..., Any]:
    """A function of shards along ``cp``, as one of arrays ``[B, T, C]`` in layout order."""
    mesh = jax.make_mesh((SIZE,), ("cp",), (AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(None, "cp"), out_specs=out))


@pytest.mark.parametrize("n", [0, 1, -2, 17, -37, 60])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shift_is_that_of_the_whole_sequence(name: str, n: int) -> None:
    layout = LAYOUTS[name]
    at, x, y = order(layout), numbers(0, 2, T, 3), numbers(1, 2, T, 3)
    for offsets in (None, DOCUMENTS):
        like, back = jax.vjp(lambda x, c=offsets: shifted(x, n, 0.5, c), x)

        def move(x: jax.Array, offsets: Any = offsets) -> jax.Array:
            return ring_jax.shift(
                x, n, axis_name="cp", layout=layout, fill=0.5, cu_seqlens=offsets
            )

        out, returned = jax.vjp(local(move), x[:, at])
        np.testing.assert_array_equal(out, like[:, at])
        np.testing.assert_array_equal(returned(y[:, at])[0], back(y)[0][:, at])


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


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_relayout_gives_the_tokens_of_the_other_layout(name: str, to: str) -> None:
    layout, other, x = LAYOUTS[name], LAYOUTS[to], jnp.arange(2 * T * 3).reshape(2, T, 3)
    move = local(lambda x: ring_jax.relayout(x, to=other, axis_name="cp", layout=layout))
    np.testing.assert_array_equal(move(x[:, order(layout)]), x[:, order(other)])
