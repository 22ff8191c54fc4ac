"""Models of transformers: which of them are exact on split sequences, and how their batches split.

It imports nothing of transformers, and of ``ring_torch`` only ``training.part``, ``gradients``,
``sharding`` and modules below these.
"""
