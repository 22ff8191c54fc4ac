"""The command line and the autotuner of tile sizes.

May import all of the package.
"""
