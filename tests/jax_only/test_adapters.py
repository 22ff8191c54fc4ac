"""Flax, Equinox and ``jax.nn`` on the ring agree with their own functions and with the oracle."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import (
    BIAS,
    CAUSAL,
    HIDDEN,
    IDS,
    KEY,
    ONE,
    QKV,
    SHOWN,
    B,
    D,
    H,
    K,
    T,
    all_close,
    close,
    compiled,
    context,
    dense,
    parameters,
    program,
    random,
)
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import ring_jax.equinox
from ring_core import KernelConfig, Mask, StrategyConfig, UnsupportedError
from ring_jax import Segments, ring_attention
from ring_jax.flax import make_attention_fn
from ring_jax.nn import make_dot_product_attention


@pytest.mark.parametrize("flax", [nnx, linen], ids=["nnx", "linen"])
def test_signature_of_flax(flax: Any) -> None:
    """The ``attention_fn`` has all of Flax's arguments: Linen drops those that it does not name."""
    expected = parameters(flax.dot_product_attention)
    actual = parameters(make_attention_fn(ONE))
    assert expected.keys() <= actual.keys()
    shared = list(expected)[: list(expected).index("module") + 1]
    assert list(actual)[: len(shared)] == shared
    for name in expected.keys() - {"promote_dtype"}:  # its default promotes dtypes as ours does
        assert actual[name][1] == expected[name][1], name


def test_one_module_imports_a_framework() -> None:
    folder = Path(ring_jax.__file__).parent
    imports = re.compile(r"^\s*(?:from|import) (?:flax|equinox|ring_jax\.equinox)\b", re.MULTILINE)
    importing = [path.name for path in folder.rglob("*.py") if imports.search(path.read_text())]
    assert importing == ["equinox.py"]


def nnx_loss(attention_fn: Callable[..., Any], x: jax.Array, weight: jax.Array) -> Any:
    """Return the loss and gradient of an NNX module with grouped heads."""
    layer = nnx.MultiHeadAttention(
        H, 12, H * D, num_kv_heads=K, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
    )

    @nnx.jit
    @nnx.value_and_grad
    def loss(layer: nnx.MultiHeadAttention) -> jax.Array:
        return jnp.sum(layer(x, is_causal=True) * weight)

    return loss(layer)


#: Strategies, which are bound like any option, each with a number of devices.
BOUND: dict[str, tuple[int, str | StrategyConfig]] = {
    "auto": (2, "auto"),
    "ulysses": (2, "ulysses"),
    "hybrid": (4, StrategyConfig("hybrid", ulysses_size=2)),
}


@pytest.mark.nightly(only=["ulysses"])
@pytest.mark.parametrize("name", BOUND)
def test_nnx(name: str) -> None:
    x, weight = random(B, T, 12, seed=5), random(B, T, 12, seed=6)
    expected = nnx_loss(nnx.dot_product_attention, x, weight)
    size, strategy = BOUND[name]
    cp = context(size)
    attend = make_attention_fn(partial(cp.attention, strategy=strategy))
    all_close(nnx_loss(attend, cp.shard(x), cp.shard(weight)), expected)


@pytest.mark.nightly(
    unless=["auto-global arrays"]
)  # per change docs/jax-adapters.md runs the other
@pytest.mark.parametrize("where", ["global arrays", "shard_map"])
@pytest.mark.parametrize("name", BOUND)
def test_linen(name: str, where: str) -> None:
    x, weight = random(B, T, 12, seed=5), random(B, T, 12, seed=6)
    module = partial(linen.MultiHeadDotProductAttention, num_heads=H, qkv_features=H * D)
    params = module().init(jax.random.key(0), x)
    size, strategy = BOUND[name]
    cp = context(size)
    local = partial(ring_attention, axis_name="cp", layout="zigzag")
    attention = local if where == "shard_map" else cp.attention
    bound = partial(attention, causal=True, strategy=strategy)
    ring = module(attention_fn=make_attention_fn(bound))

    def forward(params: Any, x: jax.Array) -> Any:
        if where == "global arrays":
            return ring.apply(params, x)
        tokens = P(None, "cp")
        return jax.shard_map(
            ring.apply, mesh=cp.mesh, in_specs=(P(), tokens), out_specs=tokens
        )(params, x)  # fmt: skip

    def loss(params: Any) -> Any:
        return jnp.sum(forward(params, cp.shard(x)) * cp.shard(weight))

    def single(params: Any) -> Any:
        out: Any = module().apply(params, x, mask=CAUSAL[None, None])
        return jnp.sum(out * weight)

    actual, expected = (
        jax.jit(jax.value_and_grad(function))(params) for function in (loss, single)
    )
    all_close(actual, expected)


