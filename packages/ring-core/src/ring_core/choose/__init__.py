"""Choices by what kernels can do, by memory and bytes, and by how evenly layouts share the work.

May import ``programs`` and what is below it.
"""
