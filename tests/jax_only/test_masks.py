"""Predicates, very negative biases and masks as arrays give what exact arithmetic gives."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import NEGATIVE
from cases import Case
from jax.sharding import PartitionSpec as P
from jax_meshes import TOKENS, close, context, in_ring, random
from predicates import PREDICATES, TRACED, T as LENGTH, expected, inputs, very_negative_bias
from refused import refused
from tolerances import assert_close

import ring_jax
from ring_core import KernelConfig, Mask, UnsupportedError
from ring_core.plan.tile_mask import BlockGeometry
from ring_jax import bias_shift, ring_attention
from ring_jax.equinox import convert
from ring_jax.kernels.scores import ScoreBlocks
from ring_jax.nn import make_dot_product_attention
from ring_jax.records import CallOptions

GATHERED = Case(
    "gathered", Mask(causal=True), "zigzag", 2, bias="shared", batch=2, segments="documents"
)


#: Sinks with such biases are in the loops of test_program.
@pytest.mark.nightly(unless=["helpers", "gathered"])
@pytest.mark.parametrize("case", [*NEGATIVE, GATHERED], ids=lambda case: case.name)
def test_rings_agree_with_real_numbers(case: Case, backend: Any) -> None:
    """With segment ids and gathered keys only devices know what a row sees."""
    strategy = "gather" if case is GATHERED else "auto"
    for variant in case.everywhere():
        assert_close(variant, backend.run(variant, strategy=strategy))


def test_rows_are_looked_at_in_groups(backend: Any) -> None:
    """The last group of rows, which is shorter, begins within the one before."""
    case = Case("groups", Mask(causal=True), seq_len=24, bias="full", lse_grad=True)
    with mock.patch.object(bias_shift, "_MAX_ELEMENTS", 5 * case.heads[0] * case.seq_len):
        for variant in case.everywhere():
            assert_close(variant, backend.run(variant))


B, T, H, D = 2, 24, 2, 8


def test_no_second_bias_is_allocated() -> None:
    q = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 2, 4096, 4096), jnp.float32)
    attend = jax.jit(lambda q, bias: ring_attention(q, q, q, axis_name=None, bias=bias))
    memory: Any = attend.lower(q, bias).compile().memory_analysis()
    assert memory.temp_size_in_bytes < bias.size * 4 / 2


def test_a_mask_alone_has_no_shift() -> None:
    """A boolean mask has no shift: its rows are not read, and no segment ids are gathered."""
    cp, x = context(layout="contiguous"), [*_given((T, T)).values()]
    ids = cp.shard(jnp.zeros((B, T), jnp.int32))

    def text(**options: Any) -> str:
        return str(jax.make_jaxpr(partial(cp.attention, segment_ids=ids, **options))(*x[:3]))

    assert "all_gather" not in text(mask=np.tri(T, dtype=bool))
    assert text(bias=x[3]).count("all_gather[") == 1
    assert "all_gather" not in text(bias=x[3], sinks=jnp.zeros(H))


EXPLICIT = context(kind="explicit")
QKV = [jnp.asarray(x) for x in inputs(np.float32)]
ONE = partial(ring_attention, axis_name=None)
JAX_TABLE = jnp.arange(LENGTH) % 5
OWN: dict[str, Any] = {
    "JAX's functions": lambda i, j: jnp.minimum(i, j) < 9,
    "JAX's table": lambda i, j: JAX_TABLE[i] == JAX_TABLE[j],
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", PREDICATES)
@pytest.mark.nightly(unless=["hash-False", "fraction-True", "bits-True"])
def test_what_the_plan_shows(name: str, biased: bool) -> None:
    q, k, v = map(EXPLICIT.shard, QKV)
    bias = very_negative_bias(np.float32) if biased else None
    own_rows: Any = {} if bias is None else {"bias": EXPLICIT.shard(jnp.asarray(bias), dim=-2)}
    with ring_jax.check(int(not biased)):
        out = EXPLICIT.unshard(
            EXPLICIT.attention(q, k, v, mask=Mask(predicate=PREDICATES[name]), **own_rows)
        )
    right, rows = expected(name, bias)
    np.testing.assert_allclose(np.asarray(out)[:, rows], right[:, rows], atol=2e-6)


MODES: dict[str, Any] = {
    "x64": partial(jax.enable_x64, True), "strict": partial(jax.numpy_dtype_promotion, "strict"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["hash", "bits"])
def test_in_other_modes_of_jax(name: str, mode: str) -> None:
    with MODES[mode]():
        out = ONE(*QKV, mask=Mask(predicate=PREDICATES[name]))
    close(out, expected(name)[0])


@pytest.mark.parametrize("name", OWN)
def test_functions_of_jax(name: str) -> None:
    mask = Mask(predicate=OWN[name])
    shown = jnp.asarray(mask.dense(np.arange(LENGTH), np.arange(LENGTH)))
    close(ONE(*QKV, mask=mask), ONE(*QKV, mask=shown))


@pytest.mark.parametrize("name", PREDICATES)
def test_too_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockGeometry, "tiles", None)
    x = jnp.ones((1, LENGTH - 8, 2, 8))
    call = partial(ONE, x, x, x, mask=Mask(predicate=PREDICATES[name]), kernel="xla")
    if name in TRACED:
        call()
        return
    with pytest.raises(UnsupportedError, match=r"64 MiB. Instead: .* 10 \* j >= 6 \* i") as error:
        call()
    assert "Trac" not in str(error.value).replace("_Traced", "")


def test_windows_beyond_32_bits() -> None:
    """Numbers of options, too, may be wider than a device's: beside a bias JAX evaluates them."""
    bias = jnp.full((1, 1, LENGTH, LENGTH), -1e10)
    wide = ONE(*QKV, window=(2**35, 2**32), chunk_size=2**39, bias=bias)
    close(wide, ONE(*QKV))


