"""Flax, Equinox, ``jax.nn`` and MaxText on the ring: their own functions, and the oracle."""

from __future__ import annotations

import io
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

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
    H,
    Honoured,
    Refused,
    Row,
    Same,
    T,
    check_row,
    compiled,
    dense,
    parameters,
    program,
)
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from jax_meshes import close, context, in_ring, mesh_of, random
from refused import refused

import ring_jax.equinox
from ring_core import KernelConfig, LayoutSpec, Mask, UnsupportedError
from ring_jax import ContextParallel, Segments, ring_attention
from ring_jax.flax import make_attention_fn
from ring_jax.maxtext import with_ring
from ring_jax.nn import make_dot_product_attention


def seed_of(key: jax.Array) -> int:
    low, high = np.asarray(jax.random.bits(key, (2,), jnp.uint32)).tolist()
    return int(low + (high << 32))


#: A mask of Flax's own functions, in floats.
MADE: Any = linen.combine_masks(
    linen.make_causal_mask(jnp.asarray(SHOWN)), linen.make_attention_mask(jnp.asarray(SHOWN), jnp.asarray(SHOWN))
)  # fmt: skip
DROPPING = {"dropout_rng": KEY, "dropout_rate": 0.25, "broadcast_dropout": False}
DROPPED = {"dropout_p": 0.25, "dropout_seed": seed_of(KEY)}
FLAX: dict[str, Row] = {
    "bias": Honoured({"bias": BIAS[0]}, {"bias": BIAS}),
    "mask": Honoured({"mask": MADE}, {"bias": np.where(MADE, 0, -np.inf)}),
    "broadcast_dropout": Refused(DROPPING | {"broadcast_dropout": True}, "pass False"),
    "dropout_rng": Honoured(DROPPING, DROPPED),
    "dropout_rate": Same(DROPPING | {"dropout_rate": 0.0}, {}),
    "deterministic": Same(DROPPING | {"deterministic": True}, {}),
    "dtype": Same({"dtype": jnp.float32}, {}),
    "precision": Refused({"precision": "high"}, "cast the inputs to bfloat16"),
    "module": Refused({"module": object()}, "sow_weights"),
    "promote_dtype": Same({"promote_dtype": nnx.nn.dtypes.promote_dtype}, {}),
    "is_causal": Same({"is_causal": True}, {"causal": True}),
    "force_fp32_for_softmax": Same({"force_fp32_for_softmax": True}, {}),
    "einsum_dot_general": Refused({"einsum_dot_general": jax.lax.dot_general}, "quantise"),
    "qk_attn_weights_einsum": Refused({"qk_attn_weights_einsum": jnp.einsum}, "quantise"),
    "attn_weights_value_einsum": Refused({"attn_weights_value_einsum": jnp.einsum}, "quantise"),
    "input_positions": Refused({"input_positions": jnp.arange(T)}, "positions"),
}


@pytest.mark.parametrize("name", FLAX)
def test_every_argument_of_flax_is_honoured_or_refused(name: str) -> None:
    check_row(make_attention_fn(ONE), name, FLAX[name])


@pytest.mark.parametrize("flax", [nnx, linen], ids=["nnx", "linen"])
def test_the_table_holds_every_argument_of_flax(flax: Any) -> None:
    """All of Flax's arguments are named: Linen drops those that ``attention_fn`` does not name."""
    expected, actual = map(parameters, (flax.dot_product_attention, make_attention_fn(ONE)))
    assert actual.keys() == {"query", "key", "value"} | FLAX.keys()
    shared = list(expected)[: list(expected).index("module") + 1]
    assert list(actual)[: len(shared)] == shared
    for name in expected.keys() - {"promote_dtype"}:  # its default promotes dtypes as ours does
        assert actual[name][1] == expected[name][1], name


def test_dtypes_of_flax() -> None:
    q, k, v = QKV
    attend = make_attention_fn(ONE)
    mixed = jax.eval_shape(attend, q, k.astype(jnp.bfloat16), v)
    assert mixed.dtype == jnp.float32
    assert jax.eval_shape(partial(attend, dtype=jnp.bfloat16), q, k, v).dtype == jnp.bfloat16


