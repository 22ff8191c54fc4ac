"""Compat functions: every argument changes the result as the oracle's does, or raises."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import (
    BIAS,
    IDS,
    QKV,
    B,
    D,
    H,
    Honoured,
    K,
    Refused,
    Row,
    T,
    check_row,
    dense,
    parameters,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_meshes import check_passes, close, context, in_ring, random
from refused import refused

from ring_core import KernelConfig, Mask, UnsupportedError, reference
from ring_jax import compat
from ring_jax.compat import OperationMetadata, RingAttn, flash_attention, ring_attention

BLOCKS = {"q_blocksize": 4, "kv_blocksize": 8}
SINKS = np.asarray(random(H, 3, seed=3))
SHOWN = np.asarray(random(B, 1, T, T, seed=5)) > 0


def alone(name: str, value: Any, **oracle: Any) -> tuple[str, Honoured]:
    return name, Honoured({name: value}, oracle or None)


def no(name: str, value: Any, advice: str) -> tuple[str, Refused]:
    return name, Refused({name: value}, advice)


SHARED: dict[str, Row] = dict([
    alone("q_segment_ids", IDS, segment_ids=IDS),
    alone("kv_segment_ids", IDS, segment_ids=IDS),
    alone("softmax_aux", SINKS, sinks=SINKS),
    alone("bias", np.asarray(BIAS), bias=BIAS),
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
    no("q_position_ids", IDS, "layout="),
    no("kv_position_ids", IDS, "layout="),
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
    no("block_tables", IDS, "gather"),
])  # fmt: skip
OPERATION = {name: SHARED[name] for name in (
    "q_segment_ids", "kv_segment_ids", "softmax_aux", "bias", "sliding_window", "logits_soft_cap",
    "softmax_scale", "mask_info",
)} | {name: RING[name] for name in ("chunk_size", "fused_backward")} | dict([
    alone("causal", False, causal=False),
])  # fmt: skip


def operation(*args: Any, **arguments: Any) -> jax.Array:
    """Return the operation on one device as a function."""
    return RingAttn(OperationMetadata())(*args, **arguments).attention_outputs


def split(call: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Run a call on the shards of two devices; array arguments are split, except sinks."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    others = {name: x for name, x in arguments.items() if name not in arrays}
    specs = {
        name: P() if name == "softmax_aux" else P(*[None] * (x.ndim // 2), "cp")
        for name, x in arrays.items()
    }

    def local(args: Any, arrays: dict[str, Any]) -> Any:
        return call(*args, axis_name="cp", **arrays, **others)

    return jax.jit(in_ring(local, in_specs=(P(None, "cp"), specs)))(args, arrays)


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Row], dict[str, Any]]] = {
    "ring": (ring_attention, RING, {}),
    "ring of two": (partial(split, ring_attention), RING, {}),
    "flash": (flash_attention, FLASH, {}),
    "operation": (operation, OPERATION, {"causal": True}),
}
EVERY = [(call, name) for call, (_, table, _) in CALLS.items() for name in table]


@pytest.mark.nightly(only=[f"ring of two-{name}" for name in (
    "fwd_params", "chunk_size", "sliding_window", "softmax_scale", "q_segment_ids",
    "logits_soft_cap",
)])  # fmt: skip
@pytest.mark.parametrize(("call", "name"), EVERY, ids=[f"{call}-{name}" for call, name in EVERY])
def test_every_argument_is_honoured_or_refused(call: str, name: str) -> None:
    function, table, defaults = CALLS[call]
    check_row(function, name, table[name], **defaults)


def test_the_tables_hold_every_argument() -> None:
    inputs = {"query", "key", "value"}
    tables: dict[Callable[..., Any], Any] = {
        ring_attention: RING.keys() | {"axis_name"},
        flash_attention: FLASH.keys(),
    }
    tables[RingAttn(OperationMetadata()).__call__] = OPERATION.keys()
    for function, names in tables.items():
        held = parameters(function)
        assert held.keys() == names | inputs
        assert inspect.Parameter.VAR_KEYWORD not in {kind for kind, _ in held.values()}


def test_an_integer_window_is_symmetric_and_causal_cuts_it() -> None:
    close(ring_attention(*QKV, sliding_window=2), dense(window=(2, 2)))
    both = split(ring_attention, *QKV, sliding_window=2, causal=True)
    close(both, dense(window=(2, 0)))


def test_packed_documents_whose_offsets_are_traced() -> None:
    q, k, v = (x[:1] for x in QKV)
    ids = np.repeat([[0, 1, 2, -1]], [3, 6, 5, 2], axis=1)
    offsets = jnp.array([0, 3, 9, 14])  # two tokens of padding
    traced = {"cum_seqlens_q": offsets, "cum_seqlens_k": offsets}  # are they equal?
    call = jax.jit(partial(flash_attention, causal=True))
    refused("cum_seqlens_k: with causal", call, q, k, v, **traced, error=UnsupportedError)
    full = jax.jit(flash_attention)(q, k, v, **traced)
    close(full, reference.attention(*map(np.asarray, (q, k, v)), segment_ids=ids)[0])


def test_mask_and_bias_add_up() -> None:
    actual = flash_attention(*QKV, attention_mask=jnp.asarray(SHOWN.astype(np.int32)), bias=BIAS)
    close(actual, dense(bias=np.where(SHOWN, BIAS, -np.inf)))


WRONG: list[tuple[Callable[..., Any], dict[str, Any], str, type[ValueError]]] = [
    (ring_attention, {"sliding_window": -1}, "sliding_window must be", ValueError),
    (ring_attention, {"sliding_window": (1, 2, 3)}, "sliding_window must be", ValueError),
    (ring_attention, {"q_segment_ids": np.zeros((B, T))}, "q_segment_ids must be integers", ValueError),
    (ring_attention, {"fwd_params": 3}, "fwd_params must have fields", ValueError),
    (ring_attention, {"fwd_params": {"block_q": 1, "q_blocksize": 2}}, "several sizes for block_q", ValueError),
    (flash_attention, {"cum_seqlens_q": LENGTHS}, "cum_seqlens_k must be given too", ValueError),
    (flash_attention, {"cum_seqlens_q": IDS[0], "cum_seqlens_k": IDS[0]}, "shape", ValueError),
    (flash_attention, {"attention_mask": IDS}, "attention_mask must be", ValueError),
    (flash_attention, {"dropout_prob": 0.5}, "needs dropout_seed", ValueError),
    (ring_attention, {"softmax_aux": np.zeros(3)}, r"softmax_aux must be \[4, n\].*reshape\(1, -1\)", UnsupportedError),
    (ring_attention, {"fwd_params": BLOCKS, "bwd_params": {"q_blocksize": 8}}, "bwd_params: its block_q", UnsupportedError),
    (ring_attention, {"fwd_params": {"num_warps": 4}}, "fwd_params: kernels of this package have no num_warps", UnsupportedError),
    (ring_attention, {"mask_builder": len, "cfg": 1}, "mask_builder: .*; cfg: ", UnsupportedError),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "message", "kind"), WRONG)
def test_refusals_name_the_argument(
    function: Callable[..., Any], arguments: dict[str, Any], message: str, kind: type[ValueError]
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        function(*QKV, **arguments)
    assert type(caught.value) is kind


@pytest.mark.parametrize("strategy", ["auto", "balanced"])
def test_operation_on_global_arrays(strategy: str) -> None:
    metadata = OperationMetadata(
        mesh=context().mesh, sequence_axis_name="cp", strategy=strategy, softmax_scale=0.7,
        blocksize_q=4, blocksize_k=4,
    )  # fmt: skip
    result = jax.jit(RingAttn(metadata))(*QKV, q_segment_ids=jnp.asarray(IDS))
    assert isinstance(result, compat.AttentionOutput)
    assert result.attention_weights is None
    close(result.attention_outputs, dense(causal=True, softmax_scale=0.7, segment_ids=IDS))


def test_operation_inside_shard_map() -> None:
    def call(*args: Any, axis_name: str, **arguments: Any) -> jax.Array:
        ring = RingAttn(OperationMetadata(sequence_axis_name=axis_name))
        return ring(*args, **arguments).attention_outputs

    close(split(call, *QKV, softmax_aux=SINKS), dense(causal=True, sinks=SINKS))


def test_operation_reads_its_metadata() -> None:
    config = SimpleNamespace(fwd_params=BLOCKS, bwd_params=None, platform="auto")
    ring = RingAttn(OperationMetadata(jnp.bfloat16, operation_configs={"ring": config}))
    assert ring._kernel == KernelConfig("auto", 4, 8)
    q, k, v = QKV
    assert ring(q, k, v).attention_outputs.dtype == jnp.bfloat16
    assert ring.get_impl_name() == "ring"


def test_metadata_is_checked() -> None:
    def operator(**fields: Any) -> RingAttn:
        return RingAttn(OperationMetadata(**fields))

    refused("mesh needs sequence_axis_name", operator, mesh="mesh")
    refused("give mesh too", operator, batch_axis_name="dp")
    refused("runtime_softmax_dtype: ", operator, runtime_softmax_dtype="bfloat16")
    sizes: dict[str, Any] = {"operation_configs": {"ring": {}}, "blocksize_q": 4}
    refused("both say how large blocks are", operator, **sizes)
    refused("metadata must be a", RingAttn, SimpleNamespace(mesh="mesh"))


#: Offsets and batch size: documents packed into one row, or one per row.
ONE_ROW, ROWS_OF_TWO = (np.array([0, 7, 16, 30]), 1), (np.array([0, 30, 47]), 2)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "causal window": {"causal": True, "window": (5, 0)},
    "none": {},
}
LENGTHS_OF = {"keys longer": (34, 48), "queries longer": (48, 34), "equal": (48, 48)}


def _ids(offsets: Any, batch: int, length: int) -> Any:
    tokens = np.arange(length)
    if batch > 1:
        return np.where(tokens < np.diff(offsets)[:, None], 0, -1)
    return np.where(tokens < offsets[-1], np.searchsorted(offsets, tokens, "right") - 1, -1)[None]


@pytest.mark.nightly(
    unless=["causal-packed-keys longer", "window-rows-equal", "none-packed-queries longer"]
)
@pytest.mark.parametrize("lengths", LENGTHS_OF.values(), ids=LENGTHS_OF)
@pytest.mark.parametrize("documents", [ONE_ROW, ROWS_OF_TWO], ids=["packed", "rows"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padded_to_different_lengths(
    mask: dict[str, Any], documents: Any, lengths: tuple[int, int]
) -> None:
    """Documents of queries and keys that are padded to different lengths."""
    (offsets, batch), (queries, keys) = documents, lengths
    shapes = ((queries, H), (keys, K), (keys, K), (queries, H))
    *qkv, dout = (np.asarray(random(batch, *shape, D, seed=n)) for n, shape in enumerate(shapes))
    bias = np.asarray(random(1, H, *lengths, seed=4))
    call: Any = partial(
        flash_attention, cum_seqlens_q=offsets, cum_seqlens_k=offsets, causal=mask.get("causal", False),
        sliding_window=mask.get("window"), dropout_prob=0.25, dropout_seed=11,
    )  # fmt: skip
    # Queries and keys are counted from the start of their rows.
    ids_q, ids_k = _ids(offsets, batch, queries)[:, :, None], _ids(offsets, batch, keys)[:, None]
    shown = (ids_q == ids_k) & (ids_q >= 0) & Mask(**mask).dense(*map(np.arange, lengths))
    hidden = np.where(shown[:, None], bias, -np.inf)
    dropped = {"dropout_p": 0.25, "dropout_seed": 11}
    check_passes(call, qkv, dout, {"bias": bias}, bias=hidden, **dropped)


HIGHEST = (lax.Precision.HIGHEST, "highest", "float32", (lax.Precision.HIGHEST, "highest"))
OTHERS = (lax.Precision.HIGH, "bfloat16", "tensorfloat32")


@pytest.mark.parametrize("precision", [*HIGHEST, *OTHERS], ids=str)
def test_products_of_float32_have_the_highest_precision(precision: Any) -> None:
    ones, said = jnp.ones((1, 4, 2, 8)), "cast the inputs to bfloat16"
    if precision in HIGHEST:
        out = flash_attention(ones, ones, ones, precision=precision)
        np.testing.assert_array_equal(out, ones)
        ones = ones.astype(jnp.bfloat16)
    else:
        said = "products of float32 have the highest precision"
    call: Any = partial(flash_attention, precision=precision)
    refused(f"precision: .*{said}", call, ones, ones, ones, error=UnsupportedError)


SINKED: dict[str, Callable[..., Any]] = {
    "flash": flash_attention, "ring": ring_attention, "operation": partial(operation, causal=False),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(H, 1), (H, 3), (1, 1), (1, 3), (1, H)], ids=str)
@pytest.mark.parametrize("call", SINKED.values(), ids=SINKED)
def test_sinks_that_say_what_they_are(call: Any, shape: tuple[int, ...]) -> None:
    sinks = random(*shape, seed=3)
    wide = np.broadcast_to(np.asarray(sinks), (H, shape[1]))
    close(call(*QKV, softmax_aux=sinks), dense(sinks=wide))


@pytest.mark.parametrize("call", SINKED.values(), ids=SINKED)
def test_sinks_that_could_be_either(call: Any) -> None:
    with pytest.raises(ValueError, match=r"softmax_aux\[:, None\] is the former, .*\[None\]"):
        call(*QKV, softmax_aux=jnp.zeros(H))
    one_head = [x[:, :, :1] for x in QKV]  # which has one reading
    expected = reference.attention(*map(np.asarray, one_head), sinks=np.ones((1, 3)))[0]
    close(call(*one_head, softmax_aux=jnp.ones(3)), expected)


def test_float64_of_numpy_is_what_jax_makes_of_it() -> None:
    """Without x64, float64 of numpy runs as float32, without a warning of JAX."""
    q: Any = np.zeros((1, 8, 2, 4))
    assert jax.eval_shape(lambda: ring_attention(q, q, q, platform="xla")).dtype == jnp.float32
