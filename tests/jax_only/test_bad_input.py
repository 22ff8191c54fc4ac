"""Bad input raises an error that names the argument when the call is traced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from wrong import KV, Q, bad_calls

from ring_core import Mask, UnsupportedError, reference
from ring_core.base.arguments import FOREIGN_OPTIONS
from ring_jax import ContextParallel, KernelConfig, Segments, compat, flax, nn, ring_attention
from ring_jax.dropout import seed_words


def arrays(**replaced: Any) -> dict[str, Any]:
    """Return valid arguments with some replaced."""
    good = {"q": jnp.zeros(Q), "k": jnp.zeros(KV), "v": jnp.zeros(KV), "axis_name": None}
    return good | replaced


def ids(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


BAD: dict[str, tuple[dict[str, Any], str]] = bad_calls(jnp.zeros, "jax.Array") | {
    "not an array": ({"k": [1.0]}, "k must be a jax.Array, got list"),
    "cu_seqlens as an array": ({"cu_seqlens": jnp.array([0, 8])}, "cu_seqlens must be known when the call is traced"),
    "ids dtype": ({"segment_ids": jnp.zeros((2, 8), jnp.uint32)}, "segment_ids must be int32, .* got uint32"),
    "seed without dropout": ({"dropout_seed": -1}, "dropout_seed must be an integer"),
    "seed as a float": ({"dropout_p": 0.1, "dropout_seed": jnp.float32(1)}, r"dropout_seed .* got float32 \[\]"),
    "seed as words": ({"dropout_p": 0.1, "dropout_seed": ids(2)}, r"dropout_seed .* got int32 \[2\]"),
    "kernel": ({"kernel": "flash"}, "unknown kernel 'flash'; known: auto, triton, cudnn, pallas, xla"),
    "transport": ({"transport": "rdma"}, "unknown transport 'rdma'; known: auto, xla"),
    "strategy": ({"strategy": "rdma"}, "unknown strategy name 'rdma'; known: auto, ring"),
    "axis": ({"axis_name": "cp"}, "axis_name 'cp' is not a mesh axis here; call this inside"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    replaced, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        ring_attention(**arrays(**replaced))


@pytest.mark.parametrize(
    "name",
    ["causal", "window", "chunk_size", "softmax_scale", "softcap", "dropout_p", "deterministic", "return_lse"],
)  # fmt: skip
def test_traced_values_where_static_ones_are_needed(name: str) -> None:
    @jax.jit
    def call(x: jax.Array) -> Any:
        return ring_attention(**arrays(**{name: (x, x) if name == "window" else x}))

    with pytest.raises(ValueError, match=f"{name} must be known when the call is traced"):
        call(jnp.int32(1))


def test_gradient_of_slopes_is_refused() -> None:
    def loss(slopes: jax.Array) -> Any:
        return ring_attention(**arrays(alibi_slopes=slopes)).sum()

    loss(jnp.ones(4))
    with pytest.raises(ValueError, match="alibi_slopes have no gradient"):
        jax.grad(loss)(jnp.ones(4))
    others = jax.grad(lambda q: ring_attention(**arrays(q=q, alibi_slopes=jnp.ones(4))).sum())
    assert others(jnp.zeros(Q)).shape == Q


def test_auto_names_all_reasons_when_nothing_fits() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"no kernel can do this call. triton: needs .* xla: has no choice of fused",
    ):
        ring_attention(**arrays(kernel=KernelConfig(fused_backward=True)))


def test_context_parallel() -> None:
    mesh = jax.make_mesh(
        (2, 2), ("cp", "dp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    with pytest.raises(ValueError, match="unknown layout 'ring'"):
        ContextParallel(mesh, "cp", layout="ring")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="unknown axis_name 'sp'; known: cp, dp"):
        ContextParallel(mesh, "sp")
    with pytest.raises(ValueError, match="must be three axes"):
        ContextParallel(mesh, "cp", batch_axis="cp")
    cp = ContextParallel(mesh, "cp", batch_axis="dp", head_axis=None)
    with pytest.raises(ValueError, match="pad to 8"):
        cp.shard(jnp.zeros((1, 7, 2)), dim=1)
    good = jnp.zeros((2, 8, 4, 16))
    with pytest.raises(
        ValueError, match=r"the batch of k, 1, must be a multiple of the 2 devices along 'dp'"
    ):
        cp.attention(good, jnp.zeros((1, 8, 4, 16)), good)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        cp.attention(good[0], good, good)
    with pytest.raises(ValueError, match=r"k must be a jax\.Array, got NoneType"):
        cp.attention(good, None, good)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(ValueError, match=r"sequence length 6 .* pad to 8"):
        cp.attention(good, jnp.zeros((2, 6, 4, 16)), good)


SMALL, WIDE, TOP = 9, (5 << 32) + 9, (1 << 63) + 5
INTEGERS = (
    np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
)  # fmt: skip
WITH_X64 = {"x64": True, "x32": False}


def _words(seed: Any) -> int:
    low, high = np.asarray(seed_words(seed)).tolist()
    return int(low + (high << 32))


@pytest.mark.parametrize("x64", WITH_X64.values(), ids=WITH_X64)
@pytest.mark.parametrize("seed", [SMALL, WIDE, TOP])
@pytest.mark.parametrize("kind", [int, *INTEGERS], ids=lambda kind: str(kind.__name__))
def test_integers_of_the_host(kind: Any, seed: int, *, x64: bool) -> None:
    if kind is not int and seed > np.iinfo(kind).max:
        seed = int(np.iinfo(kind).max)
    with jax.enable_x64() if x64 else nullcontext():
        assert _words(kind(seed)) == seed
        assert _words(np.array(seed, kind if kind is not int else np.uint64)) == seed


@pytest.mark.parametrize("x64", WITH_X64.values(), ids=WITH_X64)
def test_arrays_of_jax(*, x64: bool) -> None:
    with jax.enable_x64() if x64 else nullcontext():
        seeds = [jnp.uint32(SMALL), jnp.int32(SMALL)]
        seeds += [jnp.int64(WIDE), jnp.uint64(TOP)] if x64 else []
        for seed in seeds:
            assert _words(seed) == int(seed)
            traced = jax.jit(seed_words)(seed).tolist()
            assert traced[0] + (traced[1] << 32) == int(seed)


@pytest.mark.parametrize("x64", WITH_X64.values(), ids=WITH_X64)
@pytest.mark.parametrize(
    "seed", [-1, 1 << 64, np.int8(-1), np.int64(-1), np.array(-5), np.bool_(1), True, jnp.int32(-1),
        jax.random.key(0)],
    ids=repr,
)  # fmt: skip
def test_what_is_no_seed(seed: Any, *, x64: bool) -> None:
    x = jnp.ones((1, 4, 2, 8))
    with (
        jax.enable_x64() if x64 else nullcontext(),
        pytest.raises(ValueError, match=r"dropout_seed must be an integer in \[0, 2\*\*64\)"),
    ):
        ring_attention(x, x, x, axis_name=None, dropout_p=0.5, dropout_seed=seed)


MESH = jax.make_mesh((2,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
CP = ContextParallel(MESH, "cp", layout="contiguous")
EIGHT, SIX = (jax.random.normal(jax.random.key(n), (1, n, 2, 4)) for n in (8, 6))
FEWER_KEYS = r"q has \d tokens but k \d: .*x\.transpose\(1, 2\).*mask=Mask\(causal=True\)"


def in_shard_map(call: Callable[..., Any]) -> Callable[..., Any]:
    spec = PartitionSpec(None, "cp")
    return jax.shard_map(call, mesh=MESH, in_specs=spec, out_specs=spec)


def sharded(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return in_shard_map(partial(ring_attention, axis_name="cp", **options))(q, k, v)


OURS: dict[str, Callable[..., Any]] = {
    "one device": partial(ring_attention, axis_name=None), "shard_map": sharded,
    "ContextParallel": CP.attention, "explain": CP.explain,
}  # fmt: skip


@pytest.mark.parametrize("call", OURS.values(), ids=OURS)
def test_causal_with_fewer_keys_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=FEWER_KEYS):
        call(EIGHT, SIX, SIX, causal=True)
    with pytest.raises(ValueError, match=FEWER_KEYS):
        jax.jit(partial(call, causal=True, mask=jnp.ones((4 if call is sharded else 8, 6), bool)))(
            EIGHT, SIX, SIX
        )


def expected(causal_queries: Any = EIGHT) -> Any:
    return reference.attention(
        *map(np.asarray, (causal_queries, SIX, SIX)), mask=Mask(causal=True)
    )[0]


@pytest.mark.parametrize(
    "call", [OURS["one device"], sharded, CP.attention], ids=["one", "shard_map", "cp"]
)
def test_a_causal_mask_with_fewer_keys_keeps_the_rule(call: Callable[..., Any]) -> None:
    np.testing.assert_allclose(call(EIGHT, SIX, SIX, mask=Mask(causal=True)), expected(), atol=2e-6)


OPERATION = compat.RingAttn(compat.OperationMetadata(sequence_axis_name="cp", mesh=MESH))
COMPAT: dict[str, Callable[..., Any]] = {
    "flash_attention": partial(compat.flash_attention, causal=True),
    "ring_attention": in_shard_map(partial(compat.ring_attention, axis_name="cp", causal=True)),
    "RingAttn": lambda *x: OPERATION(*x).attention_outputs,
}  # fmt: skip


@pytest.mark.parametrize("call", COMPAT.values(), ids=COMPAT)
def test_calls_of_other_libraries_keep_their_meaning(call: Callable[..., Any]) -> None:
    np.testing.assert_allclose(call(EIGHT, SIX, SIX), expected(), atol=2e-6)


def test_an_adapter_takes_the_mask() -> None:
    """The adapter for ``jax.nn`` runs with the mask that its error says to bind."""
    attend = nn.make_dot_product_attention(CP.attention)
    with pytest.raises(ValueError, match=r"bind mask=ring_core\.Mask\(causal=True\)"):
        attend(EIGHT, SIX, SIX, is_causal=True)
    bound = nn.make_dot_product_attention(partial(CP.attention, mask=Mask(causal=True)))
    np.testing.assert_allclose(bound(EIGHT, SIX, SIX), expected(), atol=2e-6)


ALONE = ContextParallel(jax.make_mesh((1,), ("cp",)), "cp")
WITH_OPTIONS: dict[str, Callable[..., Any]] = {
    "ring_attention": partial(ring_attention, axis_name=None), "attention": ALONE.attention, "explain": ALONE.explain,
}  # fmt: skip
ZEROS = jnp.zeros((1, 8, 2, 4))


@pytest.mark.parametrize("call", WITH_OPTIONS.values(), ids=WITH_OPTIONS)
@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_options_of_other_libraries_are_refused_by_their_names_here(
    name: str, call: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=rf"no option is called {name}\. Instead: for {name}, "):
        call(ZEROS, ZEROS, ZEROS, **{name: None})


def test_foreign_options_bound_to_an_adapter_are_refused() -> None:
    with pytest.raises(ValueError, match="for is_causal, use causal"):
        flax.make_attention_fn(partial(ALONE.attention, is_causal=True))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (ALONE.attention, "attention"), (ALONE.explain, "explain"), (ALONE.check_agreement, "check_agreement"),
        (WITH_OPTIONS["ring_attention"], "__call__"),
    ],
)  # fmt: skip
def test_a_misspelt_option_is_named_with_the_function_that_was_called(
    call: Callable[..., Any], name: str
) -> None:
    """Methods pass options on to a record, whose own error would name it."""
    said = rf"^{name}\(\) got an unexpected keyword argument 'sofcap'. Did you mean 'softcap'\?"
    with pytest.raises(TypeError, match=said):
        call(ZEROS, ZEROS, ZEROS, sofcap=1.0)
    with pytest.raises(TypeError, match=rf"^{name}\(\) .* argument 'xyz'$"):
        call(ZEROS, ZEROS, ZEROS, softcap=1.0, xyz=2)


TOKENS = 8
RANDOM = jax.random.normal(jax.random.key(0), (1, TOKENS, 1, 4))
IDS: Any = np.array([[0] * 4 + [1] * 3 + [7]])
attention = partial(ring_attention, axis_name=None)
in_flax = flax.make_attention_fn(attention)

WITH_IDS: dict[str, Callable[[Any], Any]] = {
    "ring_attention": lambda ids: attention(RANDOM, RANDOM, RANDOM, segment_ids=ids),
    "a pair": lambda ids: attention(RANDOM, RANDOM, RANDOM, segment_ids=(ids, IDS.astype(np.int32))),
    "Segments": lambda ids: in_flax(RANDOM, RANDOM, RANDOM, mask=Segments(ids)),
    "Segments of keys": lambda ids: in_flax(RANDOM, RANDOM, RANDOM, mask=Segments(IDS.astype(np.int32), ids)),
    "compat": lambda ids: compat.ring_attention(RANDOM, RANDOM, RANDOM, q_segment_ids=ids),
    "compat, keys": lambda ids: compat.flash_attention(
        RANDOM, RANDOM, RANDOM, q_segment_ids=IDS.astype(np.int32), kv_segment_ids=ids
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
@pytest.mark.parametrize("call", WITH_IDS)
def test_ids_that_int32_does_not_hold(call: str, dtype: str) -> None:
    ids = IDS.astype(dtype)
    with pytest.raises(ValueError, match=rf"must be int32, or integers that it holds, got {dtype}"):
        WITH_IDS[call](ids)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16"])
@pytest.mark.parametrize("call", WITH_IDS)
def test_ids_that_it_holds(call: str, dtype: str) -> None:
    right = attention(RANDOM, RANDOM, RANDOM, segment_ids=jnp.asarray(IDS, jnp.int32))
    for array in (IDS.astype(dtype), jnp.asarray(IDS, dtype)):
        np.testing.assert_allclose(WITH_IDS[call](array), right, atol=1e-6)


def test_ids_of_64_bits_that_are_traced() -> None:
    with jax.enable_x64(True):
        ids = jnp.asarray(IDS, jnp.int64)
        with pytest.raises(ValueError, match="got int64"):
            jax.jit(WITH_IDS["Segments"])(ids)


@pytest.mark.parametrize("length", [2**31 + 3, 2**40])
def test_lengths_beyond_int32_hide_nothing(length: int) -> None:
    offsets: Any = np.array([0, length])
    outs = [
        nn.make_dot_product_attention(attention)(
            RANDOM, RANDOM, RANDOM, key_value_seq_lengths=offsets[1:]
        ),
        compat.flash_attention(
            RANDOM, RANDOM, RANDOM, cum_seqlens_q=offsets, cum_seqlens_k=offsets
        ),
    ]
    for out in outs:
        np.testing.assert_allclose(out, attention(RANDOM, RANDOM, RANDOM), atol=1e-6)
