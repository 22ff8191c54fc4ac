"""Command line tools: ``doctor``, ``matrix``, ``explain`` and ``bench``.

They may import everything in this package.
"""
