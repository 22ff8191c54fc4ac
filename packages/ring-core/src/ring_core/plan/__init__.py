"""What meets what: for any pair of ranks the work items, by mask and layouts.

May import ``masks``, ``layouts``, ``base`` and ``checks``.
"""