def test_flax_on_two_devices() -> None:
    cp = context()
    attend = make_attention_fn(cp.attention)

    def call(q: Any, k: Any, v: Any, ids: Any, shown: Any, bias: Any, key: Any) -> Any:
        dropping = DROPPING | {"dropout_rng": key}
        packed = attend(q, k, v, bias, Segments(ids), is_causal=True, **dropping)
        return packed, attend(q, k, v, mask=shown[:, None, None])

    arrays = [cp.shard(jnp.asarray(x)) for x in (*QKV, IDS, SHOWN)]
    packed, padded = jax.jit(call)(*arrays, cp.shard(BIAS, dim=2), KEY)
    close(cp.unshard(packed), dense(**DROPPED, segment_ids=IDS, bias=BIAS, causal=True))
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


@pytest.mark.parametrize("make", [make_attention_fn, make_dot_product_attention])
def test_only_attentions_of_this_package(make: Any) -> None:
    refused("attention must be", make, jax.nn.dot_product_attention)
    refused("axis_name=", make, ring_attention)
    refused("bound by name", make, partial(ONE, QKV[0]))
    refused("no option windows; known: .*window", make, partial(ONE, windows=(1, 0)))
    refused("return_lse must not", make, partial(ONE, return_lse=True))


LENGTHS = jnp.array([11, 16], jnp.int32)
JAX_NN: dict[str, dict[str, Any]] = {
    "bias": {"bias": BIAS},
    "mask": {"mask": jnp.asarray(SHOWN)[:, None, None]},
    "query_seq_lengths": {"query_seq_lengths": LENGTHS},
    "key_value_seq_lengths": {"key_value_seq_lengths": LENGTHS},
    "local_window_size": {"local_window_size": (5, 1)},
    **{
        f"mask of {shape}": {"mask": jnp.asarray((np.asarray(random(*shape, seed=6)) < 0) | np.eye(T, dtype=bool)), "is_causal": True}
        for shape in ((T, T), (H, T, T), (1, 1, T, T), (B, 1, T, T), (B, H, T, T))
    },
    "both masks": {"mask": jnp.asarray(SHOWN)[:, None, None], "key_value_seq_lengths": LENGTHS - 3},
}  # fmt: skip


OPTIONS_OF_JAX_NN: list[Same] = [
    Same({"scale": 0.7}, {"softmax_scale": 0.7}),
    Same({"is_causal": True}, {"causal": True}),
    Same({"local_window_size": 3}, {"window": (3, 3)}),
    Same({"local_window_size": np.int64(3)}, {"window": (3, 3)}),
    Same({"implementation": None}, {}),
    Same({"implementation": "xla"}, {"kernel": "xla"}),
    Same({"implementation": KernelConfig("xla", block_q=4)}, {"kernel": KernelConfig("xla", 4)}),
]


@pytest.mark.parametrize("name", JAX_NN)
def test_arguments_of_jax_nn(name: str) -> None:
    arguments = JAX_NN[name]
    expected = compiled(jax.nn.dot_product_attention, **arguments)
    close(compiled(make_dot_product_attention(ONE), **arguments), expected)
    assert np.abs(expected - dense()).max() > 1e-3


@pytest.mark.parametrize("row", OPTIONS_OF_JAX_NN)
def test_options_by_another_name(row: Same) -> None:
    check_row(make_dot_product_attention(ONE), "", row)


def test_the_table_holds_every_argument_of_jax_nn() -> None:
    ours = parameters(make_dot_product_attention(ONE))
    assert ours == parameters(jax.nn.dot_product_attention)
    elsewhere = {
        "query", "key", "value", "scale", "is_causal", "implementation", "return_residual"
    }  # fmt: skip
    assert ours.keys() <= elsewhere | JAX_NN.keys()


def test_jax_nn_without_a_batch_and_with_a_residual() -> None:
    q, k, v = (x[0] for x in QKV)
    attend = partial(make_dot_product_attention(ONE), return_residual=True)
    theirs = partial(jax.nn.dot_product_attention, return_residual=True)
    actual, expected = (jax.jit(function)(q, k, v, BIAS[0]) for function in (attend, theirs))
    assert [x.shape for x in actual] == [x.shape for x in expected]
    close(actual, expected)
    narrow = [x.astype(jnp.bfloat16) for x in QKV]
    assert jax.eval_shape(attend, *narrow) == jax.eval_shape(theirs, *narrow)


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


