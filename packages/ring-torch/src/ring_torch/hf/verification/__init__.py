"""Comparison of a model on a ring with the same model whole, on one batch.

Facts read from a model's classes can be wrong for a model that nobody has seen. So the model is
run: once split over the ring, and twice whole on every rank, with two attention implementations of
transformers. The difference of the two whole runs is noise; the split run may differ by a few times
that.

- ``trace`` keeps the inputs and outputs of every module, and compares two such traces.
- ``state`` restores a model.
- ``runs`` runs the batch, split and whole.
- ``judgement`` decides if differences are rounding, and names the module that is to blame.
"""
