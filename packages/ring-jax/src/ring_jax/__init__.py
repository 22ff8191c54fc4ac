"""Exact ring attention for JAX. A placeholder: nothing can be called yet.

This package will hold the SPMD loop (``shard_map``, ``ppermute``, ``custom_vjp``) that executes a
``ring_core`` plan, and a kernel written in plain JAX that runs on any backend. Until then the name
is here so that the packages that depend on it can state the dependency.
"""

__version__ = "0.1.0"
