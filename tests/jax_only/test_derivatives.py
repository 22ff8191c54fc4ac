"""Derivatives other than the gradient: attention refuses them by name, ``shard`` supports them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ring_core import ChunkLayout, UnsupportedError
from ring_jax import RESIDUALS, ContextParallel, ring_attention

MESHES = {
    kind.name: jax.make_mesh((2, 2), ("dp", "cp"), (kind, kind), devices=jax.devices()[:4])
    for kind in (AxisType.Auto, AxisType.Explicit)
}
MESH = MESHES["Auto"]
CP = ContextParallel(MESH, "cp")
SPEC = PartitionSpec(None, "cp")
Q = jax.random.normal(jax.random.key(0), (1, 16, 2, 4))
SINKS = jnp.zeros(2)


def sharded(q: Any, k: Any, v: Any, **options: Any) -> Any:
    call = partial(ring_attention, axis_name="cp", causal=True, sinks=SINKS, **options)
    return jax.shard_map(call, mesh=MESH, in_specs=SPEC, out_specs=SPEC)(q, k, v)


CALLS: dict[str, Callable[..., Any]] = {
    "one device": partial(ring_attention, axis_name=None, causal=True),
    "gather": partial(CP.attention, strategy="gather", cu_seqlens=(0, 7, 16)),
    "shard_map": sharded,
}  # fmt: skip


def loss(call: Callable[..., Any], q: Any, k: Any = Q) -> Any:
    return (call(q, k, Q) ** 2).sum()


ASKED: dict[str, tuple[str, Callable[..., Any]]] = {
    "jvp": ("forward mode", lambda call, x: jax.jvp(partial(call, k=Q, v=Q), (x,), (x,))),
    "jvp of keys": (
        "forward mode",
        lambda call, x: jax.jvp(lambda k: loss(call, Q, k), (x,), (x,)),
    ),
    "jacfwd": ("forward mode", lambda call, x: jax.jacfwd(partial(loss, call))(x)),
    "linearize": ("forward mode", lambda call, x: jax.linearize(partial(loss, call), x)[1](x)),
    # Reverse mode over forward mode: JAX has no rule for the tangent of a call with a gradient.
    "grad of jvp": (
        "forward mode",
        lambda call, x: jax.grad(lambda a: jax.jvp(partial(loss, call), (a,), (a,))[1])(x),
    ),
    "grad of jvp along a constant": (
        "forward mode",
        lambda call, x: jax.grad(lambda a: jax.jvp(partial(loss, call), (a,), (Q,))[1])(x),
    ),
    "in a batch": (
        "forward mode",
        lambda call, x: jax.vmap(
            lambda t: jax.grad(lambda a: jax.jvp(partial(loss, call), (a,), (t,))[1])(x)
        )(Q[None]),
    ),
    "vjp of linearize": (
        "forward mode",
        lambda call, x: jax.vjp(jax.linearize(partial(loss, call), x)[1], x)[1](1.0),
    ),
    "jvp of grad": (
        "derivative of a gradient",
        lambda call, x: jax.jvp(jax.grad(partial(loss, call)), (x,), (x,)),
    ),
    "hessian": ("derivative of a gradient", lambda call, x: jax.hessian(partial(loss, call))(x)),
    "grad of grad": (
        "derivative of a gradient",
        lambda call, x: jax.grad(lambda a: (jax.grad(partial(loss, call))(a) ** 2).sum())(x),
    ),
}


#: Pairs of call and derivative; every other one runs inside of ``jax.jit``.
RUNS = [
    (asked, call, (n + m) % 2 == 1) for n, asked in enumerate(ASKED) for m, call in enumerate(CALLS)
]


@pytest.mark.nightly(unless=[
    "jvp-one device-False", "jvp of keys-gather-False", "jacfwd-shard_map-False",
    "linearize-one device-True", "grad of jvp-one device-False",
    "grad of jvp along a constant-one device-True", "in a batch-shard_map-False",
    "vjp of linearize-gather-False", "jvp of grad-gather-True", "hessian-shard_map-True",
    "grad of grad-one device-False",
])  # fmt: skip
@pytest.mark.parametrize(("asked", "call", "compiled"), RUNS)
def test_attention_refuses_all_but_the_gradient(asked: str, call: str, *, compiled: bool) -> None:
    message, ask = ASKED[asked]
    function = partial(ask, CALLS[call])
    with pytest.raises(UnsupportedError, match=f"{message}.*Instead: use gradients alone"):
        (jax.jit(function) if compiled else function)(Q)


def test_other_functions_keep_the_words_of_jax() -> None:
    """The rule that refuses the tangent of a tangent is registered for a primitive of JAX's."""

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, gradient: (2 * gradient,))
    with pytest.raises(NotImplementedError, match="'custom_lin' not implemented"):
        jax.grad(lambda x: jax.jvp(lambda a: doubled(a).sum(), (x,), (x,))[1])(Q)


