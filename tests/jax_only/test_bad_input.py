"""Every public function refuses wrong values, with an error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wrong
from jax_meshes import close, context, in_ring, mesh_of, random
from refused import refused
from wrong import COUNT, KV, NAME, OPTIONS, Q, Subject, Values

import ring_jax
from ring_core import Mask, reference
from ring_jax import ContextParallel, KernelConfig, Segments, compat, flax, nn, ring_attention
from ring_jax.dropout import seed_words

zeros = jnp.zeros
inputs: dict[str, Any] = {"q": zeros(Q), "k": zeros(KV), "v": zeros(KV)}
ALONE = {"axis_name": None}
attention = partial(ring_attention, axis_name=None)


def ids(*shape: int) -> jax.Array:
    return zeros(shape, jnp.int32)


BAD: dict[str, tuple[dict[str, Any], str]] = wrong.bad_calls(zeros, "jax.Array") | {
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
    "kernels": ({"kernel": KernelConfig(fused_backward=True)}, "no kernel can do this call. triton: needs .* xla: has no choice of fused"),
}  # fmt: skip
CP = context(layout="contiguous")
CALLS = attention, CP.attention, CP.explain
globals().update(wrong.refusals_of(attention, inputs, BAD, CALLS))


def test_gradient_of_slopes_is_refused() -> None:
    def loss(slopes: jax.Array) -> Any:
        return attention(**inputs, alibi_slopes=slopes).sum()

    loss(jnp.ones(4))
    refused("alibi_slopes have no gradient", jax.grad(loss), jnp.ones(4))
    others = jax.grad(lambda q: attention(**inputs | {"q": q}, alibi_slopes=jnp.ones(4)).sum())
    assert others(zeros(Q)).shape == Q


def test_context_parallel() -> None:
    mesh, good = mesh_of(cp=2, dp=2), jnp.zeros((2, 8, 4, 16))
    cp = ContextParallel(mesh, "cp", batch_axis="dp", head_axis=None)
    rows: list[tuple[Callable[[], Any], str]] = [
        (lambda: ContextParallel(mesh, "cp", layout=cast("Any", "ring")), "unknown layout 'ring'"),
        (lambda: ContextParallel(mesh, "sp"), "unknown axis_name 'sp'; known: cp, dp"),
        (lambda: ContextParallel(mesh, "cp", batch_axis="cp"), "must be three axes"),
        (lambda: cp.shard(jnp.zeros((1, 7, 2))), r"pad to 8 with zeros at the end, as shard\(x, pad=True\) does, and pass seq_len=7"),
        (lambda: cp.attention(good, good[:1], good), "the batch of k, 1, must be a multiple of the 2 devices along 'dp'"),
        (lambda: cp.attention(good[0], good, good), "q must have 4 dimensions"),
        (lambda: cp.attention(good, cast("Any", None), good), r"k must be a jax\.Array, got NoneType"),
        (lambda: cp.attention(good, good[:, :6], good), r"sequence length 6 .* pad to 8"),
    ]  # fmt: skip
    for call, message in rows:
        refused(message, call)


SMALL, WIDE, TOP = 9, (5 << 32) + 9, (1 << 63) + 5
INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


def _words(seed: Any) -> int:
    low, high = np.asarray(seed_words(seed)).tolist()
    return int(low + (high << 32))


@pytest.mark.parametrize("x64", [True, False], ids=["x64", "x32"])
def test_seeds(*, x64: bool) -> None:
    """Integers of the host, whatever their width, and of JAX are seeds as they are."""
    with jax.enable_x64(x64):
        for seed in (SMALL, WIDE, TOP):
            assert _words(seed) == _words(np.array(seed, np.uint64)) == seed
            for kind in INTEGERS:
                held = min(seed, int(np.iinfo(kind).max))
                assert _words(kind(held)) == _words(np.array(held, kind)) == held
        of_jax = [jnp.uint32(SMALL), jnp.int32(SMALL)]
        for array in of_jax + ([jnp.int64(WIDE), jnp.uint64(TOP)] if x64 else []):
            assert _words(array) == int(array)
            low, high = jax.jit(seed_words)(array).tolist()
            assert low + (high << 32) == int(array)


EIGHT, SIX = random(1, 8, 2, 4, seed=8), random(1, 6, 2, 4, seed=6)


def sharded(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return in_ring(partial(ring_attention, axis_name="cp", **options))(q, k, v)


OURS: dict[str, Callable[..., Any]] = {
    "one device": attention, "shard_map": sharded, "ContextParallel": CP.attention, "explain": CP.explain,
}  # fmt: skip


@pytest.mark.parametrize("call", OURS.values(), ids=OURS)
def test_causal_with_fewer_keys_is_refused(call: Callable[..., Any]) -> None:
    shown = jnp.ones((4 if call is sharded else 8, 6), bool)
    for run in (partial(call, causal=True), jax.jit(partial(call, causal=True, mask=shown))):
        refused(wrong.FEWER_KEYS, run, EIGHT, SIX, SIX)


RULE = Mask(causal=True)
OPERATION = compat.RingAttn(compat.OperationMetadata(sequence_axis_name="cp", mesh=CP.mesh))
KEEPING: dict[str, Callable[..., Any]] = {
    **{name: partial(call, mask=RULE) for name, call in OURS.items() if name != "explain"},
    # Calls of other libraries keep their meaning, ...
    "flash_attention": partial(compat.flash_attention, causal=True),
    "compat": in_ring(partial(compat.ring_attention, axis_name="cp", causal=True)),
    "RingAttn": lambda *x: OPERATION(*x).attention_outputs,
    # ... and the adapter for ``jax.nn`` runs with the mask that its error says to bind.
    "jax.nn": nn.make_dot_product_attention(partial(CP.attention, mask=RULE)),
}  # fmt: skip


@pytest.mark.parametrize("call", KEEPING.values(), ids=KEEPING)
def test_a_causal_mask_with_fewer_keys_keeps_the_rule(call: Callable[..., Any]) -> None:
    expected, _ = reference.attention(*map(np.asarray, (EIGHT, SIX, SIX)), mask=RULE)
    close(call(EIGHT, SIX, SIX), expected)


def test_what_is_bound_to_an_adapter_is_refused_by_name() -> None:
    attend = nn.make_dot_product_attention(CP.attention)
    refused(r"bind mask=ring_core\.Mask\(causal=True\)", attend, EIGHT, SIX, SIX, is_causal=True)
    bound = partial(CP.attention, is_causal=True)
    refused("for is_causal, use causal", flax.make_attention_fn, bound)


NAMED: dict[str, Callable[..., Any]] = {
    "__call__": attention, "attention": CP.attention, "explain": CP.explain, "check_agreement": CP.check_agreement,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_misspelt_option_is_named_with_the_function_that_was_called(name: str) -> None:
    """Methods pass options on to a record, whose own error would name it."""
    said = rf"^{name}\(\) got an unexpected keyword argument 'sofcap'. Did you mean 'softcap'\?"
    refused(said, NAMED[name], EIGHT, EIGHT, EIGHT, sofcap=1.0, error=TypeError)
    said = rf"^{name}\(\) .* argument 'xyz'$"
    refused(said, NAMED[name], EIGHT, EIGHT, EIGHT, softcap=1.0, xyz=2, error=TypeError)


IDS: Any = np.array([[0] * 4 + [1] * 3 + [7]])
RIGHT, SAME = IDS.astype(np.int32), (EIGHT, EIGHT, EIGHT)
in_flax = flax.make_attention_fn(attention)

WITH_IDS: dict[str, Callable[[Any], Any]] = {
    "ring_attention": lambda ids: attention(*SAME, segment_ids=ids),
    "a pair": lambda ids: attention(*SAME, segment_ids=(ids, RIGHT)),
    "Segments": lambda ids: in_flax(*SAME, mask=Segments(ids)),
    "Segments of keys": lambda ids: in_flax(*SAME, mask=Segments(RIGHT, ids)),
    "compat": lambda ids: compat.ring_attention(*SAME, q_segment_ids=ids),
    "compat, keys": lambda ids: compat.flash_attention(
        *SAME, q_segment_ids=RIGHT, kv_segment_ids=ids
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", WITH_IDS)
def test_ids_are_those_that_int32_holds(call: str) -> None:
    for dtype in ("int64", "uint64", "uint32"):
        said = f"must be int32, or integers that it holds, got {dtype}"
        refused(said, WITH_IDS[call], IDS.astype(dtype))
    right = attention(*SAME, segment_ids=jnp.asarray(RIGHT))
    for dtype in ("int8", "uint16"):
        for array in (IDS.astype(dtype), jnp.asarray(IDS, dtype)):
            close(WITH_IDS[call](array), right)


def test_ids_of_64_bits_that_are_traced() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="got int64"):
        jax.jit(WITH_IDS["Segments"])(jnp.asarray(IDS, jnp.int64))


@pytest.mark.parametrize("length", [2**31 + 3, 2**40])
def test_lengths_beyond_int32_hide_nothing(length: int) -> None:
    offsets: Any = np.array([0, length])
    attend = nn.make_dot_product_attention(attention)
    close(attend(*SAME, key_value_seq_lengths=offsets[1:]), attention(*SAME))
    documents: Any = {"cum_seqlens_q": offsets, "cum_seqlens_k": offsets}
    close(compat.flash_attention(*SAME, **documents), attention(*SAME))


TOKENS = 24
#: Arguments that can be changed in place, by name and kind, and the values that they get.
CHANGED: dict[str, tuple[Callable[[], Any], Any]] = {
    "cu_seqlens-ndarray": (lambda: np.array([0, 6, TOKENS]), (0, 16, TOKENS)),
    "cu_seqlens-list": (lambda: [0, 6, TOKENS], (0, 16, TOKENS)),
    "cu_seqlens-arrays": (lambda: tuple(map(np.array, (0, 6, TOKENS))), (0, 16, TOKENS)),
    "window-list": (lambda: [3, 0], (5, 0)),
    "segment_ids": (lambda: np.zeros((1, TOKENS), np.int32), [[0] * 9 + [1] * 15]),
    "bias": (lambda: np.zeros((1, 1, TOKENS, TOKENS), np.float32), [0, 1] * (TOKENS // 2)),
    "sinks": (lambda: np.zeros(2, np.float32), [1, 2]),
    "alibi_slopes": (lambda: np.zeros(2, np.float32), [0.5, 0.25]),
    "dropout_seed": (lambda: np.array(3, np.int32), 4),
}
STATIC = tuple(CHANGED)[:4]
ROWS: Any = [random(1, TOKENS, 2, 8, seed=n) for n in range(3)]
EXPLICIT, flash = context(kind="explicit"), cast("Any", compat.flash_attention)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "ring_attention": (partial(ring_attention, *ROWS, axis_name=None), tuple(CHANGED)),
    "ContextParallel.attention": (
        partial(EXPLICIT.attention, *ROWS, causal=True),
        ("cu_seqlens-ndarray", "segment_ids", "sinks"),
    ),
    "ContextParallel.explain": (partial(EXPLICIT.explain, *ROWS), STATIC),
    "Mask": (lambda **rule: ring_attention(*ROWS, axis_name=None, mask=Mask(**rule)), STATIC),
    "compat": (lambda cu_seqlens: flash(*ROWS, cum_seqlens_q=cu_seqlens, cum_seqlens_k=cu_seqlens), STATIC[:1]),
    "nn": (partial(nn.make_dot_product_attention(EXPLICIT.attention), *ROWS), ("bias",)),
}  # fmt: skip
CASES = [(name, argument) for name, (_, names) in FUNCTIONS.items() for argument in names]


def _change(value: Any, values: Any) -> None:
    if isinstance(value, tuple):
        for array, new in zip(value, values, strict=True):
            array[...] = new
    else:
        value[... if isinstance(value, np.ndarray) else slice(None)] = values


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_changed_in_place(name: str, argument: str) -> None:
    """An argument is changed in place between two calls: the second sees the new values."""
    make, values = CHANGED[argument]
    dropping = {"dropout_p": 0.5} if argument == "dropout_seed" else {}

    def call(value: Any) -> Any:
        return np.asarray(FUNCTIONS[name][0](**{argument.partition("-")[0]: value}, **dropping))

    given, other = make(), make()
    first = call(given)
    _change(given, values)
    _change(other, values)
    second = call(given)
    np.testing.assert_array_equal(first, call(make()))
    np.testing.assert_array_equal(second, call(other))
    is_text = first.dtype.kind == "U"  # numbers are the same
    assert is_text or not np.array_equal(first, second)


def bad_arrays(*shape: int) -> Values:
    """Return arrays of the right shape that are wrong otherwise, and values that are no arrays."""
    good = jnp.zeros(shape)
    return {
        "word": "q", "number": 1.0, "flag": True, "list": good.tolist(), "class": jax.Array,
        "complex": good.astype(jnp.complex64), "integers": good.astype(jnp.int32),
        "flags": good.astype(bool), "8 bits": good.astype(jnp.float8_e4m3fn),
        "objects": np.full(shape, None), "words": np.full(shape, "1"),
        "shape alone": jax.ShapeDtypeStruct(shape, jnp.float32),
        "keys": jax.random.split(jax.random.key(0), shape),
    }  # fmt: skip


TENSORS = wrong.wrong_tensors(zeros, bad_arrays, "uint32")
CALL = wrong.wrong_call(
    TENSORS, jnp.array, window={"an array": (jnp.array(1), 0)}, cu_seqlens={"tensor": jnp.array([0, 8])},
    dropout_seed={"floats": jnp.array(0.5), "flags": jnp.array(True), "two": zeros(2, "int32"), "three": zeros(3, "int32"),
        "of jax": jnp.int32(-1), "key": jax.random.key(0), "of numpy": np.int64(-1), "of 8 bits": np.int8(-1),
        "array": np.array(-5), "flag of numpy": np.bool_(1),
    },
)  # fmt: skip
#: ``explain`` accepts shapes in place of arrays.
EXPLAINED: dict[str, Values] = TENSORS | {
    name: {n: x for n, x in values.items() if n != "shape alone"}
    for name, values in TENSORS.items() if name != "segment_ids"
}  # fmt: skip
mesh = mesh_of(cp=2, dp=2)
cp = ContextParallel(mesh, "cp")
AXIS: Values = {n: x for n, x in NAME.items() if n != "none"}
SHARD: Values = {
    "none": None, "list": [1.0], "word": "x", "number": 3.0, "scalar": zeros(()), "class": jax.Array,
}  # fmt: skip


#: Wrong values of arguments by their names.
row = partial(wrong.subject, CALL | wrong.MOVED | {"x": SHARD, "y": SHARD, "axis_name": AXIS})
HALF = {"x": zeros(Q, jnp.float16), "n": 1}


def traced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that is traced, with the values of its arguments, and compiles nothing."""
    return wraps(call)(lambda **values: jax.eval_shape(partial(call, **values)))


