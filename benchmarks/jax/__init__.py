"""Benchmarks of ring-jax: ``scaling`` over GPUs, ``options`` on one."""
