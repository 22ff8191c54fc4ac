"""Command line, doctor and bench, and the parts that commands of other packages share.

May import all of the package.
"""
