"""Errors, checks of plain values, merging, and the records of what kernels can do.

Imports nothing of the package. A new check of a plain value goes into ``arguments``.
"""
