"""Ring attention for JAX with kernels for NVIDIA GPUs first in line: those in Triton and cuDNN's.

:func:`ring_attention` and :class:`ContextParallel` are those of ``ring_jax``. ``kernel="auto"``
takes ``triton``, or ``cudnn`` where it can do a call and was measured to be faster; on other
platforms, and for what both refuse, ``xla``. Triton and jax-triton are imported
when a program is compiled for a GPU.
"""

import os
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any, ClassVar

import ring_jax
from ring_jax import (
    KernelConfig as KernelConfig,
    Mask as Mask,
    UnsupportedError as UnsupportedError,
)
from ring_jax.attention import RingAttention
from ring_jax.kernels.xla import XlaKernel
from ring_jax.records import Kernel
from ring_jax_gpu.cudnn import CudnnKernel as CudnnKernel
from ring_jax_gpu.kernel import TritonKernel as TritonKernel

__version__ = "0.1.0"

KERNELS: tuple[Kernel, ...] = (TritonKernel(rounds=True), CudnnKernel(), XlaKernel())


def _with_kernels[Function: Callable[..., Any]](attention: Function) -> Function:
    """Let the kernels know of options that are none of theirs.

    With sinks the result is scaled after the kernel, so it must not be rounded before; and where
    the backward has to repeat bit for bit, the fused one is refused.
    """

    @wraps(attention)
    def checked(self: Any, *arrays: Any, **options: Any) -> Any:
        fused = getattr(options.get("kernel"), "fused_backward", None)
        repeats, has_sinks = options.get("deterministic") is True, options.get("sinks") is not None
        if repeats and fused:
            raise UnsupportedError(
                "kernel 'triton': fused_backward=True adds to dQ in an order that differs from run "
                "to run, which deterministic=True rules out. Instead: leave out fused_backward"
            )
        if repeats or has_sinks:
            self = copy(self)
            triton = TritonKernel(repeats=repeats, rounds=not has_sinks)
            object.__setattr__(self, "kernels", (triton, CudnnKernel(), XlaKernel()))
        return attention(self, *arrays, **options)

    return checked  # type: ignore[return-value]


class _RingAttention(RingAttention):
    __call__ = _with_kernels(RingAttention.__call__)


ring_attention = _RingAttention(KERNELS)


class ContextParallel(ring_jax.ContextParallel):
    """:class:`ring_jax.ContextParallel` with these kernels."""

    kernels: ClassVar[tuple[Kernel, ...]] = KERNELS

    attention = _with_kernels(ring_jax.ContextParallel.attention)
    explain = _with_kernels(ring_jax.ContextParallel.explain)


#: Flags that jaxlib 0.11 and 0.12 know, and why a ring may want them.
XLA_FLAGS = {
    # Moves K/V and gradients by the copy engines. NCCL's kernels need processors, and the forward
    # for Hopper holds all of them until it ends. Among GPUs of one process; else no change.
    "xla_gpu_collective_permute_mode": "peer",
    # In the backward K/V and gradients are on their way at once. With the default of one transfer,
    # XLA makes the second one wait: over P ranks, P - 3 hops of K/V then run beside no kernel.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
}


def set_xla_flags() -> dict[str, str]:
    """Set flags of XLA that let a ring over GPUs send while it computes.

    They are added to the environment variable ``XLA_FLAGS``, which JAX reads once, when it first
    needs a device: call this before. A flag that is in there already stays as it is.

    - ``xla_gpu_collective_permute_mode=peer``: copy engines move what NCCL's kernels would, which
      wait for processors that attention kernels hold. Among GPUs of one process; elsewhere it
      changes nothing.
    - ``xla_gpu_experimental_parallel_collective_overlap_limit=2``: in the backward K/V and
      gradients travel at once, where XLA would let one of them wait.

    What they gain depends on the program and the machine: measure with and without.

    Returns:
        The flags that were added, with their values.

    Raises:
        ValueError: JAX has started already, or ``XLA_FLAGS`` names a file.
    """
    from jax._src.xla_bridge import backends_are_initialized

    if backends_are_initialized():
        raise ValueError(
            "set_xla_flags() came too late: JAX has started, and reads XLA_FLAGS only once. Call "
            "it before the first array, jax.devices() or jit runs, or set in the environment: "
            f"XLA_FLAGS='{_written(XLA_FLAGS)}'"
        )
    given = os.environ.get("XLA_FLAGS", "").strip()
    if given and not given.startswith("-"):
        raise ValueError(
            f"XLA_FLAGS={given!r} names a file of flags, to which none can be added here. Write "
            f"these into it: {_written(XLA_FLAGS)}"
        )
    known = {flag.removeprefix("--").partition("=")[0] for flag in given.split()}
    added = {name: value for name, value in XLA_FLAGS.items() if name not in known}
    if added:
        os.environ["XLA_FLAGS"] = f"{given} {_written(added)}".lstrip()
    return added


def _written(flags: dict[str, str]) -> str:
    return " ".join(f"--{name}={value}" for name, value in flags.items())