class Honoured(NamedTuple):
    """Supported arguments, the oracle's names for them, and options that give the same program."""

    arguments: dict[str, Any]
    oracle: dict[str, Any]
    translated: bool = True


class Refused(NamedTuple):
    """Refused arguments, and a word of advice that the error must contain."""

    arguments: dict[str, Any]
    advice: str


def seed_of(key: jax.Array) -> int:
    low, high = np.asarray(jax.random.bits(key, (2,), jnp.uint32)).tolist()
    return int(low + (high << 32))


DROPPING = {"dropout_rng": KEY, "dropout_rate": 0.25, "broadcast_dropout": False}
DROPPED = Honoured(DROPPING, {"dropout_p": 0.25, "dropout_seed": seed_of(KEY)}, translated=False)
FLAX: dict[str, Honoured | Refused] = {
    "bias": Honoured({"bias": BIAS[0]}, {"bias": BIAS}, translated=False),
    "mask": Honoured({"mask": SHOWN[:, None, None]}, HIDDEN, translated=False),
    "broadcast_dropout": Refused(DROPPING | {"broadcast_dropout": True}, "pass False"),
    "dropout_rng": DROPPED,
    "dropout_rate": Honoured(DROPPING | {"dropout_rate": 0.0}, {}),
    "deterministic": Honoured(DROPPING | {"deterministic": True}, {}),
    "dtype": Honoured({"dtype": jnp.float32}, {}),
    "precision": Refused({"precision": "high"}, "cast the inputs to bfloat16"),
    "module": Refused({"module": object()}, "sow_weights"),
    "promote_dtype": Honoured({"promote_dtype": nnx.nn.dtypes.promote_dtype}, {}),
    "is_causal": Honoured({"is_causal": True}, {"causal": True}),
    "force_fp32_for_softmax": Honoured({"force_fp32_for_softmax": True}, {}),
    "einsum_dot_general": Refused({"einsum_dot_general": jax.lax.dot_general}, "quantise"),
    "qk_attn_weights_einsum": Refused({"qk_attn_weights_einsum": jnp.einsum}, "quantise"),
    "attn_weights_value_einsum": Refused({"attn_weights_value_einsum": jnp.einsum}, "quantise"),
    "input_positions": Refused({"input_positions": jnp.arange(T)}, "positions"),
}


@pytest.mark.parametrize("name", FLAX)
def test_every_argument_of_flax_is_honoured_or_refused(name: str) -> None:
    attend, row = make_attention_fn(ONE), FLAX[name]
    if isinstance(row, Refused):
        with pytest.raises(UnsupportedError, match=f"^{name}: ") as caught:
            attend(*QKV, **row.arguments)
        assert row.advice in str(caught.value)
        return
    if row.translated:
        assert program(attend, **row.arguments) == program(ONE, **row.oracle)
        return
    expected = dense(**row.oracle)
    close(compiled(attend, **row.arguments), expected)
    assert np.abs(expected - dense()).max() > 1e-3


def test_the_table_holds_every_argument_of_flax() -> None:
    assert parameters(make_attention_fn(ONE)).keys() == {"query", "key", "value"} | FLAX.keys()


