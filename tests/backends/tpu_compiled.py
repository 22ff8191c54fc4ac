"""Compiles programs for TPUs without having one, and reads XLA's schedules."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ring_jax_tpu import ring_attention

TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
_WIDTH = {"bf16": 2, "f32": 4, "s32": 4}
CP, LOCAL, HEADS, KV_HEADS, DIM = 4, 8192, 8, 2, 128


#: Topologies of eight chips, whose ring is a loop.
LARGER = ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x2")


@lru_cache
def devices(topology: str, many: int) -> tuple[Any, ...]:
    """Return the first devices of a topology."""
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return tuple(described[:many])


def compiled(
    topology: str, layout: Any = "contiguous", *, backward: bool = True, local: int = LOCAL,
    many: int = CP, keys: int | None = None, dims: tuple[int, int] = (DIM, DIM), dtype: str = "bfloat16",
    flags: dict[str, Any] | None = None, arrays: dict[str, tuple[str, tuple[int, ...]]] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Compile a call with ``local`` tokens and ``keys`` on each of ``many`` devices.

    ``arrays`` are dtypes and shapes of options that are arrays, the same on each device.
    """
    mesh = Mesh(np.array(devices(topology, many)), ("cp",))
    tokens, everywhere = P(None, "cp"), NamedSharding(mesh, P())
    sharding = NamedSharding(mesh, tokens)
    q, k, v, dout = (
        jax.ShapeDtypeStruct((1, many * length, heads, dim), dtype, sharding=sharding)
        for length, heads, dim in (
            (local, HEADS, dims[0]), (keys or local, KV_HEADS, dims[0]),
            (keys or local, KV_HEADS, dims[1]), (local, HEADS, dims[1]),
        )
    )  # fmt: skip
    more = {
        name: jax.ShapeDtypeStruct(shape, kind, sharding=everywhere)
        for name, (kind, shape) in (arrays or {}).items()
    }

    def call(q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
        return ring_attention(q, k, v, axis_name="cp", layout=layout, **more, **options)

    ring = jax.shard_map(call, mesh=mesh, in_specs=(tokens, tokens, tokens, P()), out_specs=tokens)

    def both(q: Any, k: Any, v: Any, more: dict[str, Any], dout: Any) -> Any:
        bias = {name: x for name, x in more.items() if name == "bias"}
        out, pull = jax.vjp(lambda q, k, v, bias: ring(q, k, v, more | bias), q, k, v, bias)
        return out, pull(dout)

    # In a model the neighbouring operations use the memory layout that the kernels want.
    chosen = Format(Layout.AUTO, sharding)
    function, inputs = (both, (q, k, v, more, dout)) if backward else (ring, (q, k, v, more))
    formats = tuple(chosen if x is not more else None for x in inputs)
    jitted = jax.jit(function, in_shardings=formats, out_shardings=None if more else chosen)
    return jitted.lower(*inputs).compile(compiler_options=flags)


def schedules_of(program: Any) -> list[tuple[str, list[int]]]:
    """Return the schedule of each computation as letters, and the bytes it copies; the last is all.

    ``S`` is the start of a transfer, ``D`` its end and ``K`` a kernel, or a loop of launches. The
    bytes count copies of arrays, among them small ones of the kernel's block lists. Prefetches of a
    kernel's operands into on-chip memory, ``S(1)``, do not count.
    """
    text = program.as_text()
    assert "is_scheduled=true" in text
    bodies = dict(re.findall(r"\n(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)\n\}", text, re.DOTALL))
    launching = {name for name, body in bodies.items() if "tpu_custom_call" in body}
    schedules = []
    for body in bodies.values():
        word, copied = "", []
        for line in body.splitlines():
            operation = re.search(r" = (.*?) ([\w-]+)\(", line)
            if operation is None:
                continue
            loop = re.search(r" while\(.*body=%?([\w.-]+)", line)
            if operation[2] in ("collective-permute-start", "collective-permute-done"):
                word += "S" if operation[2].endswith("start") else "D"
            elif (loop and loop[1] in launching) or "tpu_custom_call" in line:
                word += "K"
            elif operation[2] in ("copy", "copy-start"):
                dtype, shape, layout = re.findall(r"(\w+)\[([\d,]*)\](\S*)", operation[1])[0]
                elements = math.prod(int(n) for n in shape.split(",") if n)
                copied += [elements * _WIDTH.get(dtype, 1)] * ("S(1)" not in layout)
        schedules.append((word, copied))
    return schedules


def letters(program: Any) -> str:
    """Return the schedule of the whole program as letters."""
    return schedules_of(program)[-1][0]
