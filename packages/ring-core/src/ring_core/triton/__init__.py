"""Flash attention kernels in Triton, without a framework: ring_torch and ring_jax_gpu launch them.

:mod:`ring_core.triton.tile_configs` says how large blocks are and needs no Triton. The kernels are
imported only by the packages that launch them: ``fwd`` of :mod:`ring_core.triton.forward`, and
``bwd_dq``, ``bwd_dkv`` and ``bwd_dbias`` of :mod:`ring_core.triton.backward`.
"""
