"""Kernels of ring attention in JAX for TPUs, in Pallas (Mosaic).

``ring_jax`` takes them by itself once this package is there; :func:`ring_jax.ring_attention` and
:class:`ring_jax.ContextParallel` have these names here, too. On other platforms, and for calls that
the kernels refuse, ``kernel="auto"`` takes another kernel.
"""

from ring_jax import (
    ContextParallel as ContextParallel,
    KernelConfig as KernelConfig,
    Mask as Mask,
    UnsupportedError as UnsupportedError,
    ring_attention as ring_attention,
)
from ring_jax.records import Kernel
from ring_jax_tpu.kernel import PallasKernel as PallasKernel

__version__ = "0.1.0"

#: Kernels that ``ring_jax`` finds by this package's entry point in the group ``ring_jax.kernels``.
KERNELS: tuple[Kernel, ...] = (PallasKernel(),)
