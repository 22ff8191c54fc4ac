"""Benchmarks of ring-torch: ``scaling`` over GPUs, ``options`` on one, ``model`` of a whole step.

``methods`` has the methods to time, ours and others'; ``cases`` makes the tensors of a row;
``alone`` leaves out communication; ``fa4_by_hand`` and ``fa4_mods`` call FlashAttention-4 as fast
as it goes; ``bench_command`` keeps what ``python -m ring_torch bench`` prints.
"""
