"""Measures JAX programs of attention: bytes of StableHLO, and seconds of tracing and lowering.

``python tests/program_size.py`` prints a table. Nothing is compiled or run, and no device other
than the host is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from ring_core import LayoutName, LayoutSpec
from ring_jax import ContextParallel

LOCAL = 512  # tokens per device


class Size(NamedTuple):
    """Size of a program lowered for one platform, before it is compiled."""

    bytes: int
    seconds: float  # CPU time of tracing and lowering


def size_of(
    devices: int, *, layers: int = 1, layout: LayoutSpec = "zigzag",
    heads: tuple[int, int] = (8, 2), **options: Any,
) -> Size:  # fmt: skip
    """Trace and lower forward and backward of equal layers; return the program's size."""
    jax.clear_caches()
    began = process_time()
    program = traced(devices, layers, layout, heads, **options)
    text = program.lower(lowering_platforms=("cpu",)).as_text()
    return Size(len(text), process_time() - began)


def traced(
    devices: int, layers: int = 1, layout: LayoutSpec = "zigzag",
    heads: tuple[int, int] = (8, 2), **options: Any,
) -> Any:  # fmt: skip
    """Trace forward and backward of equal layers."""
    cp, (q, k, v) = call_over(devices, layout, heads)

    def loss(q: Any, k: Any, v: Any) -> Any:
        total = jnp.float32(0)
        for n in range(layers):
            total += cp.attention(q * (n + 1), k, v, **options).astype(jnp.float32).sum()
        return total

    return jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v)


def call_over(devices: int, layout: LayoutSpec, heads: tuple[int, int] = (8, 2)) -> tuple[Any, Any]:
    """Return a ``ContextParallel`` over abstract devices, and the shapes of q, k and v."""
    mesh: Any = AbstractMesh((devices,), ("cp",), axis_types=(AxisType.Auto,))
    q, k = (jax.ShapeDtypeStruct((1, devices * LOCAL, n, 64), jnp.bfloat16) for n in heads)
    return ContextParallel(mesh, "cp", layout=layout), (q, k, k)


def programs(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield a traced program and all inside of it, each with how often loops run it."""
    yield jaxpr, times
    for equation in jaxpr.eqns:
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        values = [*equation.params.values()]
        for inner in jax.tree.leaves(values, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from programs(inner, times * turns)


def constants_of(program: Any) -> list[Any]:
    """Return the arrays that a traced program holds, at any depth."""
    arrays: dict[int, Any] = {}
    for jaxpr, _ in programs(program.jaxpr):
        literals = [x.val for e in jaxpr.eqns for x in e.invars if hasattr(x, "val")]
        arrays.update((id(x), x) for x in [*getattr(jaxpr, "consts", ()), *literals])
    return [x for x in arrays.values() if hasattr(x, "nbytes")]


#: Limit of a program over 256 devices, which a test checks; and where ranks help others, as the
#: pairs of ranks that send are part of a program, and others in each of half as many stages.
LIMIT, LIMIT_OF_BALANCED = Size(1_200_000, 3.0), Size(4_000_000, 9.0)
WAYS: tuple[tuple[LayoutName, str], ...] = (
    ("zigzag", "ring"), ("zigzag", "gather"), ("contiguous", "balanced"),
)  # fmt: skip


def main() -> None:
    """Print the sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    size_of(2, causal=True)  # warms up jax's imports and caches
    print("| layout, strategy | devices | layers | bytes | seconds |\n|---|---|---|---|---|")
    for (layout, strategy), devices, layers in product(WAYS, arguments.devices, arguments.layers):
        options: dict[str, Any] = {"strategy": strategy, "causal": True, "kernel": "xla"}
        size = size_of(devices, layers=layers, layout=layout, **options)
        row = (
            f"`{layout}`, `{strategy}`",
            devices,
            layers,
            f"{size.bytes:,}",
            f"{size.seconds:.1f}",
        )
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
