"""Launch compiled Triton kernels from JAX by its FFI, where jax-triton cannot.

jax-triton launches as many warps as it was asked to compile for, but a warp-specialised kernel has
more, as its metadata says. And it accepts arrays in row-major layout only. So these kernels are
launched from here, through the same FFI target.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ring_jax.records import Array

Layout = tuple[int, ...]
BTHD: Layout = (0, 2, 1, 3)  # [B, H, T, D] that lies in memory as [B, T, H, D]

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
_WARP, _HOPPER = 32, 90


@dataclass(frozen=True)
class TileDescriptor:
    """A descriptor of the tensor memory accelerator (TMA), which kernels fetch blocks through.

    Attributes:
        shape: The array as the kernel sees it: ``[rows, columns]``, ``[2, row pairs, columns]``, or
            ``[rows]``.
        block: Shape of the block that one fetch brings.
        strides: Strides in elements; the last one is 1.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class OutArray:
    """A kernel parameter that is a result, in new memory."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None = None


@dataclass(frozen=True, eq=False)
class InArray:
    """A kernel parameter that is an array of the caller."""

    array: Array
    tiles: TileDescriptor | None = None  # pass a descriptor in place of a pointer
    changed: bool = False  # the kernel updates it
    layout: Layout | None = None


Parameter = InArray | OutArray | int | None
Call = Callable[..., dict[str, Array]]  # :func:`call`, or what takes its place


def call(
    kernel: Any, parameters: Mapping[str, Parameter], constants: Mapping[str, Any], *, warps: int,
    programs: int,
) -> dict[str, Array]:  # fmt: skip
    """Launch a kernel.

    Args:
        kernel: The kernel.
        parameters: Its run-time parameters, in order; no array of the caller follows a result.
        constants: Its compile-time parameters.
        warps: Number of warps that it is compiled for.
        programs: Number of thread blocks.

    Returns:
        The results and the changed arrays, by name.
    """
    inputs = {name: x for name, x in parameters.items() if isinstance(x, InArray)}
    outputs = {name: x for name, x in parameters.items() if isinstance(x, OutArray)}
    order = [name for name in parameters if name in inputs or name in outputs]
    assert order == [*inputs, *outputs], f"results come last, not {order}"
    module = compiled(*_compilation(kernel, parameters, constants, warps))
    changed = {name: x for name, x in inputs.items() if x.changed}
    spec: Any = jax.ShapeDtypeStruct
    returned: list[Any] = [*outputs.values(), *(x.array for x in changed.values())]
    names = [*outputs, *changed]
    results = jax.ffi.ffi_call(
        "triton_kernel_call_ffi",
        [spec(x.shape, x.dtype) for x in returned],
        input_layouts=[x.layout for x in inputs.values()],
        output_layouts=[x.layout for x in outputs.values()] + [x.layout for x in changed.values()],
        input_output_aliases={list(inputs).index(name): names.index(name) for name in changed},
    )(
        *(x.array for x in inputs.values()),
        opaque=_serialized_launch(module, list(parameters.values()), programs),
    )
    return dict(zip(names, results, strict=True))


def compile_together(
    steps: Callable[[dict[str, Array], Call], Any], arrays: dict[str, Array]
) -> None:
    """Compile all kernels that ``steps`` calls at once, in threads; its calls then find them.

    Triton holds Python's lock for a small part of a compilation.
    """
    compilations: list[Any] = []

    def note(
        kernel: Any, parameters: Mapping[str, Parameter], constants: Mapping[str, Any], *,
        warps: int, programs: int,
    ) -> dict[str, Array]:  # fmt: skip
        del programs
        compilations.append(_compilation(kernel, parameters, constants, warps))
        return {
            name: jnp.zeros(x.shape, x.dtype) if isinstance(x, OutArray) else x.array
            for name, x in parameters.items()
            if isinstance(x, OutArray) or (isinstance(x, InArray) and x.changed)
        }

    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    jax.eval_shape(lambda arrays: steps(arrays, note), shapes)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda x: compiled(*x), compilations))


def _compilation(
    kernel: Any, parameters: Mapping[str, Parameter], constants: Mapping[str, Any], warps: int
) -> tuple[Any, Any, Any, int]:
    """Return what a kernel is compiled for: the arguments of :func:`compiled`."""
    types = tuple((name, type_name(x)) for name, x in parameters.items())
    return kernel, types, tuple(constants.items()), warps


def type_name(parameter: Parameter) -> str:
    """Return the type of a parameter as Triton writes it."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    if parameter is None:
        return "constexpr"
    if isinstance(parameter, int):
        return "i32" if parameter < 2**31 else "i64"
    dtype = parameter.dtype if isinstance(parameter, OutArray) else parameter.array.dtype.name
    kind = _TYPES[str(dtype)]
    if isinstance(parameter, OutArray) or parameter.tiles is None:
        return f"*{kind}"
    block, bits = parameter.tiles.block, 32 if kind.endswith("32") else 16
    layout = NVMMASharedLayout(128 if len(block) > 1 else 0, bits, len(block))
    return f"tensordesc<{kind}[{','.join(map(str, block))}],{layout!r}>"


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled kernel: its PTX, and what a launch has to know of it.

    Attributes:
        name: Name of the entry point.
        num_warps: Warps of a thread block, all roles together.
        shared: Bytes of shared memory of a thread block.
        descriptors: Of each TMA descriptor, in their order, what Triton chose.
        ptx: The code, which jaxlib assembles, in every process.
    """

    name: str
    num_warps: int
    shared: int
    descriptors: Sequence[Mapping[str, Any]]
    ptx: str


@lru_cache(maxsize=256)
def compiled(
    kernel: Any, types: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...],
    warps: int,
) -> Module:  # fmt: skip
    """Compile a kernel for Hopper with Triton, which needs no GPU; take it from Triton's cache.

    ``triton.compile`` would assemble the PTX as well, which takes a third of its time.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars, ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import get_cache_key, get_cache_manager

    assert [*(name for name, _ in types), *dict(constants)] == kernel.arg_names
    aligned = {
        (n,): [["tt.divisibility", 16]] for n, (_, kind) in enumerate(types) if kind[0] == "*"
    }
    values = {name: None for name, kind in types if kind == "constexpr"} | dict(constants)
    signature = dict(types) | dict.fromkeys(dict(constants), "constexpr")
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, signature, values, aligned
    )
    target = GPUTarget("cuda", _HOPPER, _WARP)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True})
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    cache = get_cache_manager(hashlib.sha256(f"ring-{key}".encode()).hexdigest())
    file = f"{source.name}.ptx.json"
    if (path := cache.get_file(file)) is None:
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        helpers = backend.get_codegen_implementation(options)
        code = source.make_ir(target, options, helpers, backend.get_module_map(), context)
        metadata: dict[str, Any] = dict(vars(options))
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        del stages["cubin"]
        for stage in stages.values():
            code = stage(code, metadata)
        module = {name: metadata[name] for name in ("name", "num_warps", "shared")}
        module |= {"descriptors": metadata["tensordesc_meta"], "ptx": code}
        path = cache.put(json.dumps(module), file, binary=False)
    return Module(**json.loads(Path(path).read_text()))


