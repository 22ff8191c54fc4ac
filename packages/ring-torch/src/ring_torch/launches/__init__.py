"""Launches made once and repeated: caches of them, and Triton kernels launched directly."""
