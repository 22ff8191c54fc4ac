"""Movements of sharded rows, for layers beside attention: shift, halo, join and relayout.

May import ``checking`` and what is below it, and knows nothing of attention. ``rows`` runs a
movement; ``methods`` are the methods of ``ContextParallel``: the checks of their arguments and the
forms of their results. A new movement is a kind in ``rows`` and its plan in ``ring_core.movement``.
"""
