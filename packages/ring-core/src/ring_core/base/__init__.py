"""What all else stands on: errors, checks of values, merging, what kernels can.

Imports nothing of the package. A new check of a plain value goes into ``arguments``.
"""
