"""Sums of a model's gradients over ranks, and what keeps a gradient from being counted twice.

May import ``comm`` and what is below it. ``reduce`` sums all gradients after a backward,
``each`` sums each one as soon as the backward has made it, and ``guards`` remembers what is summed.
"""
