"""Benchmarks of ring-torch: ``scaling`` over GPUs, ``options`` on one, ``cpu`` on none.

``methods`` has what is timed, ours and others; ``cases`` makes the tensors of a row; ``alone``
leaves out communication; ``fa4_by_hand`` and ``fa4_mods`` call FlashAttention-4 as fast as it goes.
"""
