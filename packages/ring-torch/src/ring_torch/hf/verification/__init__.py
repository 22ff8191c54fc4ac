"""Verification of a parallelized model of transformers: its batch, and its runs split and whole.

- ``verify`` checks the batch and the model's wrappers, then has the runs compared.
- ``runs`` runs a batch, split or whole: for the latter it undoes what ``parallelize`` has changed.

``ring_torch.verification`` records, compares and judges. May import it, ``hf.batch`` and what is
below these.
"""