moved = partial(row, cu_seqlens=OPTIONS["cu_seqlens"])

SUBJECTS: dict[str, Subject] = {
    "ring_jax.ring_attention": row(ring_attention, inputs | ALONE),
    "ring_jax.check": row(wrong.entered(ring_jax.check), {"every": 1}, every=wrong.ROWS),
    "ring_jax.ContextParallel": row(
        ContextParallel, {"mesh": mesh, "axis_name": "cp"},
        mesh={"none": None, "word": "cp", "number": 4, "devices": jax.devices(), "class": type(mesh)},
        axis_name={**NAME, "tuple": ("cp",)}, batch_axis={**AXIS, "the same": "cp"},
        head_axis={**AXIS, "the same": "cp"},
    ),
    "ring_jax.ContextParallel.attention": row(traced(cp.attention), inputs),
    "ring_jax.ContextParallel.explain": row(cp.explain, inputs, **EXPLAINED),
    "ring_jax.ContextParallel.check_agreement": Subject(cp.check_agreement, inputs, CALL),
    "ring_jax.ContextParallel.layout_of": row(
        cp.layout_of, {"seq_len": 8}, seq_len={**COUNT, "indivisible": 7}
    ),
    "ring_jax.ContextParallel.positions": row(cp.positions, {"seq_len": 8}, seq_len=COUNT),
    "ring_jax.ContextParallel.shard": row(
        traced(cp.shard), {"x": zeros(Q)}, fill={**wrong.FILL, "without pad": 1.0}
    ),
    "ring_jax.ContextParallel.unshard": row(traced(cp.unshard), {"x": zeros(Q)}),
    "ring_jax.ContextParallel.shift": moved(traced(cp.shift), HALF),
    "ring_jax.ContextParallel.halo": moved(traced(cp.halo), {"x": zeros(Q), "left": 1, "right": 0}),
    "ring_jax.ContextParallel.join": row(traced(cp.join), {"y": zeros((8, 2, 4, 16))}),
    "ring_jax.ContextParallel.relayout": row(traced(cp.relayout), {"x": zeros(Q), "to": "contiguous"}),
    "ring_jax.shift": moved(ring_jax.shift, HALF | ALONE),
    "ring_jax.halo": moved(traced(ring_jax.halo), {"x": zeros(Q), "left": 1, "right": 0} | ALONE),
    "ring_jax.preflight": Subject(
        ring_jax.preflight,
        {
            "cp": cp, "step": lambda cp, params, batch: (cp.shard(batch) * params).sum(),
            "params": jnp.ones(2), "batch": jnp.ones((1, 8, 2)),
        },
        {
            "cp": {"none": None, "word": "x", "mesh": mesh}, "step": {"none": None, "word": "x"},
            "params": {"none": None, "word": "x", "integers": zeros(2, "int32"), "object": object()},
            "batch": {"word": "x", "object": object()},
            "rtol": {"word": "x", "negative": -1.0, "nan": math.nan},
        },
    ),
    "ring_jax.join": row(ring_jax.join, {"y": zeros(Q)} | ALONE),
    "ring_jax.relayout": row(ring_jax.relayout, {"x": zeros(Q), "to": "contiguous"} | ALONE),
}  # fmt: skip
#: Names that ring_core's tests check, or that this package's functions return.
ELSEWHERE = {
    "ring_jax.Halo", "ring_jax.KernelConfig", "ring_jax.Mask", "ring_jax.PreflightReport",
    "ring_jax.Segments",
}  # fmt: skip

globals().update(wrong.checks_of(SUBJECTS, ("ring_jax",), ELSEWHERE, ContextParallel))
