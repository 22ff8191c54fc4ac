"""Compare a model on a ring with the same model whole, on one batch.

What is known of a model by its classes can be wrong for one that nobody has seen. So it is run:
once split over the ring, and twice whole on every rank, with two attentions of transformers. The
difference of the two whole runs is noise; the split run may differ by a few times that.

- ``trace`` keeps what every module was given and returned, and compares two such traces.
- ``state`` puts a model back as it was.
- ``runs`` runs the batch, split and whole.
- ``judgement`` decides if differences are rounding, and names the module that is to blame.
"""
