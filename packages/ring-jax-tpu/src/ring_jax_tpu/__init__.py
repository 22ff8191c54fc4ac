"""Ring attention for JAX with Pallas (Mosaic) kernels for TPUs.

:func:`ring_attention` and :class:`ContextParallel` are those of ``ring_jax`` with these kernels. On
other platforms, and for calls that the kernels refuse, ``kernel="auto"`` takes ``xla``.
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
from ring_jax_tpu.kernel import PallasKernel as PallasKernel

__version__ = "0.1.0"

KERNELS: tuple[Kernel, ...] = (PallasKernel(), XlaKernel())

ring_attention = RingAttention(KERNELS)


class ContextParallel(ring_jax.ContextParallel):
    """:class:`ring_jax.ContextParallel` with kernels for TPUs."""

    kernels: ClassVar[tuple[Kernel, ...]] = KERNELS
