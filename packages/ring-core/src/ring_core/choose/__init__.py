"""Choices by what kernels can do, by measured times, and by how evenly layouts share the work.

May import ``programs`` and what is below it.
"""
