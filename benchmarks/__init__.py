"""Benchmarks, run from the root as modules: ``python -m benchmarks.torch.scaling``."""
