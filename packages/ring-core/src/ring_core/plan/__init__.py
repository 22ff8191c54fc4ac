"""Plans: for any pair of ranks the work items, from a mask and the layouts.

May import ``masks``, ``layouts``, ``base`` and ``checks``.
"""
