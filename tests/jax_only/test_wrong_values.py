"""Every public function refuses wrong values of every argument, with an error that names it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from wrong import (
    DIM,
    FILL,
    FLAG,
    KV,
    NAME,
    OPTIONS,
    ROWS,
    SIZE,
    STEPS,
    Q,
    Subject,
    Values,
    checks_of,
    subject,
    wrong_tensors,
)

import ring_jax
from ring_jax import ContextParallel, ring_attention


def ids(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
    return jnp.zeros(shape, dtype)


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


zeros = jnp.zeros
TENSORS = wrong_tensors(zeros, bad_arrays, "uint32")
OPTION_ARRAYS: dict[str, Values] = {
    "seq_len": {"jax": jnp.array(8)}, "causal": {"jax": jnp.array(True)},
    "window": {"jax": (jnp.array(1), 0)},
    "chunk_size": {"jax": jnp.array(4)}, "cu_seqlens": {"jax": jnp.array([0, 8])},
    "mask": {"jax": zeros((8, 8))}, "softmax_scale": {"jax": jnp.array(0.5)},
    "softcap": {"jax": jnp.array(0.5)}, "dropout_p": {"jax": jnp.array(0.5)},
    "dropout_seed": {"floats": jnp.array(0.5), "flags": jnp.array(True), "two": ids(2), "three": ids(3)},
    "deterministic": {"jax": jnp.array(True)}, "return_lse": {"jax": jnp.array(True)},
    "kernel": {"jax": jnp.array(1)}, "strategy": {"jax": jnp.array(1)}, "transport": {"jax": jnp.array(1)},
}  # fmt: skip
CALL: dict[str, Values] = {
    **TENSORS,
    **{n: {**x, **OPTION_ARRAYS.get(n, {})} for n, x in OPTIONS.items() if n != "layout"},
}
#: ``explain`` accepts shapes in place of arrays.
EXPLAINED: dict[str, Values] = CALL | {
    name: {n: x for n, x in values.items() if n != "shape alone"}
    for name, values in TENSORS.items() if name != "segment_ids"
}  # fmt: skip
inputs = {"q": zeros(Q), "k": zeros(KV), "v": zeros(KV)}
mesh = jax.make_mesh(
    (2, 2), ("cp", "dp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
)
cp = ContextParallel(mesh, "cp")
AXIS: Values = {n: x for n, x in NAME.items() if n != "none"}
SHARD: Values = {
    "none": None, "list": [1.0], "word": "x", "number": 3.0, "scalar": zeros(()), "class": jax.Array,
}  # fmt: skip


def entered(every: Any) -> None:
    """Enter the context, which checks its arguments only then."""
    with ring_jax.check(every):
        pass


#: Wrong values of arguments by their names.
BY_NAME: dict[str, Values] = CALL | {
    "layout": OPTIONS["layout"], "to": OPTIONS["layout"], "dim": DIM, "pad": FLAG, "fill": FILL,
    "n": STEPS, "left": ROWS, "right": ROWS, "x": SHARD, "y": SHARD, "axis_name": AXIS,
}  # fmt: skip
LENGTH: Values = {**SIZE, "none": None}
HALF, ALONE = {"x": zeros(Q, jnp.float16), "n": 1}, {"axis_name": None}
row = partial(subject, BY_NAME)
moved = partial(row, cu_seqlens=OPTIONS["cu_seqlens"])

SUBJECTS: dict[str, Subject] = {
    "ring_jax.ring_attention": row(ring_attention, inputs | ALONE),
    "ring_jax.check": row(
        entered, {"every": 1}, every={n: x for n, x in LENGTH.items() if n != "zero"}
    ),
    "ring_jax.ContextParallel": row(
        ContextParallel, {"mesh": mesh, "axis_name": "cp"},
        mesh={"none": None, "word": "cp", "number": 4, "devices": jax.devices(), "class": type(mesh)},
        axis_name={**NAME, "tuple": ("cp",)}, batch_axis={**AXIS, "the same": "cp"},
        head_axis={**AXIS, "the same": "cp"},
    ),
    "ring_jax.ContextParallel.attention": row(cp.attention, inputs),
    "ring_jax.ContextParallel.explain": row(
        cp.explain, inputs, **{n: EXPLAINED[n] for n in TENSORS}
    ),
    "ring_jax.ContextParallel.check_agreement": Subject(cp.check_agreement, inputs, CALL),
    "ring_jax.ContextParallel.layout_of": row(
        cp.layout_of, {"seq_len": 8}, seq_len={**LENGTH, "indivisible": 7}
    ),
    "ring_jax.ContextParallel.positions": row(cp.positions, {"seq_len": 8}, seq_len=LENGTH),
    "ring_jax.ContextParallel.shard": row(
        cp.shard, {"x": zeros(Q)}, fill={**FILL, "without pad": 1.0}
    ),
    "ring_jax.ContextParallel.unshard": row(cp.unshard, {"x": zeros(Q)}),
    "ring_jax.ContextParallel.shift": moved(cp.shift, HALF),
    "ring_jax.ContextParallel.halo": moved(cp.halo, {"x": zeros(Q), "left": 1, "right": 0}),
    "ring_jax.ContextParallel.join": row(cp.join, {"y": zeros((8, 2, 4, 16))}),
    "ring_jax.ContextParallel.relayout": row(cp.relayout, {"x": zeros(Q), "to": "contiguous"}),
    "ring_jax.shift": moved(ring_jax.shift, HALF | ALONE),
    "ring_jax.halo": moved(ring_jax.halo, {"x": zeros(Q), "left": 1, "right": 0} | ALONE),
    "ring_jax.preflight": Subject(
        ring_jax.preflight,
        {
            "cp": cp, "step": lambda cp, params, batch: (cp.shard(batch) * params).sum(),
            "params": jnp.ones(2), "batch": jnp.ones((1, 8, 2)),
        },
        {
            "cp": {"none": None, "word": "x", "mesh": mesh}, "step": {"none": None, "word": "x"},
            "params": {"none": None, "word": "x", "integers": ids(2), "object": object()},
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


globals().update(checks_of(SUBJECTS, ("ring_jax",), ELSEWHERE, ContextParallel))