def test_dtypes_of_flax() -> None:
    q, k, v = QKV
    attend = make_attention_fn(ONE)
    mixed = jax.eval_shape(attend, q, k.astype(jnp.bfloat16), v)
    assert mixed.dtype == jnp.float32
    assert jax.eval_shape(partial(attend, dtype=jnp.bfloat16), q, k, v).dtype == jnp.bfloat16


@pytest.mark.nightly(only=["shard_map"])  # per change the tests of jax.nn run it
@pytest.mark.parametrize("where", ["global arrays", "shard_map"])
def test_flax_on_two_devices(where: str) -> None:
    cp = context()
    local = partial(ring_attention, axis_name="cp", layout="zigzag")
    attend = make_attention_fn(cp.attention if where == "global arrays" else local)
    tokens, rows = P(None, "cp"), P(None, None, "cp")

    def call(q: Any, k: Any, v: Any, ids: Any, shown: Any, bias: Any, key: Any) -> Any:
        dropping = DROPPING | {"dropout_rng": key}
        packed = attend(q, k, v, bias, Segments(ids), is_causal=True, **dropping)
        return packed, attend(q, k, v, mask=shown[:, None, None])

    if where == "shard_map":
        specs = (*(tokens,) * 5, rows, P())
        call = jax.shard_map(call, mesh=cp.mesh, in_specs=specs, out_specs=(tokens, tokens))
    arrays = [cp.shard(jnp.asarray(x)) for x in (*QKV, IDS, SHOWN)]
    packed, padded = jax.jit(call)(*arrays, cp.shard(BIAS, dim=2), KEY)
    arguments_of_call = DROPPED.oracle | {"segment_ids": IDS, "bias": BIAS, "causal": True}
    close(cp.unshard(packed), dense(**arguments_of_call))
    close(cp.unshard(padded), dense(**HIDDEN))


def test_batches_of_flax() -> None:
    attend = make_attention_fn(partial(ONE, causal=True))
    ids, bias = Segments(jnp.asarray(IDS)[None]), random(B, 1, T, T, seed=8)
    written = jnp.asarray(SHOWN)[:, None, None]

    def calls(q: Any, k: Any, v: Any) -> Any:
        two = [x[None] for x in (q, k, v)]
        packed, biased = attend(*two, mask=ids)[0], attend(*two, bias=bias)[0]
        return attend(q[0], k[0], v[0]), packed, biased, attend(q[:, :1], k, v, mask=written)

    alone, packed, biased, last = compiled(calls)
    close(alone, dense(causal=True)[0])
    close(packed, dense(causal=True, segment_ids=IDS))
    close(biased, dense(causal=True, bias=bias))
    close(last, dense(**HIDDEN)[:, :1])


def test_a_rule_may_be_the_mask() -> None:
    rule = Mask(predicate=lambda i, j: (i + j) % 3 != 1)
    assert program(make_attention_fn(ONE), mask=rule) == program(ONE, mask=rule)


@pytest.mark.parametrize(
    ("bound", "arguments", "message"),
    [
        ({}, {"is_causal": True, "query": QKV[0][:, :4]}, "^is_causal: with 4 queries and 16 keys"),
        (
            {"window": (3, 0)},
            {"query": QKV[0][:, :1], "mask": SHOWN[:, None, None]},
            "^window: 1 queries meet 16 keys",
        ),
        (  # one query with a cache is allowed: test_batches_of_flax
            {"causal": True},
            {"query": QKV[0][:, :2], "mask": SHOWN[:, None, None]},
            "^causal: 2 queries meet 16 keys",
        ),
    ],
)
def test_refusals_of_flax(bound: Any, arguments: dict[str, Any], message: str) -> None:
    arguments_of_call = dict(zip(("query", "key", "value"), QKV, strict=True)) | arguments
    with pytest.raises(UnsupportedError, match=message):
        make_attention_fn(partial(ONE, **bound))(**arguments_of_call)


