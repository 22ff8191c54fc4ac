"""Triton kernels for ring attention in JAX. A placeholder: nothing can be called yet.

This package will hold the forward and backward kernels and their call through
``jax_triton.triton_call``; the loop that runs them is in ``ring_jax``.
"""

__version__ = "0.1.0"
