"""Programs: a plan in time, what moves when, for one way to execute it.

May import ``plan`` and what is below it. A new strategy is one file here.
"""
