"""Resource usage of kernels compiled for NVIDIA GPUs: registers, shared memory, stack, spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

#: Dtypes as Triton abbreviates them.
NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64",
    "uint8": "u8", "int8": "i8",
}  # fmt: skip


def assembled(ptx: str) -> bytes:
    """Assemble PTX for Hopper, as Triton does."""
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, backend.parse_options({"enable_fp_fusion": True}), Language.TRITON)
    cubin: bytes = stages["cubin"](ptx, {})
    return cubin


Described = tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]


def described(
    kernel: Any, arguments: Mapping[str, Any], type_of: Callable[[Any], str | None]
) -> Described:
    """Return a launch's signature, constants and alignment hints, as Triton would derive them.

    ``type_of`` returns the type of an argument that is memory, or ``None``.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for n, (name, value) in enumerate(arguments.items()):
        parameter = kernel.params[n]
        is_general = parameter.do_not_specialize
        if (memory := type_of(value)) is not None:
            signature[name], is_aligned = memory, memory[0] == "*"
        elif isinstance(value, int) and not parameter.is_constexpr and (value != 1 or is_general):
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            is_aligned = value % 16 == 0 and not is_general
        else:
            signature[name], constants[name], is_aligned = "constexpr", value, False
        if is_aligned:
            aligned[n,] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def compiled(kernel: Any, described: Described, arch: int, **options: Any) -> dict[str, Any]:
    """Compile a kernel for a compute capability and return its resource usage."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, *described)
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = result.asm["ptx"]
    barriers = {"barriers": ptx.count("bar.sync")}
    return taken_by(ptx, result.asm["cubin"], result.metadata.shared) | barriers


def taken_by(ptx: str, cubin: bytes, shared: int) -> dict[str, Any]:
    """Return a compiled kernel's resource usage and the instructions it relies on."""
    from triton.knobs import nvidia

    def said(*command: str) -> str:
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
        return done.stdout

    is_warp_specialised = "setmaxnreg" in ptx
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = said(nvidia.cuobjdump.path, "-res-usage")
        # Only warp-specialised kernels are disassembled: it takes a second for each.
        code = said(nvidia.nvdisasm.path, "-c") if is_warp_specialised else None
    usage = {name: int(x) for name, x in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return {
        "shared": shared, "stack": usage["STACK"] + usage["LOCAL"],
        "ptx": "wgmma" if "wgmma" in ptx else "mma", "copies": "cp.async.bulk.tensor" in ptx,
        "warp_specialised": is_warp_specialised,
        "spilled": None if code is None else spilled_in_loop(code), "bare": bare_arrivals(ptx),
    }  # fmt: skip


def bare_arrivals(ptx: str) -> list[str]:
    """Return arrivals at mbarriers with no barrier of the arriving warps right before them.

    One thread arrives on behalf of all, so the others must have finished their reads before it.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    return [
        line
        for n, line in enumerate(lines)
        if "mbarrier.arrive.shared" in line
        and not any(re.match(r"bar(\.warp)?\.sync", before) for before in lines[n - 5 : n])
    ]


def spilled_in_loop(code: str) -> int:
    """Count loads and stores of spilled registers in the shortest loop that has a GMMA."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(match[1])
    jumps = [(re.search(r"BRA.*`\((\S+)\)", x), n) for n, x in enumerate(instructions)]
    loops = [instructions[labels[to[1]] : n] for to, n in jumps if to and labels[to[1]] <= n]
    loops = [loop for loop in loops if any("GMMA" in x for x in loop)]
    return sum(bool(re.search(r"\b(LDL|STL)\b", x)) for x in min(loops, key=len, default=[]))
