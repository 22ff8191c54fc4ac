"""How tokens move so that each work item finds its operands, forward and backward.

May import ``call``, ``transports`` and what is below. A new strategy is one file here.
"""
