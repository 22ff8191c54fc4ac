"""Tools for developers: what another commit computes and takes, and what takes time where.

``old_and_new`` times two source trees in turns, in processes that run ``timed_rows``; ``same_bits``
compares their results bit for bit, by ``case_bits``. ``host_time`` and ``host_causes`` say what a
call costs the host, and where, also on CPUs with the launches of ``host_stubs``. ``tpu_static``
counts instructions in the machine code of TPU kernels, ``tpu_exposed`` bytes that none of them
hides.
"""
