"""Command line, doctor, bench: what people run, and what other packages' commands share.

May import all of the package.
"""