def test_equinox_inside_shard_map() -> None:
    x, module = random(T, 12, seed=5), module_of(dropout_p=0.3)
    cp = context()
    local = partial(ring_attention, axis_name="cp", layout="zigzag", causal=True)

    def call(attention: Any, x: Any, ids: Any, places: Any, **options: Any) -> Any:
        def moved(q: Any, k: Any, v: Any) -> Any:
            return q + places[:, None, None], k, v

        ring: Any = ring_jax.equinox.convert(module, attention)
        return ring(x, x, x, Segments(ids), process_heads=moved, **options)

    ring = in_ring(partial(call, local, key=KEY), in_specs=P("cp"), out_specs=P("cp"))
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


def test_models_that_cannot_be_converted() -> None:
    convert = ring_jax.equinox.convert
    refused("there is no equinox.nn.MultiheadAttention", convert, [jnp.ones(3)], ONE)
    other = object.__new__(Peculiar)
    refused("^Peculiar is a subclass", convert, [other], ONE, error=UnsupportedError)
    refused("attention must be", convert, [module_of()], jax.nn.dot_product_attention)


WRITTEN = SHOWN[:, None, None]
#: Options bound to the attention, wrong arguments of the call, and what the error says.
OF_FLAX: list[tuple[dict[str, Any], dict[str, Any], str, type[ValueError]]] = [
    ({}, {"is_causal": True, "query": QKV[0][:, :4]}, "^is_causal: with 4 queries and 16 keys", UnsupportedError),
    ({"window": (3, 0)}, {"query": QKV[0][:, :1], "mask": WRITTEN}, "^window: 1 queries meet 16 keys", UnsupportedError),
    # One query with a cache is allowed: test_batches_of_flax.
    ({"causal": True}, {"query": QKV[0][:, :2], "mask": WRITTEN}, "^causal: 2 queries meet 16 keys", UnsupportedError),
    ({"segment_ids": IDS}, {"mask": Segments(jnp.asarray(IDS))}, "segment_ids: bound", ValueError),
    ({"dropout_p": 0.1, "dropout_seed": 1}, DROPPING, "dropout_p, dropout_seed: bound", ValueError),
    ({"mask": Mask()}, {"is_causal": True}, "together with causal", ValueError),
    ({}, {"mask": WRITTEN[..., :4]}, "column for each of 16 keys", ValueError),
    ({}, {"mask": np.ones((3, 1, 1, T))}, "does not fit a batch", ValueError),
    ({}, {"mask": CAUSAL[:, 1:]}, r"^mask must have shape \[16, 16\] or", ValueError),
    ({}, {"mask": Segments(jnp.ones((B, T)))}, "Segments must be integers", ValueError),
    ({}, {"mask": Segments(jnp.asarray(IDS[:1]))}, "segment_ids of the queries must have", ValueError),
    ({}, {"dropout_rate": 0.5, "broadcast_dropout": False}, "needs dropout_rng", ValueError),
    ({}, {"key": QKV[1][0]}, "share batch dimensions", ValueError),
    ({}, dict.fromkeys(("query", "key", "value"), QKV[1][0, 0]), r"be \[batch\.\.\., sequence, heads", ValueError),
    ({}, {"is_causal": 1}, "is_causal must be True or False", ValueError),
]  # fmt: skip
OF_JAX_NN: list[tuple[dict[str, Any], dict[str, Any], str, type[ValueError]]] = [
    ({}, {"mask": CAUSAL[:4]}, "^mask must have shape", ValueError),
    ({}, {"query": QKV[0][:, :4], "is_causal": True, "local_window_size": 2}, "^is_causal, local_window_size: with 4", UnsupportedError),
    ({}, {"mask": WRITTEN * 1}, "mask must be boolean", ValueError),
    ({}, {"query_seq_lengths": LENGTHS[:1]}, r"query_seq_lengths must be integers \[2\]", ValueError),
    ({}, {"mask": Segments(jnp.asarray(IDS)), "query_seq_lengths": LENGTHS}, "both say what is hidden", ValueError),
    ({}, {"query": QKV[0][0]}, "all without batch", ValueError),
    ({}, {"local_window_size": -1}, "window", ValueError),
    ({}, {"implementation": "cudnn"}, "^kernel 'cudnn': needs ring-jax-gpu", UnsupportedError),
    ({"kernel": "xla"}, {"implementation": "auto"}, "kernel: bound", ValueError),
]  # fmt: skip
OF_EQUINOX: list[tuple[dict[str, Any], dict[str, Any], str, type[ValueError]]] = [
    ({}, {"mask": CAUSAL[:, 1:], "inference": True}, "^mask must have shape", ValueError),
    ({}, {"deterministic": True}, "^deterministic: pass inference=True", UnsupportedError),
    ({}, {}, "dropout of 0.5 needs key", ValueError),
    ({}, {"process_heads": lambda q, k, v: (q[:1], k, v)}, "must not change", ValueError),
]  # fmt: skip


