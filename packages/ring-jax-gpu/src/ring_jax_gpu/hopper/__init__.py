"""Warp-specialised kernels for Hopper in Gluon, and how they are called.

May import ``launch``. A new pass is one file here and a line in ``run``.
"""
