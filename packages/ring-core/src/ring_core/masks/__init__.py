"""Masks: the rule that says which query sees which key, over global positions.

May import ``base``. A new rule is a field of ``Mask``; if it is a band, its algebra
is in ``band``.
"""
