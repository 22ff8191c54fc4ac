"""What can do a call, which of it is fastest, and how tokens lie best.

May import ``programs`` and what is below it.
"""
