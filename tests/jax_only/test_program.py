"""Transfers and memory of traced programs, read from the programs themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from ring_core import LAYOUTS, Mask, make_plan, ring_program
from ring_jax import ContextParallel, ring_attention

CP, HEADS, KV_HEADS, DIM = 8, 4, 2, 64


def traced(length: int, layout: Any, *, backward: bool, **options: Any) -> Any:
    """Trace a call on bfloat16 arrays, for 8 host devices."""
    mesh = jax.make_mesh((CP,), ("cp",), axis_types=(AxisType.Auto,))
    call = partial(ring_attention, axis_name="cp", layout=layout, **options)
    tokens = P(None, "cp")
    ring = jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    sharding = jax.sharding.NamedSharding(mesh, tokens)
    q, k, v = (
        jax.ShapeDtypeStruct((1, length, heads, DIM), jnp.bfloat16, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(ring, q, k, v)
        return out, pull(dout)

    return jax.jit(both).trace(q, k, v, q) if backward else jax.jit(ring).trace(q, k, v)


def permutes(program: Any) -> list[int]:
    """Return the bytes of each transfer of a traced program, in order, with loops unrolled."""
    return list(_permutes(program.jaxpr.jaxpr))


def _permutes(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            yield from (x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from list(_permutes(getattr(inner, "jaxpr", inner))) * times


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (512, 0)},
    "right": {"window": (0, 700)},
}


@pytest.mark.nightly(
    unless=["causal-contiguous", "full-striped", "window-zigzag", "right-contiguous"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_transfers_are_the_plans(name: str, layout: Any) -> None:
    """Only live hops are sent, K and V in one message; dK/dV return in one hop."""
    length = 8192
    program = ring_program(
        make_plan(Mask(**MASKS[name]), seq_len=length, cp_size=CP, layout=layout)
    )
    kv = length // CP * KV_HEADS * 2 * DIM * 2
    forward = [kv for stage in program.forward if stage.kv_hop is not None]
    assert permutes(traced(length, layout, backward=False, **MASKS[name])) == forward
    backward = [kv for stage in program.backward if stage.kv_hop is not None]
    backward += [2 * kv for stage in program.backward if stage.grad_hop is not None]
    both = permutes(traced(length, layout, backward=True, **MASKS[name]))
    assert sorted(both) == sorted(forward + backward)


def test_helpers_alone_receive() -> None:
    program = traced(1024, "contiguous", backward=False, strategy="balanced", causal=True)
    text = program.lower().as_text()
    pairs = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text)
    sizes = {len(re.findall(r"\[\d+, \d+\]", pair)) for pair in pairs}
    assert sizes == {CP, 1, 2, 3, 4}


@pytest.mark.nightly
def test_memory_is_linear_in_the_length() -> None:
    sizes = [
        traced(length, "zigzag", backward=True, causal=True).lower().compile().memory_analysis()
        for length in (1 << 14, 1 << 15)
    ]
    small, large = (size.temp_size_in_bytes for size in sizes)
    assert large < 2.2 * small
    assert large < (1 << 12) ** 2 * HEADS * 4 / 2


@pytest.mark.parametrize("x64", [True, False])
def test_strict_promotion(x64: bool) -> None:
    mesh = jax.make_mesh((2,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:2])
    cp = ContextParallel(mesh, "cp")
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        x = jnp.ones((1, 16, 2, 8), jnp.float32)

        def loss(x: jax.Array) -> jax.Array:
            return cp.attention(x, x, x, causal=True, dropout_p=0.1, dropout_seed=3).sum()

        jax.jit(jax.grad(loss)).lower(x)
