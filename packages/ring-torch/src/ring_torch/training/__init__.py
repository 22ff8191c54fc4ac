"""Helpers of a training loop: losses of a rank's tokens, and batches for the ranks of a ring.

May import ``context`` and what is below it. ``part`` is the one place that computes a rank's part
of cross entropy, for ``loss`` and for ``hf``; ``loss`` also asks the other ranks for their labels.
``data`` yields batches.
"""
