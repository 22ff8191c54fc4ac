"""Command line, doctor, bench.

May import all of the package.
"""
