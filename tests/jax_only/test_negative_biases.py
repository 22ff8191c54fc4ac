"""Very negative finite biases, as in additive masks, give what exact arithmetic gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from jax_meshes import mesh_of
from negative_biases import NEGATIVE, NegativeCase
from tolerances import assert_close

import ring_jax
from ring_core import KernelConfig, Mask
from ring_jax import ContextParallel, bias_shift, ring_attention


#: Sinks with such biases are in test_loops, segment ids in the next test.
@pytest.mark.nightly(unless=["helpers"])
@pytest.mark.parametrize("case", NEGATIVE, ids=[case.name for case in NEGATIVE])
def test_rings_agree_with_real_numbers(case: NegativeCase, backend: Any) -> None:
    for variant in case.everywhere():
        assert_close(variant, backend.run(variant))


def test_gathered_keys_agree_with_real_numbers(backend: Any) -> None:
    """Gathered keys with segment ids, so that only devices know what a row sees."""
    case = NegativeCase(
        "gathered", Mask(causal=True), "zigzag", 2, bias="shared", batch=2, segments="documents"
    )
    for variant in case.everywhere():
        assert_close(variant, backend.run(variant, strategy="gather"))


B, T, H, D = 2, 32, 2, 8
Attend = Callable[..., tuple[Any, Any]]


def _inputs() -> list[Any]:
    """Return q, k and v, and a bias of -1e10 in whole rows and in the left columns."""
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((1, H, T, T), np.float32)
    bias[:, :, -T // 4 :] -= 1e10
    bias[:, :, :, : T // 4] -= 1e10
    return [*(jnp.asarray(rng.standard_normal((B, T, H, D), np.float32)) for _ in range(3)), bias]


def _by_hand(q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any]:
    """Return causal attention, with each row of the bias shifted."""
    visible = np.tri(T, dtype=bool)[None, None]
    shift = jax.lax.stop_gradient(jnp.where(visible, bias, -jnp.inf).max(axis=-1, keepdims=True))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * D**-0.5 + (bias - shift)
    scores = jnp.where(visible, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v), lse + shift[..., 0]


def _grads(attend: Attend, *x: Any) -> Any:
    def loss(x: Any) -> Any:
        out, lse = attend(*x)
        return jnp.sum(out**2) + jnp.sum(lse * np.linspace(-1, 1, T)[None, None]), (out, lse)

    return jax.jit(jax.grad(loss, has_aux=True))(x)


def _compared(attend: Attend) -> None:
    x = _inputs()
    for actual, expected in zip(
        *map(jax.tree.leaves, (_grads(attend, *x), _grads(_by_hand, *x))), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def _global(cp: ContextParallel, **options: Any) -> Attend:
    """Return a function that calls ``cp.attention`` on arrays in natural order."""

    def attend(q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any]:
        q, k, v = (cp.shard(x) for x in (q, k, v))
        out, lse = cp.attention(
            q, k, v, causal=True, bias=cp.shard(bias, dim=2), return_lse=True, **options
        )
        return cp.unshard(out), cp.unshard(lse, dim=2)

    return attend


@pytest.mark.parametrize(
    ("axis_type", "named"),
    [pytest.param(AxisType.Auto, False, marks=pytest.mark.nightly), (AxisType.Explicit, True)],
)
def test_global_arrays(axis_type: AxisType, *, named: bool) -> None:
    """Meshes with another axis, which splits the batch or is left to the compiler."""
    mesh = mesh_of(axis_type, data=2, cp=2)
    with jax.set_mesh(mesh):
        _compared(_global(ContextParallel(mesh, "cp", batch_axis="data" if named else None)))


def test_transformations() -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*ring_jax.RESIDUALS)
    ring = partial(ring_attention, axis_name="cp", causal=True, return_lse=True)

    def local(q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, Any]:
        attend: Any = jax.checkpoint(lambda q, k, v, bias: ring(q, k, v, bias=bias), policy=policy)

        def layer(carry: Any, heads: Any) -> Any:
            return carry, jax.vmap(attend, in_axes=(0, 0, 0, None))(*heads)

        each = [jnp.moveaxis(x[:, None, :, :, None], 3, 0) for x in (q, k, v)]  # [H, B, 1, T, 1, D]
        _, (out, lse) = jax.lax.scan(layer, 0, (*each, jnp.moveaxis(bias[:, :, None], 1, 0)))
        return jnp.moveaxis(out[:, :, 0, :, 0], 0, 2), jnp.moveaxis(lse[:, :, 0, 0], 0, 1)

    rows, tokens = P(None, None, "cp"), P(None, "cp")
    ring_of = partial(jax.shard_map, mesh=mesh_of(cp=2), out_specs=(tokens, rows))
    _compared(ring_of(local, in_specs=(tokens, tokens, tokens, rows)))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ring", "balanced", "gather"])
def test_checked_calls_pass(strategy: str) -> None:
    """Checked calls pass: the check knows the shift, the helpers' part, and gathered ids."""
    cp = ContextParallel(mesh_of(cp=4), "cp", layout="contiguous")
    ids = cp.shard(jnp.zeros((B, T), jnp.int32))
    with ring_jax.check():
        _compared(_global(cp, segment_ids=ids, strategy=strategy))
        jax.effects_barrier()


def test_rows_are_looked_at_in_groups() -> None:
    """The last group of rows, which is shorter, begins within the one before."""
    kernel = KernelConfig("xla", block_q=24)  # no other test has compiled this program
    attend: Any = partial(
        ring_attention, axis_name=None, causal=True, return_lse=True, kernel=kernel
    )
    with mock.patch.object(bias_shift, "_MAX_ELEMENTS", 5 * H * T):
        _compared(lambda q, k, v, bias: attend(q, k, v, bias=bias))


def test_no_second_bias_is_allocated() -> None:
    q = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 2, 4096, 4096), jnp.float32)
    attend = jax.jit(lambda q, bias: ring_attention(q, q, q, axis_name=None, bias=bias))
    memory: Any = attend.lower(q, bias).compile().memory_analysis()
    assert memory.temp_size_in_bytes < bias.size * 4 / 2


def test_a_mask_alone_has_no_shift() -> None:
    """A boolean mask has no shift: its rows are not read, and no segment ids are gathered."""
    cp, x = ContextParallel(mesh_of(cp=2), "cp", layout="contiguous"), _inputs()
    ids = cp.shard(jnp.zeros((B, T), jnp.int32))

    def text(**options: Any) -> str:
        return str(jax.make_jaxpr(partial(cp.attention, segment_ids=ids, **options))(*x[:3]))

    assert "all_gather" not in text(mask=np.tri(T, dtype=bool))
    assert text(bias=x[3]).count("all_gather[") == 1
    assert "all_gather" not in text(bias=x[3], sinks=jnp.zeros(H))