def _serialized_launch(module: Module, parameters: Sequence[Parameter], programs: int) -> bytes:
    """Return a launch as bytes that the FFI target reads, as jax-triton makes them."""
    from jaxlib import gpu_triton
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    kernel = gpu_triton.TritonKernel(
        module.name, module.num_warps, 1, module.shared, module.ptx, "", _HOPPER
    )
    descriptors = iter(module.descriptors)
    arguments = []
    for x in parameters:
        if isinstance(x, int):
            arguments.append(gpu_triton.create_scalar_parameter(x, type_name(x)))
        elif isinstance(x, InArray) and x.tiles is not None:
            meta, tiles = next(descriptors), x.tiles
            arguments.append(
                gpu_triton.create_tma_descriptor_parameter(
                    elem_type=TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], swizzle=meta["swizzle"],
                    shape=tiles.shape, strides=tiles.strides, block_shape=meta["block_size"],
                    oob_fill=0,
                )
            )  # fmt: skip
            arguments += [gpu_triton.create_scalar_parameter(n, "i32") for n in tiles.shape]
            arguments += [gpu_triton.create_scalar_parameter(n, "i64") for n in tiles.strides]
        elif x is not None:
            arguments.append(gpu_triton.create_array_parameter(0, 16))
    launch = gpu_triton.TritonKernelCall(kernel, programs, 1, 1, arguments)
    return zlib.compress(launch.to_proto(module.name, b""))
