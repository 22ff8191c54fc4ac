"""Bytes that ranks send and hold, a file for each strategy that ships with Ring.

A new count is one file here, which ends in its :class:`~ring_core.cost.counts.api.Count`, and an
entry of ``COUNTED`` in ``ring_core.cost.sent``.
"""
