"""How tokens move so that each work item finds its operands, forward and backward.

May import ``kernels``, ``collectives``, ``rank_view`` and ``records``. A new strategy is a loop and
a line of ``STRATEGIES`` in ``loops``.
"""