class Lattice:
    def __init__(self, without: int) -> None:
        self.without = without

    def __call__(self, i: Any, j: Any) -> Any:
        return (i - j) % 4 != self.without


def test_a_function_that_is_made_anew_is_not_compiled_anew() -> None:
    q = jnp.ones((1, 16, 2, 8))
    first, second = (
        EXPLICIT._check_call(q, q, q, CallOptions(mask=Mask(predicate=Lattice(2))))
        for _ in range(2)
    )
    assert first.spec == second.spec


Arrays = dict[str, Any]


def _given(shape: tuple[int, ...]) -> Arrays:
    """Return q, k and v, a bias, and a mask with one row that sees nothing."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {name: rng.standard_normal((B, T, H, D), np.float32) for name in "qkv"}
    arrays["bias"] = rng.standard_normal((1, H, T, T), np.float32)
    arrays["mask"] = rng.random(shape) < 0.4
    arrays["mask"][..., 3, :] = False
    return arrays


LOCAL = partial(ring_attention, axis_name="cp", layout="zigzag")


def _close(actual: Any, expected: Any) -> None:
    """Compare all rows but the one that sees nothing, where frameworks return the mean of v."""
    visible = np.arange(T) != 3
    close(actual[:, visible], expected[:, visible])
    assert not np.asarray(actual[:, 3]).any()


def test_jax_nn_beside_lengths_in_shard_map() -> None:
    """A mask that is broadcast along the keys gets columns for the keys of all devices."""
    cp, lengths = context(), jnp.array([11, 20], jnp.int32)
    attend = partial(make_dot_product_attention(LOCAL), key_value_seq_lengths=lengths)
    call = in_ring(
        lambda q, k, v, mask: attend(q, k, v, mask=mask),
        in_specs=(*[TOKENS] * 3, P(None, None, "cp")),
    )
    q, k, v, _, mask = map(jnp.asarray, _given((B, 1, T, T)).values())
    mask = mask.at[:, :, :3, 0].set(True)  # each row but one sees a key within the lengths
    mask = mask.at[:, :, 4:, 0].set(True)
    alone = jax.jit(partial(jax.nn.dot_product_attention, key_value_seq_lengths=lengths))
    for shown in (mask, mask.any(axis=-1, keepdims=True)):
        out = jax.jit(call)(*map(cp.shard, (q, k, v)), cp.shard(shown, dim=2))
        _close(cp.unshard(out), alone(q, k, v, mask=jnp.broadcast_to(shown, mask.shape)))


def test_equinox() -> None:
    layer = eqx.nn.MultiheadAttention(H, 12, key=jax.random.key(0))
    tokens, masks = random(B, T, 12, seed=3), random(B, H, T, T, seed=4) < -0.2
    masks = masks.at[..., 0].set(True)

    def loss(layer: Any, tokens: Any) -> Any:
        return jnp.sum(jax.vmap(lambda x, mask: layer(x, x, x, mask))(tokens, masks) ** 2)

    ours, theirs = (
        jax.jit(jax.value_and_grad(partial(loss, x)))(tokens) for x in (convert(layer, ONE), layer)
    )
    close(ours, theirs, 1e-4)


def test_what_is_no_such_mask_is_refused() -> None:
    x, cp = _given((T, T)), context(1)
    wrong: list[tuple[Any, str]] = [
        (np.zeros((T, T), np.float32), "array of booleans, got one of float32"),
        (np.ones((T, T), np.int32), "array of booleans, got one of int32"),
        (np.zeros((T, T + 1), bool), rf"shape \[{T}, {T}\]"),
        (np.zeros((3, 1, T, T), bool), "got"),
        (np.zeros(T, bool), "got"),
        ([[True]], "Mask or an array of booleans, got list"),
    ]
    for attend, (mask, message) in product((ONE, cp.attention, cp.explain), wrong):
        refused(message, attend, x["q"], x["k"], x["v"], mask=mask)


def test_what_is_too_large_is_told_what_to_use() -> None:
    """The size limit is on what a device holds, for global arrays as for shards."""
    length = (1 << 13) + 2
    q = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)
    mask = jax.ShapeDtypeStruct((length, length), jnp.bool_)
    with pytest.raises(ValueError, match=r"at most 64 MiB .*Mask\(predicate"):
        jax.eval_shape(lambda q, mask: ONE(q, q, q, mask=mask), q, mask)
    cp = context(layout="contiguous")
    call = partial(jax.eval_shape, lambda q, mask: cp.attention(q, q, q, mask=mask), q)
    call(mask)
    refused("takes 129 MiB a rank", call, jax.ShapeDtypeStruct((1, 4, length, length), jnp.bool_))


def test_hidden_blocks_are_not_computed() -> None:
    x, computed, plain = _given((T, T)), list[None](), ScoreBlocks.scores
    diagonal = (np.arange(T) // 4)[:, None] == np.arange(T) // 4

    def counting(*args: Any) -> Any:
        jax.debug.callback(lambda: computed.append(None))
        return plain(*args)

    def loss(q: Any) -> Any:
        kernel = KernelConfig("xla", block_q=4, block_k=6)
        return jnp.sum(ONE(q, x["k"], x["v"], mask=jnp.asarray(diagonal), kernel=kernel))

    with mock.patch.object(ScoreBlocks, "scores", counting):
        jax.block_until_ready(jax.grad(loss)(jnp.asarray(x["q"])))
        jax.effects_barrier()
    live = diagonal.reshape(6, 4, 4, 6).any(axis=(1, 3)).sum()
    assert live < 6 * 4
    assert len(computed) == 2 * live
