"""Triton kernels in Triton's interpreter, called from JAX on host devices.

Triton reads ``TRITON_INTERPRET`` when it is imported and from then on interprets every kernel of
the process; kernels are compiled in another process. The interpreter patches ``triton.language``
while a kernel runs, so kernels run one at a time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
from cases import Case
from jax.interpreters import mlir

import backends.quick_interpreter  # noqa: F401 - sets the environment, too
from backends import jax_devices
from backends.cubins import NAMES
from backends.jax_devices import Arrays, JaxBackend, Ways
from ring_core import KernelConfig
from ring_jax_gpu import ring_attention
from ring_jax_gpu.launch import Launch, arguments_of, arrays_of, kernel_of, launches_of
from ring_jax_gpu.primitive import triton_launch_p

Array = npt.NDArray[Any]

_ONE_AT_A_TIME = threading.Lock()


class HostArray:
    """Numpy memory with the tensor interface that Triton's interpreter expects of torch.

    It is its own storage, and on the host; strides are not needed.
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        self.dtype = NAMES[array.dtype.name]
        self.cpu = self.untyped_storage = lambda: self
        self.new_empty = lambda *_, **__: HostArray(array)
        self.storage_offset, self.stride = (lambda: 0), (lambda: ())

    def data_ptr(self) -> int:
        """Return the address."""
        return int(self.array.ctypes.data)

    def size(self) -> tuple[int, ...]:
        """Return the shape."""
        return self.array.shape

    def set_(self, storage: HostArray, *_: Any) -> None:
        """Point at some memory."""
        self.array = storage.array

    def copy_(self, other: HostArray) -> None:
        """Do nothing: the kernel wrote to this memory already."""
        assert other.data_ptr() == self.data_ptr()


def _repair_bfloat16() -> None:
    """Patch the interpreter, whose dot multiplies bfloat16 bits as integers and truncates."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(x.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, x: Any, dtype: Any) -> Any:
        if dtype.scalar == tl.bfloat16 and x.dtype.scalar == tl.float32:
            return TensorHandle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        if dtype.scalar == tl.float32:
            x = widened(x)
        return cast(self, x, dtype)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(InterpreterBuilder, name, cast_impl)


_repair_bfloat16()


def interpret(
    *arrays: Array, launch: Launch, names: tuple[str, ...], num_changed: int
) -> list[Array]:
    """Run a kernel on copies of arrays and return those that it changed."""
    copies: Any = {name: np.array(x) for name, x in zip(names, arrays, strict=True)}
    changed = names[len(names) - num_changed :]
    for name in changed:  # Hopper kernels write these outputs to new memory
        is_new = "before" in copies and name == "out"
        if is_new or (dict(launch.consts)["OVERWRITE"] and name != "dq"):
            copies[name][...] = np.nan
    for part in launches_of(launch):
        known = arrays_of(part, copies, changed)
        arguments = arguments_of(kernel_of(part), part, known, has_tma=False)
        views = {id(x): HostArray(x) for x in copies.values()}
        launch_arguments = {name: views.get(id(x), x) for name, x in arguments.items()}
        with _ONE_AT_A_TIME, np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about maxima of NaN
            kernel_of(part)[part.grid](**launch_arguments)
    return [copies[name] for name in changed]


def _lower(context: Any, *operands: Any, **params: Any) -> Any:
    def call(*arrays: Any) -> Any:
        changed = arrays[-params["num_changed"] :]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed]
        # The module's function: tests replace it.
        return jax.pure_callback(lambda *x: interpret(*x, **params), results, *arrays)

    return mlir.lower_fun(call)(context, *operands)


mlir.register_lowering(triton_launch_p, _lower, platform="cpu")


#: Ways to run a case: one block holds it, many do, and a backward in one kernel.
WAYS = {
    "triton": KernelConfig("triton"),
    "small blocks": KernelConfig("triton", block_q=16, block_k=16),
    "fused": KernelConfig("triton", block_q=16, block_k=32, fused_backward=True),
}


class TritonBackend(JaxBackend):
    """Backend that runs a case on host devices, one a rank, with kernels in the interpreter."""

    def __init__(self) -> None:
        super().__init__(ring_attention)

    def _run(self, case: Case, ways: Ways, make: Callable[..., Any]) -> Arrays:
        kernel, strategy = ways
        config = WAYS[kernel] if isinstance(kernel, str) else kernel
        return super()._run(case, (config, strategy), make)


def alone(case: Case, config: KernelConfig) -> Arrays:
    """Run a case on one device, without a ring."""
    return jax_devices.alone(case, config, ring_attention)
