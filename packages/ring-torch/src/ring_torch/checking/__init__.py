"""Checks of a running job that attention and movements share: which calls, and their bytes.

``settings`` decides which calls are checked; ``watch`` counts what they send, and tells all ranks
what any has found. May import ``transports`` and what is below it, and knows nothing of attention.
"""
