"""Ring attention for JAX with Triton kernels for NVIDIA GPUs first in line.

:func:`ring_attention` and :class:`ContextParallel` are those of ``ring_jax``. On other platforms,
and for what the kernels refuse, ``kernel="auto"`` takes ``xla``. Triton and jax-triton are imported
when a program is compiled for a GPU.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import ring_jax
from ring_jax import KernelConfig as KernelConfig
from ring_jax import Mask as Mask
from ring_jax import UnsupportedError as UnsupportedError
from ring_jax._attention import RingAttention
from ring_jax._types import Kernel
from ring_jax._xla import XlaKernel
from ring_jax_gpu._triton import TritonKernel as TritonKernel

__version__ = "0.1.0"

KERNELS: tuple[Kernel, ...] = (TritonKernel(), XlaKernel())


def _repeats[Function: Callable[..., Any]](attention: Function) -> Function:
    """Refuse the fused backward where the backward has to repeat bit for bit."""

    @wraps(attention)
    def checked(*arrays: Any, **options: Any) -> Any:
        fused = getattr(options.get("kernel"), "fused_backward", None)
        if options.get("deterministic") is True and fused:
            raise UnsupportedError(
                "kernel 'triton': fused_backward=True adds to dQ in an order that differs from run "
                "to run, which deterministic=True rules out. Instead: leave out fused_backward"
            )
        return attention(*arrays, **options)

    return checked  # type: ignore[return-value]


class _RingAttention(RingAttention):
    __call__ = _repeats(RingAttention.__call__)


ring_attention = _RingAttention(KERNELS)


class ContextParallel(ring_jax.ContextParallel):
    """:class:`ring_jax.ContextParallel` with these kernels."""

    kernels: ClassVar[tuple[Kernel, ...]] = KERNELS

    attention = _repeats(ring_jax.ContextParallel.attention)
