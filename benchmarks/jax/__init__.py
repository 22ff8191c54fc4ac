"""Benchmarks of ring-jax: ``scaling`` over GPUs, ``options`` on one, ``tpu_static`` on none.

``columns`` has what is timed on one GPU, ``methods`` what is over several; ``alone`` leaves out
communication, ``profile`` reads traces, and ``bundles`` the machine code of TPU kernels.
"""
