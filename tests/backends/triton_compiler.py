"""Compiles the Triton kernels of ring_jax_gpu on machines without a GPU.

It runs as a separate program, because a process that interprets Triton kernels cannot compile
them. A question lists calls; the answer is the resource usage of each kernel of each call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from backends import cubins
from backends.cubins import NAMES, Described, assembled, described, taken_by
from backends.kept_process import asked, serve
from ring_core import KernelConfig, Mask
from ring_jax_gpu import ring_attention
from ring_jax_gpu.launch import Launch, arguments_of, arrays_of, kernel_of, launches_of, stages_of
from ring_jax_gpu.primitive import _run_plain, triton_launch_p

_HERE = Path(__file__).resolve()


#: Steps of a ring: whether they are the first one, and the last one.
STEPS = {"first": (True, False), "later": (False, False), "last": (False, True)}


def pretend(patched: pytest.MonkeyPatch, step: str) -> None:
    """Make calls on one device compute what a step of a ring computes."""
    from ring_jax.records import LaunchSpec
    from ring_jax.strategies import steps
    from ring_jax_gpu import kernel as _triton

    overwrite, is_final = STEPS[step]
    patched.setattr(_triton, "_is_single_step", lambda _: False)
    changed = {"overwrite": overwrite, "is_final": is_final}
    patched.setattr(steps, "LaunchSpec", lambda call, **x: LaunchSpec(call, **(x | changed)))


def compiled(calls: list[dict[str, Any]], arch: int, **more: str) -> list[dict[str, Any]]:
    """Compile the kernels of calls, in another process, for a compute capability.

    ``more`` are environment variables; another value of one starts another process.

    A call is ``options`` of :func:`ring_attention` and, where they differ from the defaults,
    ``tokens``, ``dims``, ``dtype``, ``step`` and ``arrays`` (name to dtype and shape).
    """
    more = {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise", **more}
    return asked(_HERE, {"calls": calls, "arch": arch}, **more)


def launches_in(call: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield the parameters and the array types of every launch of a call.

    ``step`` selects a step of a ring: ``only``, or a name in :data:`STEPS`.
    """
    tokens, dims = call.get("tokens", [1024, 1024]), call.get("dims", [128, 128])
    dtype, options = call.get("dtype", "bfloat16"), dict(call.get("options", {}))
    config = KernelConfig("triton", fused_backward=call.get("fused"))
    if "cu_seqlens" in options:
        options["mask"] = Mask(causal=True, cu_seqlens=tuple(options.pop("cu_seqlens")))
    if call.get("predicate"):
        options["mask"] = Mask(predicate=lambda q, k: (q // 100 + k // 100) % 2 == 0)
    spec: Any = jax.ShapeDtypeStruct
    heads, kv_heads = call.get("heads", [4, 2])
    q = spec((1, tokens[0], heads, dims[0]), dtype)
    k, v = (spec((1, tokens[1], kv_heads, dim), dtype) for dim in dims)
    more = {name: spec(shape, kind) for name, (kind, shape) in call.get("arrays", {}).items()}

    def both(q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            arrays = {**more, "bias": bias}
            return ring_attention(q, k, v, axis_name=None, kernel=config, **arrays, **options)

        out, pull = jax.vjp(attend, q, k, v, more.get("bias"))
        return out, pull(out)

    with pytest.MonkeyPatch.context() as patched:
        if call.get("step", "only") != "only":
            pretend(patched, call["step"])
        for equation in _equations(jax.make_jaxpr(both)(q, k, v, more).jaxpr):
            if equation.primitive is triton_launch_p:
                yield equation.params, [x.aval for x in equation.invars]


def _equations(program: Any) -> Iterator[Any]:
    for equation in program.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def compile_plain(params: dict[str, Any], types: list[Any], arch: int) -> Iterator[dict[str, Any]]:
    """Compile the plain Triton kernels of a launch and return their resource usage."""
    avals, names = dict(zip(params["names"], types, strict=True)), params["names"]
    for launch in launches_of(params["launch"]):
        arrays = arrays_of(launch, avals, names[-params["num_changed"] :])
        yield compile_one(launch, arrays, arch)


def type_of(value: Any) -> str | None:
    """Return the type of a pointer, or of a descriptor of a tensor."""
    if hasattr(value, "block_shape"):
        sizes = ",".join(map(str, value.block_shape))
        return f"tensordesc<{NAMES[value.base.dtype.name]}[{sizes}]>"
    return f"*{NAMES[value.dtype.name]}" if hasattr(value, "dtype") else None


def compile_one(launch: Launch, arrays: dict[str, Any], arch: int) -> dict[str, Any]:
    """Compile a kernel and return its resource usage."""
    kernel, facts = kernel_of(launch), list[Described]()

    def describe(arrays: dict[str, Any]) -> None:
        arguments = arguments_of(kernel, launch, arrays, has_tma=arch >= 90)
        facts.append(described(kernel, arguments, type_of))

    jax.eval_shape(describe, arrays)
    stages = stages_of(launch, arrays["q"].dtype.itemsize, arch)
    options = {"num_warps": launch.warps, "num_stages": stages, "enable_fp_fusion": True}
    return {"kernel": launch.kernel, **cubins.compiled(kernel, facts[0], arch, **options)}


def compile_for_hopper(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compile the kernels of a call's Hopper launches and return their resource usage."""
    from ring_jax_gpu.hopper import ffi, run

    modules: list[Any] = []

    def keep(module: Any, *_: Any) -> bytes:
        modules.append(module)
        return b""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ffi, "_serialized_launch", keep)
        patched.setattr(run, "_processors", lambda: 132)
        for params, types in launches_in(call):
            if params["launch"].hopper:
                launch, names = params["launch"], params["names"]
                jax.eval_shape(
                    lambda *x, launch=launch, names=names: run.run(
                        launch, dict(zip(names, x, strict=True))
                    ),
                    *types,
                )
    for module in modules:
        taken = taken_by(module.ptx, assembled(module.ptx), module.shared)
        digest = hashlib.sha256(module.ptx.encode()).hexdigest()
        yield {"kernel": module.name, "warps": module.num_warps, "digest": digest, **taken}


def trace(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Trace a call's launches, down to what jax-triton is called with, and compile nothing."""
    for params, types in launches_in(call):
        launch, names = params["launch"], params["names"]
        run = partial(_run_plain, launch, names[-params["num_changed"] :], 80)
        results = jax.eval_shape(run, dict(zip(names, types, strict=True)))
        largest = max(dict(launch.numbers).values())
        yield {"largest": largest, "shapes": [x.shape for x in results.values()]}


def answer(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compile calls for a compute capability."""
    for call in question["calls"]:
        jax.clear_caches()  # the step is no part of jax's cache keys
        if call.get("hopper") or call.get("traced"):
            yield from (trace if call.get("traced") else compile_for_hopper)(call)
            continue
        for params, types in launches_in(call):
            yield from compile_plain(params, types, question["arch"])


if __name__ == "__main__":
    serve(answer)