@pytest.mark.nightly(only=["shard_map"])
@pytest.mark.parametrize("call", [CALLS["one device"], sharded], ids=["one device", "shard_map"])
def test_gradients_stay(call: Callable[..., Any]) -> None:
    expected = jax.grad(partial(loss, call))(Q)

    def beside(q: Any) -> Any:
        inner = jax.lax.stop_gradient(jax.grad(partial(loss, call))(q))
        return loss(call, q) + (inner * q).sum()

    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(jax.vmap(jax.grad(partial(loss, call)))(Q[None])[0], expected)
    close(jax.jit(jax.grad(beside))(Q), 2 * expected)


LAYOUTS: dict[str, Any] = {
    "contiguous": "contiguous", "zigzag": "zigzag", "striped": "striped",
    "chunks": ChunkLayout(((0, 3, 4, 6), (1, 2, 5, 7))),
}  # fmt: skip


@pytest.mark.nightly(
    unless=["contiguous-Explicit", "zigzag-Auto", "striped-Auto", "chunks-Explicit"]
)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shard_and_unshard_have_them_all(layout: Any, mesh: Any) -> None:
    """Derivatives of ``shard`` and ``unshard`` equal those of permutations by hand."""
    cp = ContextParallel(mesh, "cp", layout=layout)
    rows = cp.layout_of(16)
    order = np.concatenate([rows.positions(rank) for rank in range(2)])
    weight = np.random.default_rng(0).standard_normal((1, 16, 2, 4)).astype(np.float32)

    def function(x: Any, *, by_hand: bool) -> Any:
        x = x[:, order] if by_hand else cp.shard(x)
        x = x**3 * weight
        x = x[:, np.argsort(order)] if by_hand else cp.unshard(x)
        return (x * weight).sum()

    x, t = np.asarray(Q), np.asarray(Q[:, ::-1])
    for derivative in (
        lambda f: jax.jvp(f, (x,), (t,)),
        lambda f: jax.grad(f)(x),
        lambda f: jax.jvp(jax.grad(f), (x,), (t,)),
        lambda f: jax.grad(lambda a: (jax.grad(f)(a) * t).sum())(x),
        lambda f: jax.vmap(jax.grad(f))(np.stack([x, t])),
    ):
        with jax.set_mesh(mesh):
            actual = jax.jit(partial(derivative, partial(function, by_hand=False)))()
        expected = derivative(partial(function, by_hand=True))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), actual, expected)


@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_shard_of_a_batch(batch_dim: int) -> None:
    x = jnp.arange(2 * 3 * 16).reshape(3, 16, 2)  # 3 rows of 16 tokens, twice
    batched = jnp.moveaxis(x, 2, batch_dim)
    actual = jax.vmap(CP.shard, in_axes=batch_dim, out_axes=2)(batched)
    np.testing.assert_array_equal(actual, CP.shard(x))


def test_results_that_are_saved_are_not_computed_again() -> None:
    """Keys alone are gathered again if a checkpoint policy saves ``out`` and ``lse``."""

    def products(*names: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        call = jax.checkpoint(partial(CALLS["gather"], kernel="xla"), policy=policy)
        return str(jax.make_jaxpr(jax.grad(partial(loss, call)))(Q)).count("dot_general")

    assert products(*RESIDUALS) == products(*RESIDUALS[:2]) < products()
