"""Command line tools: ``doctor``, ``matrix`` and ``bench``.

They may import everything in this package.
"""
