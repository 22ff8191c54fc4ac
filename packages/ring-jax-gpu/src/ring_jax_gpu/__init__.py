"""Ring attention for JAX with kernels for NVIDIA GPUs: Triton kernels and cuDNN's attention.

:func:`ring_attention` and :class:`ContextParallel` are those of ``ring_jax`` with these kernels.
``kernel="auto"`` takes ``triton``, or ``cudnn`` where it can do a call and was measured to be
faster; on other platforms, and for calls that both refuse, ``xla``. Triton and jax-triton are
imported when a program is compiled for a GPU.
"""

from typing import ClassVar

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

KERNELS: tuple[Kernel, ...] = (TritonKernel(), CudnnKernel(), XlaKernel())

ring_attention = RingAttention(KERNELS)


class ContextParallel(ring_jax.ContextParallel):
    """:class:`ring_jax.ContextParallel` with kernels for NVIDIA GPUs."""

    kernels: ClassVar[tuple[Kernel, ...]] = KERNELS
