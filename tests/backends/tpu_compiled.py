"""Compiles programs for TPUs without having one, and reads XLA's schedules."""

from __future__ import annotations

import math
import re
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
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
    topology: str, layout: Any, *, backward: bool, flags: dict[str, Any] | None = None,
    local: int = LOCAL, many: int = CP, **options: Any,
) -> Any:  # fmt: skip
    """Compile a call on bfloat16 arrays with ``local`` tokens on each device."""
    mesh = Mesh(np.array(devices(topology, many)), ("cp",))
    tokens = P(None, "cp")
    call = partial(ring_attention, axis_name="cp", layout=layout, **options)
    ring = jax.shard_map(call, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    sharding = NamedSharding(mesh, tokens)
    q, k, v = (
        jax.ShapeDtypeStruct((1, many * local, heads, DIM), jnp.bfloat16, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(ring, q, k, v)
        return out, pull(dout)

    # In a model the neighbouring operations use the memory layout that the kernels want.
    chosen = Format(Layout.AUTO, sharding)
    function, inputs = (both, (q, k, v, q)) if backward else (ring, (q, k, v))
    jitted = jax.jit(function, in_shardings=chosen, out_shardings=chosen)
    return jitted.lower(*inputs).compile(compiler_options=flags)


def schedule_of(program: Any) -> list[tuple[str, str, str]]:
    """Return ``(kind, name, operands)`` in scheduled order; kinds are start, done and kernel.

    A loop of launches counts as one kernel.
    """
    text = program.as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("\nENTRY ") :]
    loops = {
        match[1]
        for match in re.finditer(r"\n%?([\w.-]+) [^\n]*\{\n(.*?)\n\}", text, re.DOTALL)
        if "tpu_custom_call" in match[2]
    }
    schedule = []
    for line in entry.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\((.*)", line)
        if match is None:
            continue
        name, operation, rest = match.groups()
        if operation in ("collective-permute-start", "collective-permute-done"):
            schedule.append((operation.rsplit("-", 1)[1], name, rest))
            continue
        body = re.search(r"body=%?([\w.-]+)", rest)
        launches = body is not None and body[1] in loops
        if launches or (operation == "custom-call" and "tpu_custom_call" in line):
            schedule.append(("kernel", name, rest))
    return schedule


def loops_of(program: Any) -> list[tuple[str, list[int]]]:
    """Return the schedule of each loop with a transfer, as letters, and the bytes it copies.

    The bytes count copies of arrays, among them small ones of the kernel's block lists. Prefetches
    of a kernel's operands into on-chip memory, ``S(1)``, do not count.
    """
    loops = []
    for match in re.finditer(r"\n%?[\w.-]+ [^\n]*\{\n(.*?)\n\}", program.as_text(), re.DOTALL):
        if "collective-permute-start" not in match[1] or "\nENTRY" in match[0]:
            continue
        word, copied = "", []
        for line in match[1].splitlines():
            operation = re.search(r" = (.*?) ([\w-]+)\(", line)
            if operation is None:
                continue
            if operation[2] in ("collective-permute-start", "collective-permute-done"):
                word += "S" if operation[2].endswith("start") else "D"
            elif "tpu_custom_call" in line:
                word += "K"
            elif operation[2] in ("copy", "copy-start"):
                dtype, shape, layout = re.findall(r"(\w+)\[([\d,]*)\](\S*)", operation[1])[0]
                if "S(1)" in layout:
                    continue
                elements = math.prod(int(n) for n in shape.split(",") if n)
                copied.append(elements * _WIDTH.get(dtype, 1))
        loops.append((word, copied))
    return loops


def letters(program: Any) -> str:
    """Return the schedule as letters: ``S`` start, ``D`` done, ``K`` kernel."""
    names = {"start": "S", "done": "D", "kernel": "K"}
    return "".join(names[what] for what, _, _ in schedule_of(program))


def exposed(program: Any) -> list[str]:
    """Return transfers that overlap with no kernel: none runs between their start and done."""
    begun: dict[str, int] = {}
    kernels, alone = 0, []
    for what, name, rest in schedule_of(program):
        if what == "kernel":
            kernels += 1
        elif what == "start":
            begun[name] = kernels
        else:
            start = begun_by(rest)
            if begun[start] == kernels:
                alone.append(start)
    return alone


def begun_by(operands: str) -> str:
    """Return the start that a done waits for."""
    names = re.findall(r"[\w.-]*collective-permute-start[\w.-]*", operands)
    return str(names[0])


def permuted_bytes(program: Any) -> list[int]:
    """Return the bytes of each transfer."""
    sizes = []
    for line in program.as_text().splitlines():
        match = re.search(r"= \((\w+)\[([\d,]+)\].*collective-permute-start\(", line)
        if match:
            dtype, shape = match.groups()
            sizes.append(math.prod(map(int, shape.split(","))) * _WIDTH[dtype])
    return sizes


def memory_allowed() -> tuple[float, float]:
    """Return the bytes that the forward and the backward may use: slots and accumulators."""
    slots = 2 * LOCAL * KV_HEADS * 2 * DIM * 2
    rows = LOCAL * HEADS * DIM * 4
    grads = 3 * LOCAL * KV_HEADS * 2 * DIM * 4
    return slots + rows, slots + rows + grads
