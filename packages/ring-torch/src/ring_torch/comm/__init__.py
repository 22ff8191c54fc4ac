"""Ranks and how they agree: groups, messages, signatures of calls, shared memory.

Knows no attention. May import ``buffers`` and ``capture``. Another way to agree is one file here.
"""
