"""Compat functions: every argument changes the result as the oracle's does, or raises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from ring_core import KernelConfig, UnsupportedError, reference
from ring_jax import compat
from ring_jax.compat import OperationMetadata, RingAttn, flash_attention, ring_attention

B, T, H, K, D = 2, 16, 4, 2, 8
PACKED = np.repeat([[0, 1, 2, -1], [5, 5, 7, 9]], 4, axis=1).astype(np.int32)
BLOCKS = {"q_blocksize": 4, "kv_blocksize": 8}


def random(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


QKV = [random(B, T, heads, D, seed=seed) for seed, heads in enumerate((H, K, K))]
SINKS, BIAS = random(H, 3, seed=3), random(1, H, T, T, seed=4)
SHOWN = random(B, 1, T, T, seed=5) > 0


class Honoured(NamedTuple):
    """Supported arguments and the oracle's names for them; ``None`` if they change nothing."""

    arguments: dict[str, Any]
    oracle: dict[str, Any] | None


class Refused(NamedTuple):
    """Refused arguments, a word of advice that the error must contain, and their name in it."""

    arguments: dict[str, Any]
    advice: str
    name: str | None = None  # if it differs from the argument's


def alone(name: str, value: Any, **oracle: Any) -> tuple[str, Honoured]:
    return name, Honoured({name: value}, oracle or None)


def no(name: str, value: Any, advice: str) -> tuple[str, Refused]:
    return name, Refused({name: value}, advice)


SHARED: dict[str, Honoured | Refused] = dict([
    alone("q_segment_ids", PACKED, segment_ids=PACKED),
    alone("kv_segment_ids", PACKED, segment_ids=PACKED),
    alone("softmax_aux", SINKS, sinks=SINKS),
    alone("bias", BIAS, bias=BIAS),
    alone("sliding_window", (3, 1), window=(3, 1)),
    alone("causal", True, causal=True),
    alone("logits_soft_cap", 0.5, softcap=0.5),
    alone("softmax_scale", 0.9, softmax_scale=0.9),
    alone("fwd_params", BLOCKS),
    alone("bwd_params", SimpleNamespace(block_q=8, block_k=4, num_warps=None)),
    no("mask_info", object(), "q_segment_ids"),
    ("platform", Refused({"platform": "triton"}, "ring-jax-gpu", "kernel 'triton'")),
    no("cfg", object(), "fwd_params"),
    no("mesh", object(), "ContextParallel"),
    no("in_specs", (), "ContextParallel"),
    no("out_specs", P(), "ContextParallel"),
])  # fmt: skip
RING = SHARED | dict([
    alone("chunk_size", 5, chunk_size=5),
    no("mask_builder", lambda *_: None, "ring_core.Mask"),
    no("fused_backward", True, "no choice of fused_backward"),
    no("q_position_ids", PACKED, "layout="),
    no("kv_position_ids", PACKED, "layout="),
])  # fmt: skip
DROPPED = {"dropout_p": 0.3, "dropout_seed": 5}
DROPOUT = Honoured({"dropout_prob": 0.3, "dropout_seed": 5}, DROPPED)
LENGTHS = np.array([0, 16, 25], np.int32)
ROWS = np.where(np.arange(T) < np.diff(LENGTHS)[:, None], 0, -1).astype(np.int32)
ROW_LENGTHS = Honoured(
    {"cum_seqlens_q": LENGTHS, "cum_seqlens_k": LENGTHS, "causal": True},
    {"segment_ids": ROWS, "causal": True},
)
FLASH = SHARED | dict([
    alone("attention_mask", SHOWN, bias=np.where(SHOWN, 0, -np.inf)),
    ("dropout_prob", DROPOUT),
    ("dropout_seed", DROPOUT),
    ("cum_seqlens_q", ROW_LENGTHS),
    ("cum_seqlens_k", ROW_LENGTHS),
    no("normalize_output", False, "return_lse"),
    no("precision", lax.Precision.HIGH, "cast the inputs to bfloat16"),
    no("logits_dtype", jnp.bfloat16, "scores are float32"),
    no("block_tables", PACKED, "gather"),
])  # fmt: skip
OPERATION = {name: SHARED[name] for name in (
    "q_segment_ids", "kv_segment_ids", "softmax_aux", "bias", "sliding_window", "logits_soft_cap",
    "softmax_scale", "mask_info",
)} | {name: RING[name] for name in ("chunk_size", "fused_backward")} | dict([
    alone("causal", False, causal=False),
])  # fmt: skip


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def operation(*args: Any, **arguments: Any) -> jax.Array:
    """Return the operation on one device as a function."""
    return RingAttn(OperationMetadata())(*args, **arguments).attention_outputs


