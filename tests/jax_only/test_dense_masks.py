"""A mask given as an array of booleans: exact as it is, or refused by name as too large."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, PartitionSpec as P
from jax_meshes import mesh_of

from ring_core import KernelConfig, reference
from ring_jax import ContextParallel, ring_attention
from ring_jax.equinox import convert
from ring_jax.flax import make_attention_fn
from ring_jax.kernels.block_index import shown_in_blocks
from ring_jax.kernels.scores import ScoreBlocks
from ring_jax.nn import make_dot_product_attention

B, T, H, D = 2, 24, 2, 8
Arrays = dict[str, Any]


def _given(shape: tuple[int, ...]) -> Arrays:
    """Return q, k and v, a mask with one row that sees nothing, and a bias."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {name: rng.standard_normal((B, T, H, D), np.float32) for name in "qkv"}
    arrays["bias"] = rng.standard_normal((1, H, T, T), np.float32)
    arrays["mask"] = rng.random(shape) < 0.4
    arrays["mask"][..., 3, :] = False
    return arrays


@pytest.mark.nightly(unless=["AxisType.Explicit"])  # the others here are on auto axes
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_with_batch_and_heads_split(kind: AxisType) -> None:
    """Results and gradients of global arrays are the oracle's; shards are cases of the table."""
    x, mesh = _given((B, H, T, T)), mesh_of(kind, dp=2, cp=2, tp=2)
    cp, names = (
        ContextParallel(mesh, "cp", batch_axis="dp", head_axis="tp"),
        ("q", "k", "v", "bias"),
    )
    dout = x["q"][::-1].copy()

    def loss(some: Arrays, mask: Any) -> Any:
        shards = [cp.shard(some[name]) for name in "qkv"]
        bias, mask = cp.shard(some["bias"], dim=2), cp.shard(mask, dim=2)
        out = cp.unshard(cp.attention(*shards, bias=bias, mask=mask))
        return (out * dout).sum(), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))({n: x[n] for n in names}, x["mask"])
    hidden = np.where(x["mask"], x["bias"], -np.inf)
    np.testing.assert_allclose(
        out, reference.attention(*(x[n] for n in "qkv"), bias=hidden)[0], rtol=2e-5, atol=2e-5
    )
    expected = reference.attention_grads(dout, *(x[n] for n in "qkv"), bias=hidden)
    for name in names:
        exact: Any = getattr(expected, f"d{name}")
        exact = exact.sum(axis=0, keepdims=True) if name == "bias" else exact
        np.testing.assert_allclose(grads[name], exact, rtol=2e-5, atol=2e-5)


ONE = partial(ring_attention, axis_name=None)
LOCAL = partial(ring_attention, axis_name="cp", layout="zigzag")


