"""Ring attention for JAX with kernels for NVIDIA GPUs first in line: those in Triton and cuDNN's.

:func:`ring_attention` and :class:`ContextParallel` are those of ``ring_jax``. ``kernel="auto"``
takes ``triton``, or ``cudnn`` where it can do a call and was measured to be faster; on other
platforms, and for what both refuse, ``xla``. Triton and jax-triton are imported
when a program is compiled for a GPU.
"""

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
from ring_jax_gpu.xla_flags import set_xla_flags as set_xla_flags

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
