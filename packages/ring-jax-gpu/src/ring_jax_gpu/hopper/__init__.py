"""Warp-specialised attention kernels for Hopper in Gluon, and their launch from JAX.

May import ``launch``. A new pass is one file here and a line in ``run``.
"""
