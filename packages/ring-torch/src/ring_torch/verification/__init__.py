"""Comparison of a model on a ring with the same model whole, on one batch.

Facts that are told or read of a model can be wrong. So the model is run: once split over the ring,
and twice whole on every rank, its attention computed in two ways. The difference of the two whole
runs is noise; the split run may differ by a few times that.

- ``trace`` keeps the inputs and outputs of every module, ``comparison`` compares two such traces.
- ``state`` restores a model.
- ``runs`` runs the batch; ``hf`` and ``replaced`` say how: what is split, and what is whole.
- ``judgement`` decides if differences are rounding, and names the module that is to blame.

May import ``gradients`` and what is below it.
"""
