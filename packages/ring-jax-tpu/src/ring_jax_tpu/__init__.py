"""Pallas (Mosaic TPU) kernels for ring attention in JAX. A placeholder: nothing can be called yet.

This package will hold the forward and backward kernels, and later a ring whose transfers run inside
the kernel; the loop that runs them is in ``ring_jax``.
"""

__version__ = "0.1.0"