@pytest.mark.parametrize(
    ("bound", "arguments", "message"),
    [
        ({"segment_ids": IDS}, {"mask": Segments(jnp.asarray(IDS))}, "segment_ids: bound"),
        ({"dropout_p": 0.1, "dropout_seed": 1}, DROPPING, "dropout_p, dropout_seed: bound"),
        ({"mask": Mask()}, {"is_causal": True}, "together with causal"),
        ({}, {"mask": SHOWN[:, None, None, :4]}, "column for each of 16 keys"),
        ({}, {"mask": np.ones((3, 1, 1, T))}, "does not fit a batch"),
        ({}, {"mask": CAUSAL[:, 1:]}, r"^mask must have shape \[16, 16\] or"),
        ({}, {"mask": Segments(jnp.ones((B, T)))}, "Segments must be integers"),
        ({}, {"mask": Segments(jnp.asarray(IDS[:1]))}, "segment_ids of the queries must have"),
        ({}, {"dropout_rate": 0.5, "broadcast_dropout": False}, "needs dropout_rng"),
        ({}, {"key": QKV[1][0]}, "share batch dimensions"),
        (
            {},
            dict.fromkeys(("query", "key", "value"), QKV[1][0, 0]),
            r"be \[batch\.\.\., sequence, heads",
        ),
        ({}, {"is_causal": 1}, "is_causal must be True or False"),
    ],
)
def test_malformed_calls_of_flax(bound: Any, arguments: dict[str, Any], message: str) -> None:
    arguments_of_call = dict(zip(("query", "key", "value"), QKV, strict=True)) | arguments
    with pytest.raises(ValueError, match=message) as caught:
        make_attention_fn(partial(ONE, **bound))(**arguments_of_call)
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("make", [make_attention_fn, make_dot_product_attention])
@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (jax.nn.dot_product_attention, "attention must be"),
        (ring_attention, "axis_name="),
        (partial(ONE, QKV[0]), "bound by name"),
        (partial(ONE, windows=(1, 0)), "no option windows; known: .*window"),
        (partial(ONE, return_lse=True), "return_lse must not"),
    ],
)
def test_only_attentions_of_this_package(make: Any, attention: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(attention)


def test_signature_of_jax_nn() -> None:
    ours = make_dot_product_attention(ONE)
    assert parameters(ours) == parameters(jax.nn.dot_product_attention)


LENGTHS = jnp.array([11, 16], jnp.int32)
JAX_NN: dict[str, dict[str, Any]] = {
    "bias": {"bias": BIAS},
    "mask": {"mask": jnp.asarray(SHOWN)[:, None, None]},
    "query_seq_lengths": {"query_seq_lengths": LENGTHS},
    "key_value_seq_lengths": {"key_value_seq_lengths": LENGTHS},
    "local_window_size": {"local_window_size": (5, 1)},
    "both masks": {"mask": jnp.asarray(SHOWN)[:, None, None], "key_value_seq_lengths": LENGTHS - 3},
}


@pytest.mark.parametrize("name", JAX_NN)
def test_arguments_of_jax_nn(name: str) -> None:
    arguments = JAX_NN[name]
    expected = compiled(jax.nn.dot_product_attention, **arguments)
    close(compiled(make_dot_product_attention(ONE), **arguments), expected)
    assert np.abs(expected - dense()).max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"scale": 0.7}, {"softmax_scale": 0.7}),
        ({"is_causal": True}, {"causal": True}),
        ({"local_window_size": 3}, {"window": (3, 3)}),
        ({"implementation": None}, {}),
        ({"implementation": "xla"}, {"kernel": "xla"}),
        ({"implementation": KernelConfig("xla", block_q=4)}, {"kernel": KernelConfig("xla", 4)}),
    ],
)
def test_options_by_another_name(arguments: dict[str, Any], options: dict[str, Any]) -> None:
    assert program(make_dot_product_attention(ONE), **arguments) == program(ONE, **options)


def test_the_table_holds_every_argument_of_jax_nn() -> None:
    elsewhere = {
        "query", "key", "value", "scale", "is_causal", "implementation", "return_residual"
    }  # fmt: skip
    assert parameters(make_dot_product_attention(ONE)).keys() <= elsewhere | JAX_NN.keys()