def _close(actual: Any, expected: Any) -> None:
    """Compare all rows but the one that sees nothing, where frameworks return the mean of v."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    visible = np.arange(T) != 3
    np.testing.assert_allclose(actual[:, visible], expected[:, visible], rtol=2e-5, atol=2e-5)
    assert not actual[:, 3].any()


@pytest.mark.parametrize("shape", [(T, T), (H, T, T), (1, 1, T, T), (B, 1, T, T), (B, H, T, T)])
def test_jax_nn(shape: tuple[int, ...]) -> None:
    x = _given(shape)
    x["mask"] |= np.eye(T, dtype=bool) & (np.arange(T) != 3)
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    options = {"bias": jnp.asarray(x["bias"]), "mask": jnp.asarray(x["mask"]), "is_causal": True}
    attend = make_dot_product_attention(ONE)
    _close(jax.jit(partial(attend, **options))(q, k, v),
           jax.jit(partial(jax.nn.dot_product_attention, **options))(q, k, v))  # fmt: skip


@pytest.mark.parametrize("shape", [(B, H, 1, T), (B, 1, T, 1)])
def test_jax_nn_takes_a_mask_that_is_broadcast(shape: tuple[int, ...]) -> None:
    x = _given((T, T))
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    mask = jnp.asarray(np.random.default_rng(1).random(shape) < 0.6)
    mask = mask.at[..., 0, :].set(True) if shape[3] == 1 else mask.at[..., 0].set(True)
    actual = jax.jit(make_dot_product_attention(ONE))(q, k, v, mask=mask)
    expected = jax.jit(jax.nn.dot_product_attention)(
        q, k, v, mask=jnp.broadcast_to(mask, (B, *mask.shape[1:]))
    )
    visible = np.broadcast_to(np.asarray(mask), (B, H, T, T)).any(axis=(1, 3))
    np.testing.assert_allclose(actual[visible], expected[visible], rtol=2e-5, atol=2e-5)


def test_jax_nn_beside_lengths_in_shard_map() -> None:
    """A mask that is broadcast along the keys gets columns for the keys of all devices."""
    x = _given((B, 1, T, T))
    cp, lengths = ContextParallel(mesh_of(cp=2), "cp"), jnp.array([11, 20], jnp.int32)
    attend = partial(make_dot_product_attention(LOCAL), key_value_seq_lengths=lengths)
    tokens, rows = P(None, "cp"), P(None, None, "cp")
    call = jax.shard_map(
        lambda q, k, v, mask: attend(q, k, v, mask=mask), mesh=cp.mesh,
        in_specs=(tokens, tokens, tokens, rows), out_specs=tokens,
    )  # fmt: skip
    q, k, v, mask = (jnp.asarray(x[name]) for name in ("q", "k", "v", "mask"))
    mask = mask.at[:, :, :3, 0].set(True)  # each row but one sees a key within the lengths
    mask = mask.at[:, :, 4:, 0].set(True)
    out = jax.jit(call)(*(cp.shard(tensor) for tensor in (q, k, v)), cp.shard(mask, dim=2))
    alone = jax.jit(partial(jax.nn.dot_product_attention, key_value_seq_lengths=lengths))
    _close(cp.unshard(out), alone(q, k, v, mask=mask))
    rows_alone = mask.any(axis=-1, keepdims=True)
    out = jax.jit(call)(*(cp.shard(tensor) for tensor in (q, k, v)), cp.shard(rows_alone, dim=2))
    full = jnp.broadcast_to(rows_alone, mask.shape)
    _close(cp.unshard(out), alone(q, k, v, mask=full))


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_flax(flax: str) -> None:
    """Masks made by Flax's own functions work, also with numbers other than 0 and 1."""
    tokens = jnp.asarray(np.random.default_rng(2).standard_normal((B, T, 12), np.float32))
    is_token = jnp.asarray(np.arange(T)[None] < np.array([[9], [T]]))
    mask = linen.combine_masks(
        linen.make_causal_mask(is_token), linen.make_attention_mask(is_token, is_token)
    )
    attend = make_attention_fn(ContextParallel(mesh_of(cp=2), "cp", layout="contiguous").attention)

    def run(attention_fn: Any) -> Any:
        if flax == "linen":
            layer = linen.MultiHeadDotProductAttention(H, attention_fn=attention_fn)
            parameters = jax.jit(layer.init)(jax.random.key(0), tokens)
            return jax.jit(layer.apply)(parameters, tokens, mask=mask)
        module = nnx.MultiHeadAttention(
            H, 12, 12, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
        )
        return nnx.jit(lambda module: module(tokens, mask=mask))(module)

    theirs = linen.dot_product_attention if flax == "linen" else nnx.dot_product_attention
    actual, expected = run(attend), run(theirs)
    np.testing.assert_allclose(actual[is_token], expected[is_token], rtol=2e-5, atol=2e-5)


