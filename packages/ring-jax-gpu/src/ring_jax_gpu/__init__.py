"""Kernels of ring attention in JAX for NVIDIA GPUs: Triton kernels and cuDNN's attention.

``ring_jax`` takes them by itself once this package is there; :func:`ring_jax.ring_attention` and
:class:`ring_jax.ContextParallel` have these names here, too. ``kernel="auto"`` takes ``triton``, or
``cudnn`` where it can do a call and was measured to be faster; on other platforms, and for calls
that both refuse, another kernel. Triton and jax-triton are imported when a program is compiled for
a GPU.
"""

from ring_jax import (
    ContextParallel as ContextParallel,
    KernelConfig as KernelConfig,
    Mask as Mask,
    UnsupportedError as UnsupportedError,
    ring_attention as ring_attention,
)
from ring_jax.records import Kernel
from ring_jax_gpu.cudnn import CudnnKernel as CudnnKernel
from ring_jax_gpu.kernel import TritonKernel as TritonKernel
from ring_jax_gpu.xla_flags import set_xla_flags as set_xla_flags

__version__ = "0.1.0"

#: The entry point of the group ``ring_jax.kernels``.
KERNELS: tuple[Kernel, ...] = (TritonKernel(), CudnnKernel())
