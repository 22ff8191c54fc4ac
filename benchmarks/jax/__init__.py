"""Benchmarks of ring-jax: ``scaling`` over GPUs, ``options`` on one.

``columns`` has the methods on one GPU, ``methods`` those over several.
"""
