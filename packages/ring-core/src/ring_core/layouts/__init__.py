"""Layouts: the rule that says which rank holds which token.

May import ``base``. A new layout is a name in ``layout`` and its runs.
"""
