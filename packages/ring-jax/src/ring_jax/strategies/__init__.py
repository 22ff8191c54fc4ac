"""How tokens move so that each work item finds its operands.

May import ``kernels``, ``collectives``, ``overlap``, ``rank_view`` and ``records``. A new strategy
is one file here.
"""
