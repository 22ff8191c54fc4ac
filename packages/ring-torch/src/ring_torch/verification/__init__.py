"""Comparison of a model on a ring with the same model whole, on one batch.

Facts that are told or read of a model can be wrong. So the model is run: once split over the ring,
and twice whole on every rank, its attention computed in two ways. The difference of the two whole
runs is noise; the split run may differ by a few times that.

- ``trace`` keeps what modules are given and return, as a few numbers a token.
- ``runs`` runs a batch, and puts everything back; ``plain`` says how for a model that is given its
  rank's tokens, ``hf.verification`` for one of transformers.
- ``judgement`` compares the runs, and names the module that is to blame.

May import ``gradients`` and what is below it.
"""