@pytest.mark.nightly(only=["shape0"])
@pytest.mark.parametrize("shape", [(T, T), (H, T, T)])
def test_equinox(shape: tuple[int, ...]) -> None:
    layer = eqx.nn.MultiheadAttention(H, 12, key=jax.random.key(0))
    ours = convert(layer, ONE)
    rng = np.random.default_rng(3)
    tokens, masks = rng.standard_normal((B, T, 12), np.float32), rng.random((B, *shape)) < 0.4
    masks[..., 0] = True

    def loss(layer: Any, tokens: Any, mask: Any) -> Any:
        return jnp.sum(jax.vmap(lambda x, mask: layer(x, x, x, mask))(tokens, mask) ** 2)

    results = [
        jax.jit(jax.value_and_grad(partial(loss, layer_or_model)))(tokens, masks)
        for layer_or_model in (ours, layer)
    ]
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((T, T), np.float32), "array of booleans, got one of float32"),
        (np.ones((T, T), np.int32), "array of booleans, got one of int32"),
        (np.zeros((T, T + 1), bool), rf"shape \[{T}, {T}\]"),
        (np.zeros((3, 1, T, T), bool), "got"),
        (np.zeros(T, bool), "got"),
        ([[True]], "Mask or an array of booleans, got list"),
    ],
)
def test_what_is_no_such_mask_is_refused(mask: Any, message: str) -> None:
    x, cp = _given((T, T)), ContextParallel(mesh_of(cp=1), "cp")
    for attend in (ONE, cp.attention, cp.explain):
        with pytest.raises(ValueError, match=message):
            attend(x["q"], x["k"], x["v"], mask=mask)


def test_what_is_too_large_is_told_what_to_use() -> None:
    """The size limit is on what a device holds, for global arrays as for shards."""
    length = (1 << 13) + 2
    q = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((length, length), jnp.bool_)
    with pytest.raises(ValueError, match=r"at most 64 MiB .*Mask\(predicate"):
        jax.eval_shape(lambda q, mask: ONE(q, q, q, mask=mask), q, mask)
    cp = ContextParallel(mesh_of(cp=2), "cp", layout="contiguous")
    jax.eval_shape(lambda q, mask: cp.attention(q, q, q, mask=mask), q, mask)
    more = jax.ShapeDtypeStruct((1, 4, length, length), jnp.bool_)
    with pytest.raises(ValueError, match="takes 129 MiB a rank"):
        jax.eval_shape(lambda q, mask: cp.attention(q, q, q, mask=mask), q, more)


@pytest.mark.parametrize("shape", [(1, H, 20, 30), (B, 1, 20, 30)])
@pytest.mark.parametrize("sizes", [(4, 8), (32, 2)])
def test_blocks_that_it_hides(shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    """A block is visible if some head sees some of it; the last blocks may be shorter."""
    mask = np.random.default_rng(4).random(shape) < 0.02
    some = shown_in_blocks(jnp.where(mask, 1.0, -jnp.inf), *sizes)
    assert not some.all()
    for i, j in np.ndindex(some.shape[1:]):
        block_slices = (
            slice(i * sizes[0], (i + 1) * sizes[0]),
            slice(j * sizes[1], (j + 1) * sizes[1]),
        )
        block = mask[..., *block_slices]
        np.testing.assert_array_equal(some[:, i, j], block.any(axis=(1, 2, 3)))


def test_hidden_blocks_are_not_computed() -> None:
    x, positions = _given((T, T)), np.arange(T)
    computed: list[None] = []
    x["mask"] = (positions // 4)[:, None] == positions // 4
    plain = ScoreBlocks.scores

    def counting(*args: Any) -> Any:
        jax.debug.callback(lambda: computed.append(None))
        return plain(*args)

    def loss(q: Any) -> Any:
        kernel = KernelConfig("xla", block_q=4, block_k=6)
        return jnp.sum(ONE(q, x["k"], x["v"], mask=jnp.asarray(x["mask"]), kernel=kernel))

    with mock.patch.object(ScoreBlocks, "scores", counting):
        jax.block_until_ready(jax.grad(loss)(jnp.asarray(x["q"])))
        jax.effects_barrier()
    diagonal = (positions // 4)[:, None] == positions // 4
    live = diagonal.reshape(6, 4, 4, 6).any(axis=(1, 3)).sum()
    assert live < 6 * 4
    assert len(computed) == 2 * live