def test_jax_nn_without_a_batch_and_with_a_residual() -> None:
    q, k, v = (x[0] for x in QKV)
    attend = partial(make_dot_product_attention(ONE), return_residual=True)
    theirs = partial(jax.nn.dot_product_attention, return_residual=True)
    actual, expected = (jax.jit(function)(q, k, v, BIAS[0]) for function in (attend, theirs))
    assert [x.shape for x in actual] == [x.shape for x in expected]
    all_close(actual, expected)
    narrow = [x.astype(jnp.bfloat16) for x in QKV]
    assert jax.eval_shape(attend, *narrow) == jax.eval_shape(theirs, *narrow)


def test_implementation_names_kernels() -> None:
    with pytest.raises(UnsupportedError, match=r"^kernel 'cudnn': needs ring-jax-gpu"):
        make_dot_product_attention(ONE)(*QKV, implementation="cudnn")
    with pytest.raises(ValueError, match="kernel: bound"):
        make_dot_product_attention(partial(ONE, kernel="xla"))(*QKV, implementation="auto")


@pytest.mark.parametrize(
    ("arguments", "message", "kind"),
    [
        ({"mask": CAUSAL[:4]}, "^mask must have shape", ValueError),
        (
            {"query": QKV[0][:, :4], "is_causal": True, "local_window_size": 2},
            "^is_causal, local_window_size: with 4",
            UnsupportedError,
        ),
        ({"mask": SHOWN[:, None, None] * 1}, "mask must be boolean", ValueError),
        ({"query_seq_lengths": LENGTHS[:1]}, r"query_seq_lengths must be integers \[2\]", ValueError),
        (
            {"mask": Segments(jnp.asarray(IDS)), "query_seq_lengths": LENGTHS},
            "both say what is hidden",
            ValueError,
        ),
        ({"query": QKV[0][0]}, "all without batch", ValueError),
        ({"local_window_size": -1}, "window", ValueError),
    ],
)  # fmt: skip
def test_wrong_calls_of_jax_nn(
    arguments: dict[str, Any], message: str, kind: type[ValueError]
) -> None:
    arguments_of_call = dict(zip(("query", "key", "value"), QKV, strict=True)) | arguments
    with pytest.raises(kind, match=message) as caught:
        make_dot_product_attention(ONE)(**arguments_of_call)
    assert type(caught.value) is kind


@pytest.mark.parametrize("method", ["__init__", "__call__"])
def test_signature_of_equinox(method: str) -> None:
    modules = (ring_jax.equinox.MultiheadAttention, eqx.nn.MultiheadAttention)
    ours, theirs = (parameters(getattr(module, method)) for module in modules)
    assert ours.pop("attention", None) is not None or method == "__call__"
    assert ours == theirs


def module_of(dropout_p: float = 0.0) -> eqx.nn.MultiheadAttention:
    return eqx.nn.MultiheadAttention(
        H, 12, output_size=7, qk_size=6, vo_size=5, use_query_bias=True, dropout_p=dropout_p,
        key=jax.random.key(1),
    )  # fmt: skip


def equinox_loss(model: Any, x: jax.Array, weight: jax.Array, mask: Any = None) -> Any:
    """Return the loss and gradient of a model that contains an attention module."""

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model: Any) -> Any:
        out = jax.vmap(lambda row: model["attention"](row, row, row, mask))(x)
        return jnp.sum(out * weight)

    return loss(model)


@cache
def equinox_expected() -> Any:
    x, weight = random(B, T, 12, seed=5), random(B, T, 7, seed=6)
    return equinox_loss({"attention": module_of(), "name": "one"}, x, weight, CAUSAL)


@pytest.mark.nightly(unless=["zigzag-auto"])
@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_equinox(layout: str, name: str) -> None:
    model: dict[str, Any] = {"attention": module_of(), "name": "one"}
    x, weight = random(B, T, 12, seed=5), random(B, T, 7, seed=6)
    size, strategy = BOUND[name]
    cp = context(size, layout)
    bound = partial(cp.attention, causal=True, strategy=strategy)
    ring = ring_jax.equinox.convert(model, bound)
    assert isinstance(ring["attention"], ring_jax.equinox.MultiheadAttention)
    assert ring["attention"].query_proj is model["attention"].query_proj
    all_close(equinox_loss(ring, cp.shard(x), cp.shard(weight)), equinox_expected())


