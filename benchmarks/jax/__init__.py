"""Benchmarks of ring-jax: ``several`` over GPUs, ``scaling`` and ``options`` on one GPU.

``tpu_static`` needs no accelerator. ``columns`` has the methods on one GPU, ``methods`` those over
several; ``alone`` leaves out communication, ``profile`` reads traces, and ``bundles`` the machine
code of TPU kernels.
"""