def converted(attention: Any) -> Any:
    """Return a call of a module of Equinox with dropout, on inputs of its own."""
    module = ring_jax.equinox.convert(module_of(dropout_p=0.5), attention)
    return lambda *_, **arguments: module(*[random(T, 12)] * 3, **arguments)


@pytest.mark.parametrize(
    ("make", "bound", "arguments", "message", "kind"),
    [
        *((make_attention_fn, *row) for row in OF_FLAX),
        *((make_dot_product_attention, *row) for row in OF_JAX_NN),
        *((converted, *row) for row in OF_EQUINOX),
    ],
)
def test_wrong_calls_are_refused(
    make: Any, bound: Any, arguments: dict[str, Any], message: str, kind: type[ValueError]
) -> None:
    call = dict(zip(("query", "key", "value"), QKV, strict=True)) | arguments
    inputs = [call.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(ValueError, match=message) as caught:
        make(partial(ONE, **bound))(*inputs, **call)
    assert type(caught.value) is kind


def member(value: str) -> SimpleNamespace:
    """Return a stand-in for a member of one of MaxText's enumerations."""
    return SimpleNamespace(value=value)


SCALE = 8**-0.5  # MaxText scales its queries itself
CONFIG: dict[str, Any] = {
    "context_sharding": "context", "context_parallel_load_balance": True,
    "context_parallel_reorder_strategy": member("auto"), "context_parallel_strategy": "all_gather",
    "hardware": "cpu", "packing": False, "moba": False, "enable_dropout": True,
}  # fmt: skip


class Operation(SimpleNamespace):
    """Stand-in for MaxText's ``AttentionOp``; ``nox -s maxtext`` trains with the real one."""

    def _logical_to_mesh_axes(self, names: tuple[str, ...]) -> tuple[str | None, ...]:
        axes = {"batch": "data", "heads": None, "length": "context", "kv": None}
        return tuple(axes[name] for name in names)


def operation(kind: str = "global", **settings: Any) -> Operation:
    own = {name: settings.pop(name) for name in list(settings) if name not in CONFIG}
    arguments: dict[str, Any] = {
        "attention_kernel": "ring", "mesh": mesh_of(data=2, context=2), "attention_type": member(kind),
        "kv_quant": None, "sliding_window_size": None, "chunk_attn_window_size": None,
        "attn_logits_soft_cap": 0.0, "dropout_rate": 0.0,
        "flash_axis_names_q": ("batch", "heads", "length", "kv"),
        "config": SimpleNamespace(**(CONFIG | settings)),
    }  # fmt: skip
    return Operation(**(arguments | own))


def theirs(
    self: Any, query: Any, key: Any, value: Any, decoder_segment_ids: Any, segment_positions: Any,
    lengths: Any, model_mode: Any, **others: Any,
) -> Any:  # fmt: skip
    """Stand-in for MaxText's own attention: return its arguments."""
    arguments = dict(locals())
    return arguments.pop("self"), arguments.pop("others") | arguments


APPLY = with_ring(theirs)


def call(op: Operation, q: Any, k: Any, v: Any, ids: Any = None, **options: Any) -> Any:
    einsums = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
    mode = options.pop("model_mode", "train")
    return APPLY(op, q * SCALE, k, v, ids, None, None, mode, **einsums, **options)


SINKS, IDS_OF_KEYS = random(H, seed=7), jnp.roll(jnp.asarray(IDS), 4, axis=1)
WINDOW: dict[str, Any] = {"kind": "local_sliding", "sliding_window_size": 5}
#: MaxText's settings and arguments, options of ours, and the layout of its input pipeline.
HONOURED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], LayoutSpec]] = {
    "global": ({"kind": "global"}, {}, {"causal": True}, "zigzag"),
    "mla": ({"kind": "mla"}, {}, {"causal": True}, "zigzag"),
    "full": ({"kind": "full"}, {}, {}, "contiguous"),
    "window": (WINDOW, {}, {"causal": True, "window": (4, 0)}, "zigzag"),
    "chunk": ({"kind": "chunk", "chunk_attn_window_size": 6}, {}, {"causal": True, "chunk_size": 6}, "zigzag"),
    "softcap and sinks": ({"attn_logits_soft_cap": 2.0}, {"sinks": SINKS}, {"causal": True, "softcap": 2.0, "sinks": SINKS}, "zigzag"),
    "ids of keys": ({"kind": "full"}, {"decoder_segment_ids_kv": IDS_OF_KEYS}, {"segment_ids": (jnp.asarray(IDS), IDS_OF_KEYS)}, "contiguous"),
    "natural order": ({"context_parallel_load_balance": False}, {}, {"causal": True}, "contiguous"),
    "striped": ({"context_parallel_reorder_strategy": member("striped")}, {}, {"causal": True}, "striped"),
    "striped by itself": (
        {"hardware": "gpu", "packing": True, "context_parallel_strategy": "ring"}, {}, {"causal": True}, "striped",
    ),
    "dropout that is off": ({"dropout_rate": 0.1, "enable_dropout": False}, {}, {"causal": True}, "zigzag"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_what_maxtext_says_is_honoured(name: str) -> None:
    settings, arguments, options, layout = HONOURED[name]
    op, ids = operation(**settings), jnp.asarray(IDS)
    attend = ContextParallel(op.mesh, "context", "data", layout=layout).attention
    call_of_ours: Any = partial(attend, **{"segment_ids": ids, "softmax_scale": 1.0} | options)
    expected = program(lambda q, k, v: call_of_ours(q * SCALE, k, v))
    assert program(lambda q, k, v: call(op, q, k, v, ids, **arguments)[0]) == expected


def test_maxtexts_order_on_a_mesh() -> None:
    op = operation(**WINDOW)
    cp = ContextParallel(op.mesh, "context", "data")

    def whole(*arrays: Any) -> Any:
        out, *rest = call(op, *map(cp.shard, (*arrays, jnp.asarray(IDS))))
        assert rest == [None, None]
        return cp.unshard(out)

    close(compiled(whole), dense(segment_ids=IDS, causal=True, window=(4, 0)))


def test_another_attention_is_maxtexts() -> None:
    op, names = operation(attention_kernel="flash"), signature(APPLY, follow_wrapped=False)
    arguments = {name: object() for name in names.parameters if name != "self"}
    assert len(arguments) == 19
    assert APPLY(op, **arguments) == (op, arguments)


@pytest.mark.parametrize(
    ("settings", "options", "name"),
    [
        ({"kind": "compressed"}, {}, "attention_type"),
        ({"kind": "block_diffusion"}, {}, "attention_type"),
        ({"moba": True}, {}, "moba"),
        ({"kv_quant": object()}, {}, "kv_quant"),
        ({"dropout_rate": 0.1}, {}, "dropout_rate"),
        ({"context_parallel_strategy": "usp"}, {}, "context_parallel_strategy"),
        ({"context_parallel_strategy": "ulysses"}, {}, "context_parallel_strategy"),
        ({}, {"model_mode": "prefill"}, "model_mode"),
        ({}, {"previous_chunk": QKV[1]}, "previous_chunk"),
        ({}, {"bidirectional_mask": IDS > 0}, "bidirectional_mask"),
        ({}, {"indexer_mask": IDS > 0}, "indexer_mask"),
        ({}, {"compressed_mask": IDS > 0}, "compressed_mask"),
        ({}, {"record_max_logits": True}, "record_max_logits"),
        ({}, {"q": QKV[0][:, :8]}, "causal"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    settings: dict[str, Any], options: dict[str, Any], name: str
) -> None:
    arguments = dict(zip("qkv", QKV, strict=True)) | options
    refused(f"^{name}: ", call, operation(**settings), **arguments, error=UnsupportedError)
