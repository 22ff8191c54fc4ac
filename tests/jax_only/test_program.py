"""Transfers and memory of traced programs, read from the programs themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ring_jax
from ring_core import LAYOUTS, Mask, StrategyConfig, make_plan, ring_program
from ring_jax import ContextParallel, ring_attention, tripwire

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


def hybrid(size: int, outer: Any) -> StrategyConfig:
    """Return the strategy of groups of ``size`` devices."""
    return StrategyConfig("hybrid", ulysses_size=size, outer=outer)


CAUSAL: dict[str, Any] = {"causal": True}
#: Strategies with layouts, options, and query and K/V heads.
SENT: dict[str, tuple[Any, Any, dict[str, Any], tuple[int, int]]] = {
    "ring": ("ring", "zigzag", CAUSAL, (4, 2)),
    "ring-window": ("ring", "contiguous", CAUSAL | {"window": (100, 0)}, (4, 2)),
    "balanced": ("balanced", "contiguous", CAUSAL, (4, 2)),
    "gather": ("gather", "striped", CAUSAL, (4, 2)),
    "ulysses": ("ulysses", "zigzag", CAUSAL, (16, 8)),
    "ulysses-copied": ("ulysses", "striped", {}, (12, 3)),
    "hybrid-ring": (hybrid(2, "ring"), "zigzag", CAUSAL, (4, 2)),
    "hybrid-gather": (hybrid(4, "gather"), "zigzag", CAUSAL, (4, 2)),
    "hybrid-copied": (hybrid(4, "ring"), "contiguous", CAUSAL, (6, 1)),
}


@pytest.mark.nightly(unless=["balanced", "hybrid-ring"])
@pytest.mark.parametrize("name", SENT)
def test_compiled_programs_carry_the_bytes_of_the_formula(name: str) -> None:
    """Each pass by itself, counted in what XLA compiled, with every turn of a loop."""
    strategy, layout, options, heads = SENT[name]
    mesh, tokens = jax.make_mesh((CP,), ("cp",), axis_types=(AxisType.Auto,)), P(None, "cp")
    call = partial(ring_attention, axis_name="cp", layout=layout, strategy=strategy, **options)
    attend = jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    sharding = NamedSharding(mesh, tokens)
    q, k = (
        jax.ShapeDtypeStruct((1, CP * 32, n, 16), jnp.float32, sharding=sharding) for n in heads
    )
    stated: dict[str, int] = {}  # of each pass; a forward is traced once more without gradients

    def check(_call: Any, _inputs: Any, direction: str, expected: int, *_: Any) -> None:
        stated[direction] = expected

    with ring_jax.check(), patch.object(tripwire, "check_traffic", check):
        jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1](x[0]), q, k, k)
    pull = jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], q, k, k)
    programs = {
        "forward": jax.jit(attend).lower(q, k, k),
        "backward": jax.jit(lambda pull, dout: pull(dout)).lower(pull, q),
    }
    assert stated == {name: carried(lowered.compile()) for name, lowered in programs.items()}


def carried(program: Any) -> int:
    """Return the bytes that leave all devices together in a compiled program."""
    text = str(program.as_text())
    bodies = dict(re.findall(r"\n(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)\n\}", text, re.DOTALL))

    def in_computation(name: str) -> int:
        return sum(map(in_line, bodies[name].splitlines()))

    def in_line(line: str) -> int:
        called = re.findall(r"(?:to_apply|body|calls)=%([\w.-]+)", line)
        inside = sum(map(in_computation, called))
        if inside and " while(" in line:  # loops of kernels, of unknown length, move nothing
            (condition,) = re.findall(r"condition=%([\w.-]+)", line)
            (turns,) = re.findall(r"constant\((\d+)\)", bodies[condition])
            inside *= int(turns)
        return inside + carried_by(line)

    (entry,) = re.findall(r"\nENTRY %([\w.-]+)", text)
    return in_computation(entry)


def carried_by(line: str) -> int:
    """Return the bytes that leave all devices in an operation of a program."""
    operation = re.search(r" = (.*?) (collective-permute|all-\w[\w-]*|reduce-scatter)\(", line)
    if operation is None:
        return 0
    size = sum(
        4 * math.prod(int(n) for n in shape.split(",") if n)
        for shape in re.findall(r"[fsu]32\[([\d,]*)\]", operation[1])
    )
    if operation[2] == "collective-permute":
        (pairs,) = re.findall(r"source_target_pairs=\{(.*?)\}\}", line)
        return size * str(pairs).count("{")
    # Results are all that is gathered or traded, and the one piece of a scattered sum.
    groups = re.search(
        r"replica_groups=(?:\[\d+,(\d+)\]|mesh\['cp'=(\d)\] \{'cp'\}|\{\{([\d,]+)\})", line
    )
    assert groups is not None, line
    members = int(groups[1] or groups[2] or groups[3].count(",") + 1)
    pieces = {"all-gather": members, "all-to-all": members, "reduce-scatter": 1}[operation[2]]
    return CP * size * (members - 1) // pieces


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
