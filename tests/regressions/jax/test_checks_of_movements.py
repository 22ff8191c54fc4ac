"""The check for running jobs counts the bytes of movements, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ring_jax
from ring_core import hops as plans
from ring_core.hops import Hop
from ring_jax import ContextParallel, WrongResultError, movement
from ring_jax.collectives import Ranks

T, SIZE = 40, 4

MOVES: dict[str, Callable[[ContextParallel, jax.Array], jax.Array]] = {
    "shift": lambda cp, x: cp.shift(x, 3, fill=2, cu_seqlens=(0, 7, 9, T - 1), seq_len=T - 1),
    "halo": lambda cp, x: cp.halo(x, 3, 2).rows,
    "relayout": lambda cp, x: cp.relayout(x, to="striped"),
}


def context(kind: AxisType = AxisType.Auto) -> ContextParallel:
    return ContextParallel(jax.make_mesh((SIZE,), ("cp",), axis_types=(kind,)), "cp")


@contextmanager
def longest_for_all() -> Iterator[None]:
    """Let every rank send as many rows as the longest message has."""

    def uncut(*args: Any) -> tuple[Hop, ...]:
        everyone = tuple(range(SIZE))
        return tuple(hop._replace(pieces=((0, hop.rows, everyone),)) for hop in plans.hops(*args))

    with patch.object(movement, "hops", uncut):
        yield


@contextmanager
def more_comes_back() -> Iterator[None]:
    """Let the backward send each message twice."""
    right = Ranks.move

    def wrong(ranks: Ranks, x: Any, *args: Any) -> Any:
        @jax.custom_vjp
        def send(x: jax.Array) -> jax.Array:
            return right(ranks, x, *args)

        def back(_: None, grad: jax.Array) -> tuple[jax.Array]:
            once, again = (jax.vjp(lambda y: right(ranks, y, *args), grad)[1](grad) for _ in "12")
            return (jnp.where(once[0] == 0, again[0], once[0]),)

        send.defvjp(lambda x: (send(x), None), back)
        return send(x)

    with patch.object(Ranks, "move", wrong):
        yield


@pytest.mark.parametrize("name", ["shift", "halo"])
def test_more_bytes_than_those_of_rows_that_move_are_an_error(name: str) -> None:
    cp, x = context(), jnp.ones((2, T, 3))
    MOVES[name](cp, x)  # an unchecked program is not reused for a checked call
    words = (
        r"collectives of a movement carry [\d,]+ bytes between 4 ranks, and the rows that change"
    )
    with ring_jax.check(), longest_for_all(), pytest.raises(WrongResultError, match=words):
        MOVES[name](cp, x)


@pytest.mark.parametrize("name", MOVES)
def test_more_bytes_in_the_backward_are_an_error(name: str) -> None:
    cp, x = context(), jnp.ones((2, T, 3))
    words = "collectives of a backward of a movement carry"
    with ring_jax.check(), more_comes_back(), pytest.raises(WrongResultError, match=words):
        MOVES[name](cp, x)


@pytest.mark.nightly(unless=["auto"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_right_movements_pass(kind: AxisType) -> None:
    cp, x = context(kind), jnp.arange(2 * T * 3.0).reshape(2, T, 3)

    def every(x: jax.Array) -> list[Any]:
        results: list[Any] = []
        for move in MOVES.values():
            run = partial(move, cp)
            results += [*jax.vjp(run, x)[1](run(x) ** 3), *jax.jvp(run, (x,), (x,))]
            results.append(run(x.astype(jnp.int8)))
            if kind is AxisType.Auto:
                results.append(jax.vmap(run)(x[None]))
        return results

    with jax.set_mesh(cp.mesh):
        y = cp.shard(x)
        expected = jax.jit(every)(y)
        with ring_jax.check():
            moved = jax.jit(every)(y)
    jax.tree.map(np.testing.assert_array_equal, moved, expected)


def test_replicated_shards_pass() -> None:
    """Gradients of replicated shards are summed over devices, which the check does not count."""
    mesh = jax.make_mesh((SIZE,), ("cp",))

    def local(x: jax.Array) -> jax.Array:
        grad: jax.Array = jax.grad(lambda x: (ring_jax.shift(x, 1, axis_name="cp") ** 2).sum())(x)
        return grad

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()))
    x = jnp.ones((1, 5))
    expected = run(x)
    with ring_jax.check():
        np.testing.assert_array_equal(run(x), expected)