def test_equinox_inside_shard_map() -> None:
    x, module = random(T, 12, seed=5), module_of(dropout_p=0.3)
    cp = context()
    local = partial(ring_attention, axis_name="cp", layout="zigzag", causal=True)

    def call(attention: Any, x: Any, ids: Any, places: Any, **options: Any) -> Any:
        def moved(q: Any, k: Any, v: Any) -> Any:
            return q + places[:, None, None], k, v

        converted: Any = ring_jax.equinox.convert(module, attention)
        return converted(x, x, x, Segments(ids), process_heads=moved, **options)

    tokens = P("cp")
    ring = jax.shard_map(
        partial(call, local, key=KEY), mesh=cp.mesh, in_specs=(tokens,) * 3, out_specs=tokens
    )
    inputs = [x, jnp.asarray(IDS[0]), jnp.linspace(0, 1, T)]
    single = partial(call, partial(ONE, causal=True))
    expected, nothing = (
        jax.jit(partial(single, **options))(*inputs) for options in ({"key": KEY}, {"inference": True})
    )  # fmt: skip
    actual = jax.jit(ring)(*(cp.shard(x, dim=0) for x in inputs))
    close(cp.unshard(actual, dim=0), expected)
    assert np.abs(expected - nothing).max() > 1e-2
    theirs = jax.jit(lambda x: module(
        x, x, x, CAUSAL & (IDS[0][:, None] == IDS[0]), inference=True,
        process_heads=lambda q, k, v: (q + inputs[2][:, None, None], k, v),
    ))(x)  # fmt: skip
    close(nothing[:12], theirs[:12])


def test_parameters_of_equinox() -> None:
    attention = partial(ONE, causal=True)
    new = ring_jax.equinox.MultiheadAttention(H, 12, attention=attention, key=jax.random.key(0))
    old = eqx.nn.MultiheadAttention(H, 12, key=jax.random.key(0))
    assert eqx.tree_equal(new, ring_jax.equinox.convert(old, attention))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, old)
    file.seek(0)
    blank = ring_jax.equinox.MultiheadAttention(H, 12, attention=attention, key=jax.random.key(7))
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, blank), new)


class Peculiar(eqx.nn.MultiheadAttention):
    """Subclass that may have changed anything."""


@pytest.mark.parametrize(
    ("model", "message", "kind"),
    [
        ([jnp.ones(3)], "there is no equinox.nn.MultiheadAttention", ValueError),
        ([object.__new__(Peculiar)], "^Peculiar is a subclass", UnsupportedError),
    ],
)
def test_models_that_cannot_be_converted(model: Any, message: str, kind: type[ValueError]) -> None:
    with pytest.raises(kind, match=message):
        ring_jax.equinox.convert(model, ONE)
    with pytest.raises(ValueError, match="attention must be"):
        ring_jax.equinox.convert([module_of()], jax.nn.dot_product_attention)


@pytest.mark.parametrize(
    ("arguments", "message", "kind"),
    [
        ({"mask": CAUSAL[:, 1:], "inference": True}, "^mask must have shape", ValueError),
        ({"deterministic": True}, "^deterministic: pass inference=True", UnsupportedError),
        ({}, "dropout of 0.5 needs key", ValueError),
        ({"process_heads": lambda q, k, v: (q[:1], k, v)}, "must not change", ValueError),
    ],
)
def test_wrong_calls_of_equinox(
    arguments: dict[str, Any], message: str, kind: type[ValueError]
) -> None:
    module, x = ring_jax.equinox.convert(module_of(dropout_p=0.5), ONE), random(T, 12)
    with pytest.raises(kind, match=message):
        module(x, x, x, **arguments)
