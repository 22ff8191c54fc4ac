"""What a program costs: bytes that JAX lowers an attention to, and seconds of tracing and lowering.

``python tests/program_size.py`` prints the table; nothing is compiled or run, and no device is
needed but the host.
"""

from __future__ import annotations

import argparse
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

import ring_jax
from ring_core import LayoutName, LayoutSpec

LOCAL = 512  # tokens of a device


class Size(NamedTuple):
    """A program as it is lowered, for one platform, before it is compiled."""

    bytes: int
    seconds: float  # of CPU time, to trace it and to lower it


def size_of(
    devices: int, *, layers: int = 1, layout: LayoutSpec = "zigzag", package: Any = ring_jax,
    platform: str = "cpu", **options: Any,
) -> Size:  # fmt: skip
    """Trace and lower the forward and backward of some equal layers over so many devices."""
    jax.clear_caches()
    began = process_time()
    program = traced(devices, layers, layout, package, **options)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    return Size(len(text), process_time() - began)


def traced(
    devices: int, layers: int = 1, layout: LayoutSpec = "zigzag", package: Any = ring_jax,
    **options: Any,
) -> Any:  # fmt: skip
    """Trace the forward and backward of some equal layers over so many devices."""
    cp, (q, k, v) = call_over(devices, layout, package)

    def loss(q: Any, k: Any, v: Any) -> Any:
        total = jnp.float32(0)
        for n in range(layers):
            total += cp.attention(q * (n + 1), k, v, **options).astype(jnp.float32).sum()
        return total

    return jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v)


def call_over(devices: int, layout: LayoutSpec, package: Any = ring_jax) -> tuple[Any, Any]:
    """Return a ``ContextParallel`` over so many devices, which are not here, and shapes for it."""
    mesh = AbstractMesh((devices,), ("cp",), axis_types=(AxisType.Auto,))
    q, k = (jax.ShapeDtypeStruct((1, devices * LOCAL, heads, 64), jnp.bfloat16) for heads in (8, 2))
    return package.ContextParallel(mesh, "cp", layout=layout), (q, k, k)


def constants_of(program: Any) -> list[Any]:
    """Return the arrays that a traced program holds, at any depth."""
    arrays: dict[int, Any] = {}
    seen: set[int] = set()

    def visit(jaxpr: Any) -> None:
        if id(jaxpr) in seen:
            return
        seen.add(id(jaxpr))
        arrays.update((id(x), x) for x in getattr(jaxpr, "consts", ()))
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            literals = [x.val for x in equation.invars if hasattr(x, "val")]
            arrays.update((id(x), x) for x in literals)
            for inner in jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    visit(inner)

    visit(program.jaxpr)
    return [x for x in arrays.values() if hasattr(x, "nbytes")]


#: A test holds a ring and a gather over 256 devices below this.
LIMIT = Size(1_200_000, 3.0)
WAYS: tuple[tuple[LayoutName, str], ...] = (
    ("zigzag", "ring"), ("zigzag", "gather"), ("contiguous", "balanced"),
)  # fmt: skip


def main() -> None:
    """Print the table, and how far from the limits the programs of a ring and a gather are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 64, 256])
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    size_of(2, causal=True)  # imports and caches of jax itself
    print("| layout, strategy | devices | layers | bytes | seconds | of the limits |")
    print("|---|---|---|---|---|---|")
    for layout, strategy in WAYS:
        for devices in arguments.devices:
            for layers in arguments.layers:
                size = size_of(
                    devices,
                    layers=layers,
                    layout=layout,
                    strategy=strategy,
                    causal=True,
                    kernel="xla",
                )
                parts = (f"{x / most:.0%}" for x, most in zip(size, LIMIT, strict=True))
                limits = "none" if strategy == "balanced" else ", ".join(parts)
                row = (devices, layers, f"{size.bytes:,}", f"{size.seconds:.1f}", limits)
                print(f"| `{layout}`, `{strategy}` | {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