def mesh_of(size: int) -> Mesh:
    return jax.make_mesh((size,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:size])


def split(call: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Run a call on the shards of two devices; array arguments are split, except sinks."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    others = {name: x for name, x in arguments.items() if name not in arrays}
    specs = {
        name: P() if name == "softmax_aux" else P(*[None] * (x.ndim // 2), "sp")
        for name, x in arrays.items()
    }

    def local(args: Any, arrays: dict[str, Any]) -> Any:
        return call(*args, axis_name="sp", **arrays, **others)

    tokens = P(None, "sp")
    ring = jax.shard_map(local, mesh=mesh_of(2), in_specs=(tokens, specs), out_specs=tokens)
    return jax.jit(ring)([jnp.asarray(x) for x in args], jax.tree.map(jnp.asarray, arrays))


def dense(**options: Any) -> np.ndarray[Any, Any]:
    return reference.attention(*QKV, **options)[0]


def jax_qkv() -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = map(jnp.asarray, QKV)
    return q, k, v


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-12, atol=1e-12)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    by_name = dict(inspect.signature(function).parameters)
    return {
        name: by_name[name] for name in by_name if name not in ("self", "query", "key", "value")
    }


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Honoured | Refused], dict[str, Any]]] = {
    "ring": (ring_attention, RING, {}),
    "ring of two": (partial(split, ring_attention), RING, {}),
    "flash": (flash_attention, FLASH, {}),
    "operation": (operation, OPERATION, {"causal": True}),
}
EVERY = [(call, name) for call, (_, table, _) in CALLS.items() for name in table]


@pytest.mark.nightly(
    only=[
        f"ring of two-{name}"
        for name in (
            "fwd_params", "chunk_size", "sliding_window", "softmax_scale", "q_segment_ids",
            "logits_soft_cap",
        )
    ]
)  # fmt: skip
@pytest.mark.parametrize(("call", "name"), EVERY, ids=[f"{call}-{name}" for call, name in EVERY])
def test_every_argument_is_honoured_or_refused(call: str, name: str) -> None:
    function, table, defaults = CALLS[call]
    row = table[name]
    if isinstance(row, Refused):
        with pytest.raises(UnsupportedError, match=row.name or name) as caught:
            function(*QKV, **row.arguments)
        assert row.advice in str(caught.value)
        return
    arguments = {key: _jax(function, x) for key, x in row.arguments.items()}
    expected = dense(**(defaults | (row.oracle or {})))
    close(function(*jax_qkv(), **arguments), expected)
    if row.oracle is not None:
        assert np.abs(expected - dense(**defaults)).max() > 1e-3
    else:
        program, default = (
            str(jax.make_jaxpr(partial(function, **kwargs))(*QKV)) for kwargs in (arguments, {})
        )
        assert program != default


def _jax(function: Callable[..., Any], x: Any) -> Any:
    arrives = isinstance(x, np.ndarray) and not isinstance(function, partial)
    return jnp.asarray(x) if arrives else x


