"""Command line, doctor, bench, times of kernels.

May import all of the package.
"""
