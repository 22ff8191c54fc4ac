"""The command line: doctor, support matrix and bench.

May import all of the package.
"""