def test_the_tables_hold_every_argument() -> None:
    own = {"axis_name"}  # which the ring of two passes
    assert parameters(ring_attention).keys() == RING.keys() | own
    assert parameters(flash_attention).keys() == FLASH.keys()
    assert parameters(RingAttn.__call__).keys() == OPERATION.keys()
    for function in (ring_attention, flash_attention, RingAttn.__call__):
        kinds = {parameter.kind for parameter in parameters(function).values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_names_order_and_defaults_are_those_of_ejkernel() -> None:
    names = [
        "q_segment_ids", "kv_segment_ids", "softmax_aux", "bias", "mask_builder", "sliding_window",
        "chunk_size", "causal", "logits_soft_cap", "softmax_scale", "axis_name", "fwd_params",
        "bwd_params", "fused_backward",
    ]  # fmt: skip
    assert list(parameters(ring_attention))[: len(names)] == names
    assert parameters(ring_attention)["causal"].default is False
    assert parameters(RingAttn.__call__)["causal"].default is True


def test_an_integer_window_is_symmetric_and_causal_cuts_it() -> None:
    q, k, v = jax_qkv()
    close(ring_attention(q, k, v, sliding_window=2), dense(window=(2, 2)))
    both = split(ring_attention, q, k, v, sliding_window=2, causal=True)
    close(both, dense(window=(2, 0)))


def test_packed_documents_of_one_row() -> None:
    q, k, v = (jnp.asarray(x[:1]) for x in QKV)
    offsets = jnp.array([0, 3, 9, 14])  # two tokens of padding
    ids = np.repeat([[0, 1, 2, -1]], [3, 6, 5, 2], axis=1)
    call = jax.jit(partial(flash_attention, causal=True))
    expected = reference.attention(q, k, v, segment_ids=ids, causal=True)[0]
    eager = flash_attention(q, k, v, causal=True, cum_seqlens_q=offsets, cum_seqlens_k=offsets)
    close(eager, expected)
    with pytest.raises(UnsupportedError, match="cum_seqlens_k: with causal"):
        call(q, k, v, cum_seqlens_q=offsets, cum_seqlens_k=offsets)  # traced: are they equal?
    full = jax.jit(flash_attention)(q, k, v, cum_seqlens_q=offsets, cum_seqlens_k=offsets)
    close(full, reference.attention(q, k, v, segment_ids=ids)[0])


def test_mask_and_bias_add_up() -> None:
    q, k, v, mask, bias = map(jnp.asarray, (*QKV, SHOWN.astype(np.int32), BIAS))
    actual = flash_attention(q, k, v, attention_mask=mask, bias=bias)
    close(actual, dense(bias=np.where(SHOWN, BIAS, -np.inf)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"softmax_aux": np.zeros(3)}, r"softmax_aux must be \[4, n\].*reshape\(1, -1\)"),
        ({"fwd_params": BLOCKS, "bwd_params": {"q_blocksize": 8}}, "bwd_params: its block_q"),
        ({"fwd_params": {"num_warps": 4}}, "fwd_params: kernels of this package have no num_warps"),
        ({"mask_builder": len, "cfg": 1}, "mask_builder: .*; cfg: "),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ring_attention(*jax_qkv(), **arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (ring_attention, {"sliding_window": -1}, "sliding_window must be"),
        (ring_attention, {"sliding_window": (1, 2, 3)}, "sliding_window must be"),
        (ring_attention, {"q_segment_ids": np.zeros((B, T))}, "q_segment_ids must be integers"),
        (ring_attention, {"fwd_params": 3}, "fwd_params must have fields"),
        (ring_attention, {"fwd_params": {"block_q": 1, "q_blocksize": 2}}, "several sizes for block_q"),
        (flash_attention, {"cum_seqlens_q": LENGTHS}, "cum_seqlens_k must be given too"),
        (flash_attention, {"cum_seqlens_q": PACKED[0], "cum_seqlens_k": PACKED[0]}, "shape"),
        (flash_attention, {"attention_mask": PACKED}, "attention_mask must be"),
        (flash_attention, {"dropout_prob": 0.5}, "needs dropout_seed"),
    ],
)  # fmt: skip
def test_malformed_arguments(
    function: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        function(*jax_qkv(), **arguments)
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("strategy", ["auto", "balanced"])
def test_operation_on_global_arrays(strategy: str) -> None:
    metadata = OperationMetadata(
        mesh=mesh_of(2), sequence_axis_name="sp", strategy=strategy, softmax_scale=0.7,
        blocksize_q=4, blocksize_k=4,
    )  # fmt: skip
    attend = jax.jit(RingAttn(metadata))
    result = attend(*jax_qkv(), q_segment_ids=jnp.asarray(PACKED))
    assert isinstance(result, compat.AttentionOutput)
    assert result.attention_weights is None
    expected = dense(causal=True, softmax_scale=0.7, segment_ids=PACKED)
    close(result.attention_outputs, expected)


def test_operation_inside_shard_map() -> None:
    def call(*args: Any, axis_name: str, **arguments: Any) -> jax.Array:
        ring = RingAttn(OperationMetadata(sequence_axis_name=axis_name))
        return ring(*args, **arguments).attention_outputs

    close(split(call, *QKV, softmax_aux=SINKS), dense(causal=True, sinks=SINKS))


def test_operation_reads_its_metadata() -> None:
    config = SimpleNamespace(fwd_params=BLOCKS, bwd_params=None, platform="auto")
    ring = RingAttn(OperationMetadata(jnp.float32, operation_configs={"ring": config}))
    assert ring._kernel == KernelConfig("auto", 4, 8)
    assert ring(*jax_qkv()).attention_outputs.dtype == jnp.float32
    assert ring.get_impl_name() == "ring"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh": "mesh"}, "mesh needs sequence_axis_name"),
        ({"batch_axis_name": "dp"}, "give mesh too"),
        ({"runtime_softmax_dtype": "bfloat16"}, "runtime_softmax_dtype: "),
        ({"operation_configs": {"ring": {}}, "blocksize_q": 4}, "both say how large blocks are"),
    ],
)
def test_metadata_is_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RingAttn(OperationMetadata(**fields))
    with pytest.raises(ValueError, match="metadata must be a"):
        RingAttn(SimpleNamespace(**fields))  # type: ignore[arg-type]  # wrong on purpose
